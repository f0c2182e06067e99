"""The block-sparse kernel, forward."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import attention, vsa
from running import column, normal, qkv, relative, with_gradients

from vsa_jax import TileLayout, TileSelection, block_sparse_attention, video_sparse_attention


def _mask(rows, tiles):
  """bool [1, 1, rows, tiles] of lists."""
  mask = np.zeros((1, 1, len(rows), tiles), bool)
  for i, row in enumerate(rows):
    mask[0, 0, i, row] = True
  return mask


def test_D01_non_uniform_counts_per_row(implementation):
  zero, value = column(*[0.0] * 16), column(*np.repeat([0.0, 1, 2, 3], 4))
  selection = TileSelection.from_mask(_mask([[0, 1, 2, 3], [3], [0, 2], [1]], 4))
  out = block_sparse_attention(zero, zero, value, selection, implementation=implementation)
  np.testing.assert_allclose(out.ravel(), np.repeat([1.5, 3.0, 1.0, 1.0], 4), rtol=1e-6)


def test_D03_empty_row_forward_and_backward(implementation):
  # Row 1 counts nothing; row 2 counts two entries that are both padding (legal under a trace only).
  ids = jnp.asarray([[0, 3], [1, 2], [4, 4], [2, 4]], jnp.int32)[None, None]
  counts = jnp.asarray([[[2, 0, 2, 1]]], jnp.int32)
  query, key, value = qkv(30, 1, 16, 1, 8)
  d_out, d_lse = normal(33, 1, 16, 1, 8), normal(34, 1, 16, 1)

  def attend(query, key, value, ids, counts):
    return block_sparse_attention(
      query,
      key,
      value,
      TileSelection(ids, counts, num_key_tiles=4),
      implementation=implementation,
      return_lse=True,
    )

  keep = _mask([[0, 3], [], [], [2]], 4).repeat(4, 2).repeat(4, 3)
  empty = np.repeat([False, True, True, False], 4)
  (out, lse), gradients = with_gradients(
    lambda query, key, value, tables: attend(query, key, value, *tables),
    # What comes back for an empty row is no one's business: its cotangent is large here.
    (jnp.where(empty[:, None, None], 1e3, d_out), jnp.where(empty[:, None], 0, d_lse)),
    query,
    key,
    value,
    (ids, counts),
  )
  want = attention(query, key, value, keep, None, d_out, np.where(empty[:, None], 0, d_lse))
  np.testing.assert_array_equal(out[0, empty], 0.0)
  np.testing.assert_array_equal(lse[0, empty], -np.inf)
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  np.testing.assert_allclose(lse, want.lse, atol=2e-6)
  d_query, d_key, d_value = gradients[:3]
  np.testing.assert_array_equal(d_query[0, empty], 0.0)
  np.testing.assert_array_equal(d_key[0, 4:8], 0.0)
  np.testing.assert_array_equal(d_value[0, 4:8], 0.0)
  for got, truth in zip(
    (d_query, d_key, d_value), (want.d_query, want.d_key, want.d_value), strict=True
  ):
    np.testing.assert_allclose(got, truth, atol=5e-6)


def test_D07_block_sizes_of_table_and_kernel_differ(implementation):
  query, key, value = normal(70, 1, 64, 1, 32), normal(71, 1, 192, 1, 32), normal(72, 1, 192, 1, 32)
  for row in ([0, 1, 2], [0, 2], [1]):
    out = block_sparse_attention(
      query,
      key,
      value,
      TileSelection.from_mask(_mask([row], 3)),
      implementation=implementation,
    )
    want = attention(query, key, value, _mask([row], 3).repeat(64, 3)).out
    np.testing.assert_allclose(out, want, atol=3e-6)


def test_D08_grouped_heads(implementation):
  layout = TileLayout([(2, 1, 2)], (1, 1, 2))
  query, key = normal(80, 1, 4, 4, 8), normal(81, 1, 4, 2, 8)
  value = jnp.broadcast_to(jnp.asarray([0.0, 10.0])[:, None], (1, 4, 2, 8))
  attend = lambda *operands: video_sparse_attention(
    *operands, layout, topk=1, implementation=implementation
  )
  out = attend(query, key, value)
  np.testing.assert_allclose(out, np.broadcast_to([[0], [0], [10], [10]], (1, 4, 4, 8)), rtol=1e-6)
  value = normal(82, 1, 4, 2, 8)
  want = vsa(query, key, value, [(2, 1, 2)], (1, 1, 2), 1).out
  np.testing.assert_allclose(attend(query, key, value), want, atol=2e-6)
  with pytest.raises(ValueError, match="2 heads for 3 query heads"):
    attend(query[:, :, :3], key, value)


def test_D10_layout_of_output(implementation):
  layout = TileLayout([(2, 2, 2)], (1, 2, 2))
  query, key, value = qkv(100, 1, 8, 3, 16)
  attend = lambda *operands: video_sparse_attention(
    *operands, layout, topk=1, implementation=implementation, return_aux=True
  )
  out, aux = attend(query, key, value)
  chex.assert_equal_shape((out, query))
  chex.assert_shape(aux.lse, (1, 8, 3))
  heads_first = (x.swapaxes(1, 2) for x in (query, key, value))
  with pytest.raises(ValueError, match="query: got shape"):
    attend(*heads_first)


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 128, 160, 256])
def test_D12_head_dim_limits(implementation, dim):
  _check_head_dim(implementation, dim, jnp.float32)


@pytest.mark.parametrize(("dim", "dtype"), [(256, jnp.float32), (320, jnp.bfloat16)])
def test_D13_shared_memory_limit(implementation, dim, dtype):
  _check_head_dim(implementation, dim, dtype)


def _check_head_dim(implementation, dim, dtype):
  mask = _mask([[0, 2], [1], [1, 2]], 3)
  selection = TileSelection.from_mask(mask)
  query, key, value = qkv(120, 1, 24, 1, dim, dtype=dtype)
  d_out = normal(123, *query.shape, dtype=dtype)
  out, gradients = with_gradients(
    lambda *operands: block_sparse_attention(*operands, selection, implementation=implementation),
    d_out,
    query,
    key,
    value,
  )
  want = attention(query, key, value, mask.repeat(8, 2).repeat(8, 3), d_out=d_out)
  limit = 1e-6 if dtype == jnp.float32 else 6e-3
  for got, truth in zip(
    (out, *gradients), (want.out, want.d_query, want.d_key, want.d_value), strict=True
  ):
    chex.assert_type(got, dtype)
    assert relative(got, truth) < limit


def test_D14_fixed_size_internal_table(implementation):
  # 48 heads of 768 tiles: 36,864 rows, as in the report; the tiles hold one token instead of 64.
  layout = TileLayout([(3, 16, 16)], (1, 1, 1))
  zero = jnp.zeros((1, 768, 48, 4))
  heads = jnp.arange(48.0)[:, None]
  value = jnp.broadcast_to(heads, zero.shape)
  out = video_sparse_attention(zero, zero, value, layout, topk=1, implementation=implementation)
  chex.assert_trees_all_equal(out, value)
