"""Coverage against a naive computation in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import vsa_jax
from vsa_jax import TileLayout, TileSelection, video_sparse_attention
from vsa_jax.diagnostics import coverage


def naive(query, key, mask, query_sizes, key_sizes, scale):
  """float64 [B, N, Jq], token by token."""
  query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
  batch, heads, rows, columns = mask.shape
  size, group = query.shape[1] // rows, heads // key.shape[2]
  out = np.zeros((batch, heads, rows))
  for b, n, i in np.ndindex(out.shape):
    slots = [(j, j * size + o) for j in range(columns) for o in range(key_sizes[b, j])]
    for m in range(query_sizes[b, i]):
      if not slots:
        continue
      tiles, places = map(np.array, zip(*slots, strict=True))
      logits = key[b, places, n // group] @ query[b, i * size + m, n] * scale
      weights = np.exp(logits - logits.max())
      share = weights[mask[b, n, i, tiles]].sum() / weights.sum()
      out[b, n, i] += share / query_sizes[b, i]
  return out


def normal(seed, *shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ragged_video_with_prefix_and_gqa(dtype):
  layout = TileLayout([5, (3, 5, 4), 3], (2, 2, 2))
  query = 2 * normal(0, 2, layout.padded_length, 4, 16, dtype=dtype)
  key = normal(1, 2, layout.padded_length, 2, 16, dtype=dtype)
  pooled = (vsa_jax.pool_tiles(x, layout) for x in (query, key))
  selection = vsa_jax.select_tiles(vsa_jax.routing_scores(*pooled), layout, topk=3)
  got = coverage(query, key, selection, tile_sizes=layout.tile_sizes)
  sizes = np.broadcast_to(layout.tile_sizes, (2, layout.num_tiles))
  want = naive(query, key, np.asarray(selection.to_mask()), sizes, sizes, 16**-0.5)
  assert got.shape == (2, 4, layout.num_tiles)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got[:, :, : layout.num_prefix_tiles], 1, rtol=1e-6)
  assert want[:, :, layout.num_prefix_tiles :].max() < 0.99  # the case is not trivial


def test_cross_lengths_own_sizes_empty_rows_and_scale():
  rng = np.random.default_rng(0)
  mask = rng.random((2, 2, 3, 5)) < 0.5
  mask[0, 1, 2] = False
  query_sizes, key_sizes = rng.integers(0, 5, (2, 3)), rng.integers(0, 5, (2, 5))
  query_sizes[1, 0] = 0
  query, key = normal(0, 2, 12, 2, 8), normal(1, 2, 20, 2, 8)
  # What lies in padding never matters.
  padding = lambda sizes: (np.arange(4) >= sizes[..., None]).reshape(2, -1)[..., None, None]
  query = jnp.where(padding(query_sizes), jnp.nan, query)
  key = jnp.where(padding(key_sizes), jnp.nan, key)
  got = coverage(
    query,
    key,
    TileSelection.from_mask(mask),
    tile_sizes=key_sizes,
    query_tile_sizes=query_sizes,
    scale=0.7,
  )
  want = naive(query, key, mask, query_sizes, key_sizes, 0.7)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  assert got[0, 1, 2] == 0
  assert not got[1, :, 0].any()


def test_no_keys_at_all_cover_nothing():
  x = normal(0, 1, 8, 1, 4)
  selection = TileSelection.from_mask(np.ones((1, 1, 2, 2), bool))
  got = coverage(x, x, selection, tile_sizes=np.zeros(2, int), query_tile_sizes=np.full(2, 4))
  np.testing.assert_array_equal(got, 0)


def test_agrees_with_the_ratio_of_partition_functions():
  """exp(LSE of the kept keys - LSE of all keys), from the attention itself."""
  layout = TileLayout([(4, 6, 4)], (2, 2, 2))
  query, key = (normal(i, 1, layout.padded_length, 2, 8) for i in range(2))
  pooled = (vsa_jax.pool_tiles(x, layout) for x in (query, key))
  selection = vsa_jax.select_tiles(vsa_jax.routing_scores(*pooled), layout, topk=4)
  everything = TileSelection.from_mask(np.ones((1, 2, layout.num_tiles, layout.num_tiles), bool))
  lse = lambda s: vsa_jax.block_sparse_attention(query, key, key, s, return_lse=True)[1]
  share = jnp.exp(lse(selection) - lse(everything))
  share = share.reshape(1, layout.num_tiles, layout.tile_size, 2).mean(2).transpose(0, 2, 1)
  np.testing.assert_allclose(coverage(query, key, selection), share, rtol=1e-5)


def test_huge_logits_and_ids_out_of_range_under_jit():
  query, key = 1e4 * normal(0, 1, 8, 1, 4), normal(1, 1, 8, 1, 4)
  whole = TileSelection(jnp.array([[[[0, 1], [1, 7]]]]), jnp.array([[[2, 9]]]))
  got = jax.jit(coverage)(query, key, whole)
  assert jnp.isfinite(got).all()
  np.testing.assert_allclose(got[0, 0, 0], 1)


def test_memory_is_one_row_of_tiles():
  layout = TileLayout([(8, 16, 16)], (4, 4, 4))
  x = jax.ShapeDtypeStruct((1, layout.padded_length, 2, 8), jnp.float32)
  tiles = layout.num_tiles
  lists = jax.ShapeDtypeStruct((1, 2, tiles, 3), jnp.int32)
  selection = TileSelection(lists, jax.ShapeDtypeStruct((1, 2, tiles), jnp.int32))
  stats = jax.jit(coverage).lower(x, x, selection).compile().memory_analysis()
  assert stats.temp_size_in_bytes < layout.padded_length**2


def test_wrong_arguments_are_named():
  x = normal(0, 1, 8, 2, 4)
  selection = TileSelection.from_mask(np.ones((1, 2, 2, 2), bool))
  with pytest.raises(ValueError, match=r"tile_sizes\[0\]: got 5, want 0\.\.4"):
    coverage(x, x, selection, tile_sizes=np.array([5, 1]))
  with pytest.raises(ValueError, match="key: got 12 tokens"):
    coverage(x, normal(0, 1, 12, 2, 4), selection)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_operands(kind):
  mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(kind,) * 2)
  layout = TileLayout([(4, 4, 4)], (2, 2, 2))
  x = jax.random.normal(jax.random.key(0), (2, 64, 2, 8))
  placed = jax.device_put(x, NamedSharding(mesh, P("b", None, "h")))

  def share(x):
    _, aux = video_sparse_attention(x, x, x, layout, topk=3, tiled=True, return_aux=True)
    return coverage(x, x, aux.selection)

  got = share(placed)
  np.testing.assert_allclose(got, share(x), atol=1e-6)
  assert got.sharding.spec == P("b", "h")
