"""Mixed segments, reference regions, batch, cross lengths."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import attention, vsa
from running import column, normal, qkv, to_mask, with_gradients

from vsa_jax import TileLayout, TileSelection, block_sparse_attention, video_sparse_attention

C01 = TileLayout([3, (2, 1, 4)], (1, 1, 4))
C01_VALUE = np.repeat([9.0, 1.0, 2.0], [3, 4, 4])


def test_C01_prefix_rows_stay_dense(implementation):
  zero = column(*[0.0] * 11)
  out, aux = video_sparse_attention(
    zero, zero, column(*C01_VALUE), C01, topk=1, implementation=implementation, return_aux=True
  )
  np.testing.assert_allclose(out.ravel(), [3.545455] * 3 + [4.428571] * 8, rtol=3e-7)
  np.testing.assert_allclose(aux.lse.ravel(), [2.397895] * 3 + [1.945910] * 8, rtol=5e-7)


def test_C03_top_k_per_region(implementation):
  layout = TileLayout([(4, 1, 1), (4, 1, 1)], (1, 1, 1))
  key = column(0, 0.1, 0.2, 0.3, 1, 1.1, 1.2, 1.3)
  out, aux = video_sparse_attention(
    column(*[1.0] * 8),
    key,
    column(*range(8)),
    layout,
    topk=1,
    scale=1.0,
    implementation=implementation,
    return_aux=True,
  )
  np.testing.assert_array_equal(aux.selection.indices[0, 0], [[3, 7]] * 8)
  np.testing.assert_allclose(out.ravel(), [5.924234] * 8, rtol=2e-7)


def test_C05_per_sample_valid_prefix_length(implementation):
  sizes = C01.tile_sizes_for([[3, 8], [1, 8]])
  np.testing.assert_array_equal(sizes, [[3, 4, 4], [1, 4, 4]])
  zero, value = jnp.zeros((2, 11, 1, 1)), jnp.tile(column(*C01_VALUE), (2, 1, 1, 1))

  def attend(query, key, value, sizes):
    return video_sparse_attention(
      query, key, value, C01, topk=1, tile_sizes=sizes, implementation=implementation
    )

  for sizes_given in (sizes, jnp.asarray(sizes)):
    out = attend(zero, zero, value, sizes_given)
    np.testing.assert_allclose(out[0, 3:].ravel(), [4.428571] * 8, rtol=2e-7)
    np.testing.assert_allclose(out[1, 3:].ravel(), [2.6] * 8, rtol=2e-7)
    np.testing.assert_array_equal(out[1, 1:3].ravel(), [0.0, 0.0])  # padded query rows

  # Each sample equals its own run, and the run in which what it lacks is not there at all.
  query, key, value = qkv(50, 2, 11, 2, 8)
  both = attend(query, key, value, sizes)
  for b in range(2):
    alone = attend(*(x[b : b + 1] for x in (query, key, value)), sizes[b : b + 1])
    chex.assert_trees_all_close(both[b : b + 1], alone, atol=1e-6)
  short = [x[1:, [0, *range(3, 11)]] for x in (query, key, value)]
  np.testing.assert_allclose(
    both[1:, [0, *range(3, 11)]], vsa(*short, [1, (2, 1, 4)], (1, 1, 4), 1).out, atol=2e-6
  )


def test_C06_batch_above_one(implementation):
  query, key, value = qkv(60, 3, 11, 2, 8)

  def attend(query, key, value):
    return video_sparse_attention(
      query, key, value, C01, topk=1, implementation=implementation, return_aux=True
    )

  out, aux = attend(query, key, value)
  for b in range(3):
    alone, aux_alone = attend(*(x[b : b + 1] for x in (query, key, value)))
    chex.assert_trees_all_close(out[b : b + 1], alone, atol=1e-6)
    chex.assert_trees_all_equal(to_mask(aux.selection)[b : b + 1], to_mask(aux_alone.selection))
  np.testing.assert_allclose(
    out, vsa(query, key, value, [3, (2, 1, 4)], (1, 1, 4), 1).out, atol=2e-6
  )


def test_C08_other_query_length_with_a_key_mask(implementation):
  query = jnp.zeros((1, 8, 1, 1))
  selection = TileSelection.from_mask(np.ones((1, 1, 2, 1), bool))
  out, lse = block_sparse_attention(
    query,
    column(0, 0, 0, 0),
    column(2, 4, 100, 100),
    selection,
    tile_sizes=np.array([2]),
    implementation=implementation,
    return_lse=True,
  )
  np.testing.assert_allclose(out.ravel(), [3.0] * 8, rtol=1e-6)
  np.testing.assert_allclose(lse.ravel(), [np.log(2)] * 8, rtol=1e-6)


def test_C10_empty_segment(implementation):
  video, tile = (2, 1, 4), (1, 1, 4)

  def attend(layout, query, key, value, gate):
    return video_sparse_attention(
      query, key, value, layout, topk=1, gate=gate, implementation=implementation
    )

  for with_empty, without in [([0, 0, 0, video], [video]), ([0, 5, 0, video], [5, video])]:
    layout = TileLayout(with_empty, tile)
    assert layout == TileLayout(without, tile)
    operands = (*qkv(100, 1, layout.num_tokens, 2, 8), normal(103, 1, layout.num_tokens, 2, 8))
    out = attend(layout, *operands)
    chex.assert_trees_all_equal(out, attend(TileLayout(without, tile), *operands))
    want = vsa(*operands[:3], without, tile, 1, gate=operands[3]).out
    np.testing.assert_allclose(out, want, atol=3e-6)
  with pytest.raises(ValueError, match="no tokens"):
    TileLayout([0, 0], tile)
  with pytest.raises(ValueError, match=r"segments\[1\].*leave an absent video out"):
    TileLayout([3, (0, 4, 4)], tile)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_C11_empty_video_part(implementation, dim):
  layout = TileLayout([7, 5], (1, 2, 4))
  query, key, value = qkv(110, 1, 12, 1, dim)
  gate, d_out = normal(113, *query.shape), normal(114, *query.shape)
  attend = lambda query, key, value: video_sparse_attention(
    query, key, value, layout, sparsity=0.9, implementation=implementation
  )
  out, gradients = with_gradients(attend, d_out, query, key, value)
  want = attention(query, key, value, d_out=d_out)
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  for got, truth in zip(gradients, (want.d_query, want.d_key, want.d_value), strict=True):
    np.testing.assert_allclose(got, truth, atol=5e-6)
  if dim == 64:
    out = video_sparse_attention(
      query, key, value, layout, sparsity=0.9, gate=gate, implementation=implementation
    )
    want = vsa(query, key, value, [7, 5], (1, 2, 4), 1, gate=gate)
    np.testing.assert_allclose(out, want.out, atol=2e-6)


def test_C12_tiny_unequal_segments(implementation):
  segments, tile = [1, 2, 3, (1, 1, 2)], (1, 1, 2)
  layout = TileLayout(segments, tile)
  np.testing.assert_array_equal(layout.tile_sizes, [1, 2, 2, 1, 2])
  query, key, value = qkv(120, 1, 8, 2, 8)
  out = video_sparse_attention(query, key, value, layout, topk=1, implementation=implementation)
  np.testing.assert_allclose(out, vsa(query, key, value, segments, tile, 1).out, atol=2e-6)
  for sizes in ([1, 2, 2, 1, 3], [1, 2, 2, -1, 2], [1, 2, 2, 1], [1.0, 2, 2, 1, 2]):
    with pytest.raises(ValueError, match="tile_sizes"):
      video_sparse_attention(
        query, key, value, layout, topk=1, tile_sizes=sizes, implementation=implementation
      )


def test_C14_empty_batch(implementation):
  layout = TileLayout([(5, 8, 8)], (4, 4, 4))
  query = jnp.zeros((0, 320, 2, 64))
  for gate in (None, query):
    attend = lambda query, key, value, gate=gate: video_sparse_attention(
      query, key, value, layout, topk=2, gate=gate, implementation=implementation
    )
    out, gradients = with_gradients(attend, query, query, query, query)
    chex.assert_shape((out, *gradients), (0, 320, 2, 64))
  assert jax.tree.leaves(gradients)[0].dtype == jnp.float32
