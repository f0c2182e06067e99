"""Batch and heads over 8 fake devices: equal to one device, no collective, the named errors."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import vsa_jax
from vsa_jax import TileLayout, block_sparse_attention, video_sparse_attention

LAYOUT = TileLayout([7, (5, 3, 4)], (2, 2, 2))
COLLECTIVE = re.compile(
  r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)
NAMES = ("query", "key", "value", "gate", "d_out")


def collectives(compiled):
  return COLLECTIVE.findall(compiled.as_text())


def mesh_of(kind, shape=(4, 2), names=("b", "h")):
  kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
  return jax.make_mesh(shape, names, axis_types=(kinds[kind],) * len(names))


def make(batch=4, heads=4, kv_heads=4, dim=8):
  rng = np.random.default_rng(0)
  sizes = (heads, kv_heads, kv_heads, heads, heads)
  shapes = [(batch, LAYOUT.num_tokens, n, dim) for n in sizes]
  return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def attend(query, key, value, gate, **options):
  return video_sparse_attention(query, key, value, LAYOUT, sparsity=0.6, gate=gate, **options)


def with_gradients(function):
  """(out, gradients) of function(query, key, value, gate) under a cotangent."""

  def both(query, key, value, gate, d_out):
    out, vjp = jax.vjp(function, query, key, value, gate)
    return out, vjp(d_out)

  return jax.jit(both)


@functools.cache
def unsharded(**sizes):
  return jax.tree.map(np.asarray, with_gradients(attend)(*make(**sizes)))


def check(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(a), b, atol=3e-6)


SPECS = [P("b", None, "h"), P("b"), P(None, None, "h"), P(None, None, ("b", "h")), P(("b", "h"))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_forward_and_gradient_without_collectives(kind, spec):
  sizes = {"batch": 8, "heads": 8, "kv_heads": 8}
  sharding = NamedSharding(mesh_of(kind), spec)
  arrays = [jax.device_put(x, sharding) for x in make(**sizes)]
  options = {"sharding": sharding} if kind == "auto" else {}
  both = with_gradients(functools.partial(attend, **options))
  assert collectives(both.lower(*arrays).compile()) == []
  out, gradients = both(*arrays)
  check((out, gradients), unsharded(**sizes))
  for x in (out, *gradients):
    assert x.sharding.is_equivalent_to(sharding, 4)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_aux_budget_and_sizes_are_sharded_alike(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  plain = make()
  arrays = [jax.device_put(x, sharding) for x in plain]
  rng = np.random.default_rng(1)
  budget = rng.integers(1, 9, (4, 4, LAYOUT.num_tiles, 1))
  sizes = np.minimum(rng.integers(0, 9, (4, LAYOUT.num_tiles)), LAYOUT.tile_sizes)
  options = {"topk": 8, "budget": budget, "tile_sizes": sizes, "return_aux": True}

  def run(q, k, v, **more):
    return video_sparse_attention(q, k, v, LAYOUT, **options, **more)

  more = {"sharding": sharding} if kind == "auto" else {}
  jitted = jax.jit(functools.partial(run, **more))
  assert collectives(jitted.lower(*arrays[:3]).compile()) == []
  out, aux = jitted(*arrays[:3])
  want, want_aux = run(*plain[:3])
  check((out, aux), jax.tree.map(np.asarray, (want, want_aux)))
  assert aux.selection.indices.sharding.is_equivalent_to(
    NamedSharding(sharding.mesh, P("b", "h")), 4
  )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_eager_calls_follow_the_arrays(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  arrays = [jax.device_put(x, sharding) for x in make()]
  out = attend(*arrays[:4])
  assert out.sharding.is_equivalent_to(sharding, 4)
  check(out, unsharded()[0])


def test_auto_mode_shards_what_is_not_sharded_yet():
  sharding = NamedSharding(mesh_of("auto"), P("b", None, "h"))
  out, gradients = with_gradients(functools.partial(attend, sharding=sharding))(*make())
  check((out, gradients), unsharded())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_block_sparse_attention(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  plain = make()
  _, aux = video_sparse_attention(*plain[:3], LAYOUT, sparsity=0.6, return_aux=True)
  tiled = [vsa_jax.tile_tokens(x, LAYOUT) for x in plain[:3]]
  d_out = vsa_jax.tile_tokens(plain[4], LAYOUT)

  def both(query, key, value, selection, d_out, **options):
    f = lambda *qkv: block_sparse_attention(
      *qkv, selection, tile_sizes=LAYOUT.tile_sizes, **options
    )
    out, vjp = jax.vjp(f, query, key, value)
    return out, vjp(d_out)

  want = jax.tree.map(np.asarray, jax.jit(both)(*tiled, aux.selection, d_out))
  arrays = [jax.device_put(x, sharding) for x in (*tiled, d_out)]
  lists = jax.device_put(aux.selection, NamedSharding(sharding.mesh, P("b", "h")))
  options = {"sharding": sharding} if kind == "auto" else {}
  jitted = jax.jit(functools.partial(both, **options))
  arguments = (*arrays[:3], lists, arrays[3])
  assert collectives(jitted.lower(*arguments).compile()) == []
  check(jitted(*arguments), want)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_inside_a_users_shard_map(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  arrays = [jax.device_put(x, sharding) for x in make()]
  mapped = jax.shard_map(
    attend, mesh=sharding.mesh, in_specs=(sharding.spec,) * 4, out_specs=sharding.spec
  )
  both = with_gradients(mapped)
  assert collectives(both.lower(*arrays).compile()) == []
  check(both(*arrays), unsharded())


def test_inside_a_shard_map_over_one_axis():
  mesh = mesh_of("auto")
  arrays = [jax.device_put(x, NamedSharding(mesh, P("b", None, "h"))) for x in make()]
  specs = (P("b"),) * 4
  mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("b"), axis_names={"b"})
  with pytest.warns(UserWarning, match="pass sharding=NamedSharding"):
    got = with_gradients(mapped)(*arrays)
  check(got, unsharded())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_replicated_operands_in_a_users_shard_map(kind):
  """A replicated key and value (one head): their gradients are summed over the axis."""
  mesh = mesh_of(kind)
  query = NamedSharding(mesh, P("b", None, "h"))
  shared = NamedSharding(mesh, P("b"))
  plain = make(kv_heads=1)
  places = (query, shared, shared, query, query)
  arrays = [jax.device_put(x, s) for x, s in zip(plain, places, strict=True)]
  specs = tuple(s.spec for s in places[:4])
  mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=query.spec)
  check(with_gradients(mapped)(*arrays), unsharded(kv_heads=1))
  options = {"sharding": query} if kind == "auto" else {}
  check(with_gradients(functools.partial(attend, **options))(*arrays), unsharded(kv_heads=1))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gqa(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  sizes = {"heads": 8, "kv_heads": 2}
  arrays = [jax.device_put(x, sharding) for x in make(**sizes)]
  options = {"sharding": sharding} if kind == "auto" else {}
  both = with_gradients(functools.partial(attend, **options))
  assert collectives(both.lower(*arrays).compile()) == []
  check(both(*arrays), unsharded(**sizes))


def test_cotangent_sharded_otherwise():
  mesh = mesh_of("auto")
  by_batch, by_heads = NamedSharding(mesh, P("b")), NamedSharding(mesh, P(None, None, "h"))
  plain = make()
  for own, other in ((by_batch, by_heads), (by_heads, by_batch)):
    arrays = [jax.device_put(x, own) for x in plain[:4]]
    got = with_gradients(functools.partial(attend, sharding=own))(
      *arrays, jax.device_put(plain[4], other)
    )
    check(got, unsharded())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_tiling_and_routing_keep_the_sharding(kind):
  sharding = NamedSharding(mesh_of(kind), P("b", None, "h"))
  q, k = (jax.device_put(x, sharding) for x in make()[:2])
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
    jitted = jax.jit(route)
    got = jitted(q, k)
    if kind == "explicit":
      assert collectives(jitted.lower(q, k).compile()) == []
  want = jax.jit(route)(*make()[:2])
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
  with jax.set_mesh(mesh) if request.param == "set_mesh" else contextlib.nullcontext():
    yield mesh


def test_auto_mesh_without_sharding_warns_and_is_right(auto_mesh):
  sharding = NamedSharding(auto_mesh, P("b", None, "h"))
  arrays = [jax.device_put(x, sharding) for x in make()]
  with pytest.warns(UserWarning, match="pass sharding=NamedSharding"):
    out = jax.jit(attend)(*arrays[:4])
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
  arrays = [jax.device_put(x, sharding) for x in make()]
  kernel = _Kernel()
  with pytest.raises(ValueError, match="sharding: got None for implementation 'kernel'"):
    jax.jit(functools.partial(attend, implementation=kernel))(*arrays[:4])
  out = jax.jit(functools.partial(attend, implementation=kernel, sharding=sharding))(*arrays[:4])
  check(out, unsharded()[0])


def errors(kind, spec, arrays, message, specs=None):
  mesh = mesh_of(kind)
  specs = specs or [spec] * 4
  placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=False)]
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
  errors("explicit", P(None, None, None, "h"), make(), "splits query's head dim")


def test_sizes_that_do_not_divide():
  mesh = mesh_of("auto")
  for spec, message in (
    (P("b"), r"query's batch \(axis 0, size 6\) over mesh axis 'b' of size 4"),
    (
      P(None, None, ("b", "h")),
      r"query's heads \(axis 2, size 6\) over mesh axis \('b', 'h'\) of size 8",
    ),
  ):
    arrays = make(batch=6, heads=6, kv_heads=6)
    with pytest.raises(ValueError, match=message):
      attend(*arrays[:4], sharding=NamedSharding(mesh, spec))


def test_key_heads_that_do_not_divide():
  arrays = make(heads=8, kv_heads=2)
  sharding = NamedSharding(mesh_of("auto"), P(None, None, "b"))
  with pytest.raises(
    ValueError, match=r"split 4 ways over mesh axis 'b', key has 2; want a multiple of 4"
  ):
    attend(*arrays[:4], sharding=sharding)


@pytest.mark.parametrize("name", ["key", "value", "gate"])
def test_operands_sharded_otherwise(name):
  specs = [P("b", None, "h")] * 4
  specs[NAMES.index(name)] = P("b")
  message = rf"{name}: is sharded as P.*'b', None.*, want P.*'b', None, 'h'"
  errors("explicit", P("b", None, "h"), make(), message, specs)


def test_selection_sharded_otherwise():
  sharding = NamedSharding(mesh_of("explicit"), P("b", None, "h"))
  plain = make()
  _, aux = video_sparse_attention(*plain[:3], LAYOUT, sparsity=0.6, return_aux=True)
  tiled = [jax.device_put(vsa_jax.tile_tokens(x, LAYOUT), sharding) for x in plain[:3]]
  lists = jax.device_put(aux.selection, NamedSharding(sharding.mesh, P("h")))
  with pytest.raises(ValueError, match=r"selection.indices: is sharded as"):
    jax.jit(block_sparse_attention)(*tiled, lists)
