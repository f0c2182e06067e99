"""Routing and top-k."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import attention
from running import column, normal

from vsa_jax import (
  TileLayout,
  TileSelection,
  block_sparse_attention,
  select_tiles,
  tile_budget,
  video_sparse_attention,
)


def test_B01_top_k_budget_on_ragged_grids():
  layout = TileLayout([(5, 5, 5)], (4, 4, 4))
  assert layout.num_tiles == 8
  scores = normal(10, 1, 2, 8, 8)
  cases = [
    ({"sparsity": 0.75}, 2),
    ({"sparsity": 1.0}, 1),
    ({"sparsity": 0.0}, 8),
    ({"topk": 99}, 8),
  ]
  tables = jax.jit(
    lambda scores: [select_tiles(scores, layout, **options).to_q2k() for options, _ in cases]
  )(scores)
  for (table, counts), (_, kept) in zip(tables, cases, strict=True):
    np.testing.assert_array_equal(counts, np.full((1, 2, 8), kept))
    best = np.sort(np.argsort(-np.asarray(scores), axis=-1)[..., :kept], axis=-1)
    np.testing.assert_array_equal(table[..., :kept], best)
    np.testing.assert_array_equal(table[..., kept:], -1)


@pytest.mark.parametrize("number", [float, np.float32, np.float64, jnp.float32])
@pytest.mark.parametrize(
  ("sparsity", "tiles", "kept"), [(0.7, 10, 3), (0.95, 20, 1), (0.9, 640, 64)]
)
def test_B03_float_rounding_of_the_budget(sparsity, tiles, kept, number):
  assert tile_budget(number(sparsity), tiles) == kept


def test_B03_same_count_in_every_implementation(implementation):
  layout = TileLayout([(10, 1, 1)], (1, 1, 1))
  x = normal(30, 1, 10, 1, 4)
  for sparsity in (0.7, np.float32(0.7)):
    _, aux = video_sparse_attention(
      x, x, x, layout, sparsity=sparsity, implementation=implementation, return_aux=True
    )
    np.testing.assert_array_equal(aux.selection.to_q2k()[1], np.full((1, 1, 10), 3))


def test_B04_ties_in_top_k(implementation):
  layout = TileLayout([(5, 1, 4)], (1, 1, 4))
  zero = column(*[0.0] * 20)
  value = column(*np.repeat([1.0, 2, 4, 8, 16], 4))

  def attend(query, key, value):
    return video_sparse_attention(
      query, key, value, layout, topk=2, implementation=implementation, return_aux=True
    )

  results = [attend(zero, zero, value), jax.jit(attend)(zero, zero, value)]
  # A negative zero is a zero.
  results.append(attend(-zero, column(*np.repeat([0.0, 1, -1, 0, 1], 4)), value))
  for out, aux in results:
    np.testing.assert_array_equal(aux.selection.indices[0, 0], [[0, 1]] * 5)
    np.testing.assert_allclose(out.ravel(), [1.5] * 20, rtol=1e-6)


def test_B06_top_k_over_the_wrong_axis(implementation):
  layout = TileLayout([(2, 1, 2)], (1, 1, 2))
  out, aux = video_sparse_attention(
    column(9, 9, 1, 1),
    column(1, 1, 0.5, 0.5),
    column(3, 3, 7, 7),
    layout,
    topk=1,
    scale=1.0,
    implementation=implementation,
    return_aux=True,
  )
  np.testing.assert_allclose(out.ravel(), [3.0] * 4, rtol=1e-6)
  np.testing.assert_allclose(aux.lse.ravel(), [9.693147] * 2 + [1.693147] * 2, rtol=2e-7)


def _table(ids, counts):
  """The lists of 4 query tiles over 4 key tiles; list 0 as given, the others tile 0 alone."""
  ids = np.array([ids, [0, 4], [0, 4], [0, 4]], np.int32)
  return ids[None, None], np.array([counts, 1, 1, 1], np.int32)[None, None]


@pytest.mark.parametrize(
  ("ids", "count", "said"),
  [([2, 7], 2, "7"), ([2, -1], 2, "-1"), ([2, 3], 5, "5"), ([2, 3], -1, "-1")],
)
def test_B07_unchecked_index_table(implementation, ids, count, said):
  query, key, value = (normal(70 + i, 1, 16, 1, 4) for i in range(3))

  def attend(query, key, value, ids, counts):
    return block_sparse_attention(
      query,
      key,
      value,
      TileSelection(ids, counts),
      implementation=implementation,
      return_lse=True,
    )

  table = _table(ids, count)
  with pytest.raises(ValueError, match="selection") as caught:
    attend(query, key, value, *table)
  assert f"got {said}" in str(caught.value) or f"tile {said}" in str(caught.value)

  # Under jit: an id out of range keeps no key, a count is clipped to the width.
  want = {
    (2, 7): [2],
    (2, -1): [2],
    (2, 3): [2, 3] if count > 0 else [],
  }[tuple(ids)]
  keep = np.zeros((4, 4))
  keep[0, want] = 1
  keep[1:, 0] = 1
  truth = attention(query, key, value, keep.repeat(4, 0).repeat(4, 1))
  (out, lse), vjp = jax.vjp(lambda *x: jax.jit(attend)(*x, *table), query, key, value)
  np.testing.assert_allclose(out, truth.out, atol=2e-6)
  np.testing.assert_allclose(lse, truth.lse, atol=2e-6)
  unread = np.setdiff1d(np.arange(4), [*want, 0])
  d_query, d_key, d_value = vjp((normal(75, *out.shape), jnp.where(lse == -jnp.inf, 0, 1.0)))
  chex.assert_tree_all_finite((d_query, d_key, d_value))
  for gradient in (d_key, d_value):
    gradient = np.asarray(gradient).reshape(4, 16)
    assert not gradient[unread].any()
    assert all(gradient[j].any() for j in want)


def test_B09_block_map_ignored(implementation):
  layout = TileLayout([(4, 1, 2)], (1, 1, 2))
  key, value = column(*np.repeat([0.0, 0, 5, 0], 2)), column(*np.repeat([0.0, 100, 2, 300], 2))
  query = column(*[1.0] * 8)
  options = {"scale": 1.0, "implementation": implementation}
  out = video_sparse_attention(query, key, value, layout, topk=1, **options)
  np.testing.assert_array_equal(out.ravel(), [2.0] * 8)
  out = video_sparse_attention(query, key, value, layout, topk=4, **options)
  np.testing.assert_allclose(out.ravel(), [4.60215] * 8, atol=5e-6)


@pytest.mark.parametrize("swapped", [False, True])
def test_B10_block_map_per_head(implementation, swapped):
  layout = TileLayout([(2, 1, 2)], (1, 1, 2))
  heads = slice(None, None, -1 if swapped else 1)
  key = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], np.float32)[None, :, heads, None]
  value = column(0, 0, 1, 1, heads=2)
  out = video_sparse_attention(
    jnp.ones((1, 4, 2, 1)), jnp.asarray(key), value, layout, topk=1, implementation=implementation
  )
  np.testing.assert_array_equal(out[0, :, heads, 0], [[0.0, 1.0]] * 4)


def test_B11_ambiguous_argument():
  layout = TileLayout([(4, 1, 1)], (1, 1, 1))
  x = column(1, 2, 3, 4)
  _, aux = video_sparse_attention(x, x, x, layout, topk=1, return_aux=True)
  np.testing.assert_array_equal(aux.selection.to_q2k()[1], np.ones((1, 1, 4)))
  for topk in (0.5, 1.0, np.float32(1.0), True):
    with pytest.raises(ValueError, match=r"topk: .*sparsity"):
      video_sparse_attention(x, x, x, layout, topk=topk)
  with pytest.raises(ValueError, match=r"sparsity.*topk.*exactly one"):
    video_sparse_attention(x, x, x, layout, topk=1, sparsity=0.5)
  with pytest.raises(ValueError, match=r"exactly one"):
    video_sparse_attention(x, x, x, layout)
  with pytest.raises(ValueError, match=r"sparsity: .*topk"):
    video_sparse_attention(x, x, x, layout, sparsity=2)
