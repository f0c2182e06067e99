"""Sharding, on fake CPU devices (tests/conftest.py makes eight)."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_oracle import vsa
from running import both, collectives, column, normal, qkv

from vsa_jax import TileLayout, block_sparse_attention, select_tiles, video_sparse_attention

SEGMENTS, TILE = [3, (2, 2, 3)], (1, 2, 2)  # 15 tokens in 5 tiles
LAYOUT = TileLayout(SEGMENTS, TILE)
KINDS = pytest.mark.parametrize(
  "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def _mesh(kind, shape=(2,), names=("x",)):
  devices = jax.devices()[: np.prod(shape)]
  return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def _attend(implementation, layout=LAYOUT, *, topk=1, **options):
  return lambda query, key, value, gate=None: video_sparse_attention(
    query, key, value, layout, topk=topk, gate=gate, implementation=implementation, **options
  )


def _given(kind, sharding):
  """What a call must be told: in explicit mode, nothing."""
  return sharding if kind == AxisType.Auto else None


@KINDS
def test_H01_all_gather_in_front_of_the_kernel(implementation, kind):
  compiled, operands, placed = _compiled(implementation, kind)
  assert "all-gather" not in collectives(compiled)
  out, gradients = compiled(*placed)
  want = vsa(*operands[1:4], SEGMENTS, TILE, 1, gate=operands[4])
  np.testing.assert_allclose(out, want.out, atol=3e-6)
  np.testing.assert_allclose(gradients[3], operands[0] * want.coarse, atol=3e-6)
  for x in (out, *gradients):
    assert x.sharding.is_equivalent_to(placed[0].sharding, 4)


@functools.cache
def _compiled(implementation, kind):
  """Output and gradients with batch and heads sharded: program, arrays, sharded arrays."""
  mesh = _mesh(kind, (2, 2), ("data", "model"))
  sharding = NamedSharding(mesh, P("data", None, "model"))
  operands = normal(10, 4, 15, 2, 8), *qkv(11, 4, 15, 2, 8), normal(14, 4, 15, 2, 8)
  placed = jax.device_put(operands, sharding)
  attend = _attend(implementation, sharding=_given(kind, sharding))
  return both(attend).lower(*placed).compile(), operands, placed


@KINDS
def test_H02_use_inside_shard_map_over_all_axes(implementation, kind):
  mesh = _mesh(kind, (2, 2), ("data", "model"))
  spec = P("data", None, "model")
  operands, d_out = qkv(20, 2, 15, 2, 8), normal(23, 2, 15, 2, 8)
  attend = jax.shard_map(_attend(implementation), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
  placed = jax.device_put((d_out, *operands), NamedSharding(mesh, spec))
  compiled = both(attend).lower(*placed).compile()
  assert collectives(compiled) == []
  out, gradients = compiled(*placed)
  _check(out, gradients, operands, d_out)


@KINDS
def test_H02_use_inside_shard_map_over_one_axis(implementation, kind):
  mesh = _mesh(kind, (2, 2), ("data", "model"))
  operands, d_out = qkv(20, 2, 15, 2, 8), normal(23, 2, 15, 2, 8)
  options = {
    "mesh": mesh,
    "in_specs": (P("data"),) * 3,
    "out_specs": P("data"),
    "axis_names": {"data"},
  }
  attend = jax.shard_map(_attend(implementation), **options)
  placed = jax.device_put((d_out, *operands), NamedSharding(mesh, P("data")))
  if kind == AxisType.Auto and implementation not in ("xla", "reference"):
    with pytest.raises(ValueError, match="sharding: got None for implementation"):
      both(attend)(*placed)
  else:
    out, gradients = both(attend)(*placed)
    _check(out, gradients, operands, d_out)

  # Heads on the other axis: a shard_map of ours inside the user's.
  inner = _given(kind, NamedSharding(mesh, P(None, None, "model")))
  attend = jax.shard_map(_attend(implementation, sharding=inner), **options)
  placed = jax.device_put(operands, NamedSharding(mesh, P("data", None, "model")))
  compiled = jax.jit(attend).lower(*placed).compile()
  # In explicit mode JAX gathers at the border of the outer one, even for x -> x.
  if kind == AxisType.Auto:
    assert collectives(compiled) == []
  np.testing.assert_allclose(compiled(*placed), vsa(*operands, SEGMENTS, TILE, 1).out, atol=2e-6)


def _check(out, gradients, operands, d_out):
  want = vsa(*operands, SEGMENTS, TILE, 1, d_out=d_out)
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  truths = want.fine.d_query, want.fine.d_key, want.fine.d_value
  for got, truth in zip(gradients, truths, strict=True):
    np.testing.assert_allclose(got, truth, atol=5e-6)


@KINDS
@pytest.mark.parametrize("by", ["batch", "heads"])
def test_H03_cotangent_sharding(implementation, kind, by):
  mesh = _mesh(kind)
  specs = [P("x", None, None, None), P(None, None, "x", None)]
  spec, other = specs if by == "batch" else specs[::-1]
  sharding = NamedSharding(mesh, spec)
  operands, d_out = qkv(30, 2, 15, 2, 8), normal(33, 2, 15, 2, 8)
  attend = _attend(implementation, sharding=_given(kind, sharding))

  def moved(*operands):
    out = attend(*operands)
    if kind == AxisType.Explicit:  # there the cotangent has the type of the output
      return jax.sharding.reshard(out, NamedSharding(mesh, other))
    return out

  out, gradients = both(moved)(
    jax.device_put(d_out, NamedSharding(mesh, other)), *jax.device_put(operands, sharding)
  )
  _check(out, gradients, operands, d_out)
  for gradient in gradients:
    assert gradient.sharding.is_equivalent_to(sharding, 4)


@KINDS
def test_H04_extra_collectives(implementation, kind):
  assert collectives(_compiled(implementation, kind)[0]) == []


def test_H06_shard_padding_attended(implementation):
  # 125 tokens on 8 devices: 16 each, 3 of them padding; heads change places with tokens (Ulysses).
  mesh = _mesh(AxisType.Auto, (8,))
  layout = TileLayout([128], (1, 4, 4))
  sizes = layout.tile_sizes_for([[125]])
  zero, value = jnp.zeros((1, 128, 8, 1)), jnp.ones((1, 128, 8, 1)).at[:, 125:].set(1e3)

  def attend(query, key, value):
    exchange = lambda x, of, to: jax.lax.all_to_all(x, "x", of, to, tiled=True)
    operands = (exchange(x, 2, 1) for x in (query, key, value))
    out, aux = video_sparse_attention(
      *operands,
      layout,
      sparsity=0,
      tile_sizes=sizes,
      implementation=implementation,
      return_aux=True,
    )
    return exchange(out, 1, 2), exchange(aux.lse, 1, 2)

  spec = P(None, "x")
  out, lse = jax.jit(
    jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, spec))
  )(zero, zero, value)
  np.testing.assert_allclose(out[:, :125].ravel(), 1.0, rtol=1e-6)
  np.testing.assert_allclose(lse[:, :125].ravel(), 4.828314, atol=2e-6)
  np.testing.assert_array_equal(out[:, 125:].ravel(), 0.0)
  # A sequence that stays sharded is refused.
  sharding = NamedSharding(mesh, spec)
  with pytest.raises(ValueError, match=r"sequence \(axis 1\).*Ulysses"):
    _attend(implementation, layout, sharding=sharding)(zero, zero, value)


def test_H08_replicated_prefix_counted_twice(implementation):
  mesh = _mesh(AxisType.Auto)
  layout = TileLayout([3, (2, 1, 4)], (1, 1, 4))
  zero = jnp.zeros((1, 11, 2, 1))
  value = column(*np.repeat([9.0, 1.0, 2.0], [3, 4, 4]), heads=2)

  def attend(prefix, video):
    first = jax.lax.axis_index("x")
    prefix = jax.lax.dynamic_slice_in_dim(prefix, first, 1, axis=3)  # its heads, on every device
    video = jax.lax.all_to_all(video, "x", 3, 2, tiled=True)
    query, key, value = jnp.concatenate([prefix, video], axis=2)
    return _attend(implementation, layout)(query, key, value)

  operands = jnp.stack([zero, zero, value])
  out = jax.jit(
    jax.shard_map(
      attend, mesh=mesh, in_specs=(P(), P(None, None, "x")), out_specs=P(None, None, "x")
    )
  )(operands[:, :, :3], operands[:, :, 3:])
  np.testing.assert_allclose(out[:, 3:].ravel(), [4.428571] * 16, rtol=2e-7)
  np.testing.assert_allclose(out[:, :3].ravel(), [3.545455] * 6, rtol=2e-7)


@pytest.mark.parametrize(
  ("axis", "ways", "shape", "spec"),
  [
    ("heads", 4, (1, 15, 6, 8), P(None, None, "mesh_axis")),
    ("batch", 2, (1, 15, 6, 8), P("mesh_axis")),
  ],
)
def test_H10_non_divisible_mesh_axis(implementation, axis, ways, shape, spec):
  sharding = NamedSharding(_mesh(AxisType.Auto, (ways,), ("mesh_axis",)), spec)
  query = normal(100, *shape)
  with pytest.raises(ValueError, match="sharding") as caught:
    _attend(implementation, sharding=sharding)(query, query, query)
  size = {"heads": 6, "batch": 1}[axis]
  for said in (axis, f"size {size}", "'mesh_axis'", f"size {ways}", "pad"):
    assert said in str(caught.value)


def test_H10_heads_of_keys(implementation):
  sharding = NamedSharding(_mesh(AxisType.Auto, (4,)), P(None, None, "x"))
  query, key, value = qkv(100, 1, 15, 8, 8, kv_heads=2)
  with pytest.raises(ValueError, match=r"8 heads are split 4 ways over mesh axis 'x', key has 2"):
    _attend(implementation, sharding=sharding)(query, key, value)
  # A single kv head is replicated instead.
  key, value = key[:, :, :1], value[:, :, :1]
  out = jax.jit(_attend(implementation, sharding=sharding))(query, key, value)
  np.testing.assert_allclose(out, vsa(query, key, value, SEGMENTS, TILE, 1).out, atol=2e-6)


@KINDS
def test_H12_gate_sharding(implementation, kind):
  # Two tiles of one token that tie: tile 0 (value 0) is kept, the coarse branch is the mean, 1.
  layout = TileLayout([(2, 1, 1)], (1, 1, 1))
  sharding = NamedSharding(_mesh(kind), P(None, None, "x"))
  zero, value = jnp.zeros((1, 2, 4, 1)), column(0, 2, heads=4)
  gate = jnp.broadcast_to(jnp.arange(4.0)[:, None], zero.shape)
  operands = jax.device_put((zero, zero, value, gate), sharding)
  attend = jax.jit(_attend(implementation, layout, sharding=_given(kind, sharding)))
  out = attend(*operands)
  chex.assert_trees_all_equal(out, gate)
  for shard in out.addressable_shards:
    np.testing.assert_array_equal(shard.data, np.asarray(gate)[shard.index])
  # So does a gate that broadcasts.
  out = attend(*operands[:3], jax.device_put(gate[:, :1], sharding))
  chex.assert_trees_all_equal(out, gate)


@KINDS
def test_H01_lists_and_scores_stay_where_they_are(implementation, kind):
  sharding = NamedSharding(_mesh(kind), P("x"))
  query, key, value = (x[:, :12] for x in qkv(10, 2, 15, 2, 8))
  layout = TileLayout([(3, 2, 2)], TILE)
  scores = normal(15, 2, 2, 3, 3)

  @jax.jit
  def attend(query, key, value, scores):
    selection = select_tiles(scores, layout, topk=1)
    return block_sparse_attention(
      query,
      key,
      value,
      selection,
      implementation=implementation,
      sharding=_given(kind, sharding),
    )

  placed = jax.device_put((query, key, value, scores), sharding)
  with jax.set_mesh(sharding.mesh):
    compiled = attend.lower(*placed).compile()
  assert collectives(compiled) == []
  mask = np.asarray(scores) == np.asarray(scores).max(-1, keepdims=True)
  want = vsa(query, key, value, [(3, 2, 2)], TILE, 1, mask=mask).out
  np.testing.assert_allclose(compiled(*placed), want, atol=2e-6)
