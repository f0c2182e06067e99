"""Batch and heads over 8 fake devices: equal to one device, no collective, the named errors."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from running import both, collectives, normal, tile

import vsa_jax
from vsa_jax import TileLayout, block_sparse_attention, video_sparse_attention

LAYOUT = TileLayout([7, (5, 3, 4)], (2, 2, 2))
NAMES = ("query", "key", "value", "gate")


def mesh_of(kind, shape=(4, 2), names=("b", "h")):
  kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
  return jax.make_mesh(shape, names, axis_types=(kinds[kind],) * len(names))


def make(batch=4, heads=4, kv_heads=4, dim=8):
  """Cotangent, query, key, value, gate."""
  sizes = (heads, heads, kv_heads, kv_heads, heads)
  return [normal(i, batch, LAYOUT.num_tokens, n, dim) for i, n in enumerate(sizes)]


def attend(query, key, value, gate, **options):
  return video_sparse_attention(query, key, value, LAYOUT, sparsity=0.6, gate=gate, **options)


@functools.cache
def unsharded(**sizes):
  return jax.tree.map(np.asarray, both(attend)(*make(**sizes)))


def check(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(a), b, atol=3e-6)


# Batch and heads by one axis each: field reports H01 and H04.
SPECS = [P("b"), P(None, None, "h"), P(None, None, ("b", "h")), P(("b", "h"))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_forward_and_gradient_without_collectives(kind, spec):
  sizes = {"batch": 8, "heads": 8, "kv_heads": 8}
  sharding = NamedSharding(mesh_of(kind), spec)
  arrays = [jax.device_put(x, sharding) for x in make(**sizes)]
  options = {"sharding": sharding} if kind == "auto" else {}
  run = both(functools.partial(attend, **options))
  assert collectives(run.lower(*arrays).compile()) == []
  out, gradients = run(*arrays)
  check((out, gradients), unsharded(**sizes))
  for x in (out, *gradients):
    assert x.sharding.is_equivalent_to(sharding, 4)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_aux_budget_and_sizes_are_sharded_alike(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  plain = make()[1:4]
  arrays = [jax.device_put(x, sharding) for x in plain]
  rng = np.random.default_rng(1)
  budget = rng.integers(1, 9, (4, 4, LAYOUT.num_tiles, 1))
  sizes = np.minimum(rng.integers(0, 9, (4, LAYOUT.num_tiles)), LAYOUT.tile_sizes)
  options = {"topk": 8, "budget": budget, "tile_sizes": sizes, "return_aux": True}

  def run(q, k, v, **more):
    return video_sparse_attention(q, k, v, LAYOUT, **options, **more)

  more = {"sharding": sharding} if kind == "auto" else {}
  jitted = jax.jit(functools.partial(run, **more))
  assert collectives(jitted.lower(*arrays).compile()) == []
  out, aux = jitted(*arrays)
  want, want_aux = run(*plain)
  check((out, aux), jax.tree.map(np.asarray, (want, want_aux)))
  assert aux.selection.indices.sharding.is_equivalent_to(
    NamedSharding(sharding.mesh, P("b", "h")), 4
  )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_eager_calls_follow_the_arrays(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  out = attend(*(jax.device_put(x, sharding) for x in make()[1:]))
  assert out.sharding.is_equivalent_to(sharding, 4)
  check(out, unsharded()[0])


def test_auto_mode_shards_what_is_not_sharded_yet():
  sharding = NamedSharding(mesh_of("auto"), P("b", None, "h"))
  out, gradients = both(functools.partial(attend, sharding=sharding))(*make())
  check((out, gradients), unsharded())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_block_sparse_attention(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  d_out, *plain, _ = make()
  _, aux = video_sparse_attention(*plain, LAYOUT, sparsity=0.6, return_aux=True)
  operands = [tile(x, LAYOUT) for x in (d_out, *plain)]
  attend_tiled = functools.partial(block_sparse_attention, tile_sizes=LAYOUT.tile_sizes)
  want, want_gradients = both(attend_tiled)(*operands, aux.selection)
  lists = jax.device_put(aux.selection, NamedSharding(sharding.mesh, P("b", "h")))
  placed = *(jax.device_put(x, sharding) for x in operands), lists
  options = {"sharding": sharding} if kind == "auto" else {}
  run = both(functools.partial(attend_tiled, **options))
  assert collectives(run.lower(*placed).compile()) == []
  out, gradients = run(*placed)
  check((out, gradients[:3]), (want, want_gradients[:3]))


def test_inside_a_shard_map_over_one_axis():
  """H02 runs it; without a name for the implementation it warns."""
  specs = {"in_specs": (P("b"),) * 4, "out_specs": P("b"), "axis_names": {"b"}}
  mapped = jax.shard_map(attend, mesh=mesh_of("auto"), **specs)
  with pytest.warns(UserWarning, match="pass sharding=NamedSharding"):
    jax.eval_shape(mapped, *make()[1:])


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_replicated_operands_in_a_users_shard_map(kind):
  """A replicated key and value (one head): their gradients are summed over the axis."""
  mesh = mesh_of(kind)
  query = NamedSharding(mesh, P("b", None, "h"))
  shared = NamedSharding(mesh, P("b"))
  plain = make(kv_heads=1)
  places = (query, query, shared, shared, query)
  arrays = [jax.device_put(x, s) for x, s in zip(plain, places, strict=True)]
  specs = tuple(s.spec for s in places[1:])
  mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=query.spec)
  check(both(mapped)(*arrays), unsharded(kv_heads=1))
  options = {"sharding": query} if kind == "auto" else {}
  check(both(functools.partial(attend, **options))(*arrays), unsharded(kv_heads=1))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gqa(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  sizes = {"heads": 8, "kv_heads": 2}
  arrays = [jax.device_put(x, sharding) for x in make(**sizes)]
  options = {"sharding": sharding} if kind == "auto" else {}
  run = both(functools.partial(attend, **options))
  assert collectives(run.lower(*arrays).compile()) == []
  check(run(*arrays), unsharded(**sizes))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_tiling_and_routing_keep_the_sharding(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  plain = make()[1:3]
  q, k = (jax.device_put(x, sharding) for x in plain)
  lists = NamedSharding(sharding.mesh, P("b", "h"))

  def route(q, k):
    tiled = [vsa_jax.tile_tokens(x, LAYOUT) for x in (q, k)]
    scores = vsa_jax.routing_scores(*(vsa_jax.pool_tiles(x, LAYOUT) for x in tiled))
    selection = vsa_jax.select_tiles(scores, LAYOUT, sparsity=0.6)
    return (
      vsa_jax.untile_tokens(tiled[0], LAYOUT),
      selection,
      selection.to_mask(),
      selection.transposed(),
    )

  with jax.set_mesh(sharding.mesh):
    compiled = jax.jit(route).lower(q, k).compile()
    got = compiled(q, k)
    if kind == "explicit":
      assert collectives(compiled) == []
  want = jax.jit(route)(*plain)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  assert got[0].sharding.is_equivalent_to(sharding, 4)
  if kind == "explicit":
    assert got[1].indices.sharding.is_equivalent_to(lists, 4)
    eager = got[1].to_mask()
    np.testing.assert_array_equal(np.asarray(eager), np.asarray(want[2]))


@pytest.fixture(params=["set_mesh", "by the arrays alone"])
def auto_mesh(request):
  """An automatic mesh; jit learns of it from the context, or only from the types of its arguments."""
  mesh = mesh_of("auto")
  unsharded()  # kept from here on: in the context it would be partitioned too
  with jax.set_mesh(mesh) if request.param == "set_mesh" else contextlib.nullcontext():
    yield mesh


def test_auto_mesh_without_sharding_warns_and_is_right(auto_mesh):
  sharding = NamedSharding(auto_mesh, P("b", None, "h"))
  arrays = [jax.device_put(x, sharding) for x in make()[1:]]
  with pytest.warns(UserWarning, match="pass sharding=NamedSharding"):
    out = jax.jit(attend)(*arrays)
  check(out, unsharded()[0])


def test_select_tiles_in_auto_mode_has_no_collective(auto_mesh):
  scores = jax.random.normal(jax.random.key(0), (4, 2, LAYOUT.num_tiles, LAYOUT.num_tiles))
  scores = jax.device_put(scores, NamedSharding(auto_mesh, P("b", "h")))
  select = jax.jit(lambda scores: vsa_jax.select_tiles(scores, LAYOUT, topk=2))
  assert collectives(select.lower(scores).compile()) == []


class _Kernel(vsa_jax.block_sparse.xla.Xla):
  name = "kernel"


def test_named_kernel_in_auto_mode_wants_sharding(auto_mesh):
  sharding = NamedSharding(auto_mesh, P("b", None, "h"))
  arrays = [jax.device_put(x, sharding) for x in make()[1:]]
  kernel = _Kernel()
  with pytest.raises(ValueError, match="sharding: got None for implementation 'kernel'"):
    jax.jit(functools.partial(attend, implementation=kernel))(*arrays)
  out = jax.jit(functools.partial(attend, implementation=kernel, sharding=sharding))(*arrays)
  check(out, unsharded()[0])


def errors(kind, spec, arrays, message, specs=None):
  mesh = mesh_of(kind)
  specs = specs or [spec] * 4
  placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
  options = {"sharding": NamedSharding(mesh, spec)} if kind == "auto" else {}
  with pytest.raises(ValueError, match=message):
    jax.jit(functools.partial(attend, **options))(*placed)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_sharded_sequence_names_ulysses(kind):
  layout = TileLayout([8, (5, 2, 4)], (2, 2, 2))
  x = jnp.ones((4, layout.num_tokens, 4, 8))
  sharding = NamedSharding(mesh_of(kind), P(None, "b"))
  x = jax.device_put(x, sharding)
  options = {"sharding": sharding} if kind == "auto" else {}
  f = jax.jit(lambda x: video_sparse_attention(x, x, x, layout, topk=1, **options))
  with pytest.raises(ValueError, match=r"splits query's sequence \(axis 1\).*Ulysses"):
    f(x)
  if kind == "explicit":
    with pytest.raises(ValueError, match="Ulysses"):
      jax.jit(lambda x: vsa_jax.tile_tokens(x, layout))(x)


def test_head_dim_sharded():
  errors("explicit", P(None, None, None, "h"), make()[1:], "splits query's head dim")


def test_sizes_that_do_not_divide():
  """Over several mesh axes; over one: field report H10."""
  sharding = NamedSharding(mesh_of("auto"), P(None, None, ("b", "h")))
  message = r"query's heads \(axis 2, size 6\) over mesh axis \('b', 'h'\) of size 8"
  with pytest.raises(ValueError, match=message):
    attend(*make(heads=6, kv_heads=6)[1:], sharding=sharding)


@pytest.mark.parametrize("name", ["key", "value", "gate"])
def test_operands_sharded_otherwise(name):
  specs = [P("b", None, "h")] * 4
  specs[NAMES.index(name)] = P("b")
  message = rf"{name}: is sharded as P.*'b', None.*, want P.*'b', None, 'h'"
  errors("explicit", P("b", None, "h"), make()[1:], message, specs)


def test_selection_sharded_otherwise():
  sharding = NamedSharding(mesh_of("explicit"), P("b", None, "h"))
  plain = make()[1:4]
  _, aux = video_sparse_attention(*plain, LAYOUT, sparsity=0.6, return_aux=True)
  tiled = [jax.device_put(tile(x, LAYOUT), sharding) for x in plain]
  lists = jax.device_put(aux.selection, NamedSharding(sharding.mesh, P("h")))
  with pytest.raises(ValueError, match=r"selection.indices: is sharded as"):
    jax.jit(block_sparse_attention)(*tiled, lists)
