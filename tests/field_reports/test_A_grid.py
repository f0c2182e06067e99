"""Grid, tiles, padding."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_oracle import attention, cut, vsa
from running import both, column, normal, qkv, tile, to_mask, untile

from vsa_jax import TileLayout, tile_tokens, untile_tokens, video_sparse_attention


def test_A01_non_divisible_grid():
  layout = TileLayout([(8, 6, 5)], (4, 4, 4))
  np.testing.assert_array_equal(layout.tile_sizes, [64, 16, 32, 8, 64, 16, 32, 8])
  x = jnp.arange(240)[None]
  tiled = tile(x, layout)
  chex.assert_shape(tiled, (1, 512))
  np.testing.assert_array_equal(tiled[0, cut([(8, 6, 5)], (4, 4, 4)).slots(64)], np.arange(240))
  chex.assert_trees_all_equal(untile(tiled, layout), x)


def test_A01_non_divisible_grid_at_full_size():
  layout = TileLayout([(32, 30, 52)], (4, 4, 4))
  assert layout.num_tokens == 49_920
  sizes, counts = np.unique(layout.tile_sizes, return_counts=True)
  assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == {64: 728, 32: 104}
  x = jnp.arange(49_920)[None]
  chex.assert_trees_all_equal(untile(tile(x, layout), layout), x)


def test_A03_padded_keys_attended(implementation):
  layout = TileLayout([(1, 1, 5)], (1, 1, 4))
  zero, one = column(*[0.0] * 5), column(*[1.0] * 5)
  out, aux = video_sparse_attention(
    zero, zero, one, layout, topk=2, implementation=implementation, return_aux=True
  )
  np.testing.assert_allclose(out.ravel(), [1.0] * 5, rtol=1e-6)
  np.testing.assert_allclose(aux.lse.ravel(), [1.609438] * 5, atol=1e-6)


def test_A05_mean_pooling_counts_padding(implementation):
  layout = TileLayout([(1, 1, 5)], (1, 1, 4))
  query, key, value = column(*[1.0] * 5), column(3, 3, 3, 3, 8), column(0, 0, 0, 0, 1)
  out, aux = video_sparse_attention(
    query, key, value, layout, topk=1, scale=1.0, implementation=implementation, return_aux=True
  )
  np.testing.assert_array_equal(aux.selection.indices.ravel(), [1, 1])
  np.testing.assert_array_equal(out.ravel(), [1.0] * 5)


@pytest.mark.parametrize("grid", [(1, 9, 7), (3, 8, 8)], ids=str)
def test_A07_token_count_restricted_to_kernel_block(implementation, grid):
  layout = TileLayout([grid], (4, 4, 4))
  query, key, value = qkv(70, 1, layout.num_tokens, 2, 64)
  out, aux = video_sparse_attention(
    query, key, value, layout, topk=2, implementation=implementation, return_aux=True
  )
  want = vsa(query, key, value, [grid], (4, 4, 4), 2)
  np.testing.assert_array_equal(to_mask(aux.selection), want.mask)
  np.testing.assert_allclose(out, want.out, atol=5e-6)


def test_A09_grid_axis_order():
  layout = TileLayout([(2, 4, 6)], (2, 2, 2))
  tiled = tile(jnp.arange(48)[None], layout)
  np.testing.assert_array_equal(tiled[0, 8:16], [2, 3, 8, 9, 26, 27, 32, 33])
  assert "T slowest and W fastest" in inspect.getdoc(TileLayout)


def test_A10_length_and_layout_disagree(implementation):
  layout = TileLayout([(8, 6, 5)], (4, 4, 4))
  x = jax.ShapeDtypeStruct((1, 239, 2, 8), jnp.float32)
  good = jax.ShapeDtypeStruct((1, 240, 2, 8), jnp.float32)

  def attend(query, key, value):
    return video_sparse_attention(query, key, value, layout, topk=1, implementation=implementation)

  for operands in [(x, x, x), (good, x, x)]:
    with pytest.raises(ValueError, match="239") as caught:
      jax.eval_shape(attend, *operands)
    assert "240" in str(caught.value)
    assert "(8, 6, 5)" in str(caught.value)
  for function in (tile_tokens, untile_tokens):
    with pytest.raises(ValueError, match="239"):
      jax.eval_shape(lambda x, function=function: function(x, layout), x)


def test_A12_very_short_query(implementation):
  value = normal(120, 1, 1, 2, 8)
  layout = TileLayout([(1, 1, 1)], (4, 4, 4))
  out = video_sparse_attention(
    value * 3, value + 1, value, layout, topk=1, implementation=implementation
  )
  chex.assert_trees_all_equal(out, value)
  layout = TileLayout([3, (1, 1, 1)], (1, 1, 4))
  zero = column(0, 0, 0, 0)
  out = video_sparse_attention(
    zero, zero, column(2, 4, 6, 8), layout, topk=1, implementation=implementation
  )
  np.testing.assert_allclose(out.ravel(), [5.0] * 4, rtol=1e-6)


def test_A14_non_divisible_length_from_a_cold_start(implementation):
  layout = TileLayout([(1, 12, 16)], (1, 8, 16))  # 192 tokens, tiles of 128
  query, key, value = qkv(140, 1, 192, 8, 16, dtype=jnp.bfloat16)
  first, *others = (
    video_sparse_attention(query, key, value, layout, topk=2, implementation=implementation)
    for _ in range(10)
  )
  want = attention(query, key, value).out
  np.testing.assert_allclose(first.astype(jnp.float32), want, atol=2**-8 * np.abs(want).max())
  for other in others:
    chex.assert_trees_all_equal(first, other)


@pytest.mark.parametrize("prefix", [(126,), (63, 63)], ids=str)
def test_A15_block_size_chosen_before_padding(implementation, prefix):
  layout = TileLayout([*prefix, (4, 4, 4)], (4, 4, 4))
  query, key, value = qkv(150, 1, 190, 2, 16)
  for options in ({"topk": 1}, {"sparsity": 0.5}):  # one video tile: nothing to drop
    out = video_sparse_attention(
      query, key, value, layout, implementation=implementation, **options
    )
    np.testing.assert_allclose(out, attention(query, key, value).out, atol=5e-6)


def test_A15_a_sharded_prefix_is_refused(implementation):
  """The report's 2 shards cannot work: a list may name any tile, so a row needs the whole sequence."""
  mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  layout = TileLayout([126, (4, 4, 4)], (4, 4, 4))
  query, key, value = qkv(150, 1, 190, 2, 16)
  with pytest.raises(ValueError, match="Ulysses"):
    video_sparse_attention(
      query,
      key,
      value,
      layout,
      topk=1,
      implementation=implementation,
      sharding=NamedSharding(mesh, P(None, "seq")),
    )


@pytest.mark.parametrize("gated", [False, True])
def test_A17_nan_behind_the_mask(implementation, gated):
  segments, shape = [3, (1, 3, 6)], (1, 2, 4)
  layout = TileLayout(segments, shape)
  operands = [normal(170 + i, 1, layout.num_tokens, 2, 8) for i in range(4)]
  tiled = [tile(x, layout) for x in operands]
  padding = (jnp.arange(8) >= layout.tile_sizes[:, None]).reshape(1, -1, 1, 1)
  cotangent = tile(normal(175, *operands[0].shape), layout)

  def attend(query, key, value, gate):
    return video_sparse_attention(
      query,
      key,
      value,
      layout,
      topk=1,
      gate=gate if gated else None,
      tiled=True,
      implementation=implementation,
    )

  run = both(attend)
  want = run(cotangent, *tiled)
  truth = vsa(*operands[:3], segments, shape, 1, gate=operands[3] if gated else None)
  np.testing.assert_allclose(untile(want[0], layout), truth.out, atol=5e-6)
  for fill in (jnp.nan, 1e30, jnp.inf):
    query, key, value, gate = (jnp.where(padding, fill, x) for x in tiled)
    # Key, value and gate first, then the query as well.
    chex.assert_trees_all_equal(run(cotangent, tiled[0], key, value, gate), want)
    chex.assert_trees_all_equal(run(cotangent, query, key, value, gate), want)
