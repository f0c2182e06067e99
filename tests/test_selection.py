"""TileSelection: forms, conversions and checks, against sets in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import to_mask

from tests.strategies import selections
from vsa_jax import TileSelection, block_sparse_attention


def kept(selection):
  """{(b, n, q): sorted key tiles, duplicates included}, by the docstring."""
  ids, counts = np.asarray(selection.indices), np.asarray(selection.counts)
  rows = {}
  for b, n in np.ndindex(ids.shape[:2]):
    for q in range(selection.num_query_tiles):
      if q < selection.num_dense_rows:
        keys = list(range(selection.num_key_tiles))
      else:
        r = q - selection.num_dense_rows
        keys = [*range(selection.num_prefix_tiles), *ids[b, n, r, : counts[b, n, r]].tolist()]
      rows[b, n, q] = sorted(keys)
  return rows


@given(selections())
def test_to_mask_and_to_q2k(selection):
  both = jax.jit(lambda s: (s.to_mask(), *s.to_q2k()))
  mask, table, counts = (np.asarray(x) for x in both(selection))
  assert mask.shape == table.shape == (*counts.shape, selection.num_key_tiles)
  assert mask.dtype == bool
  assert table.dtype == counts.dtype == np.int32
  for at, keys in kept(selection).items():
    distinct = sorted(set(keys))
    assert np.flatnonzero(mask[at]).tolist() == distinct
    assert table[at].tolist() == distinct + [-1] * (selection.num_key_tiles - len(distinct))
    assert counts[at] == len(distinct)


@given(selections())
def test_transposed(selection):
  offsets, rows = (np.asarray(x) for x in jax.jit(TileSelection.transposed)(selection))
  batch, heads, lists, width = selection.indices.shape
  assert offsets.shape == (batch, heads, selection.num_key_tiles + 1)
  assert rows.shape == (batch, heads, lists * width)
  ids, counts = np.asarray(selection.indices), np.asarray(selection.counts)
  for b, n in np.ndindex(batch, heads):
    for key in range(selection.num_key_tiles):
      want = [
        selection.num_dense_rows + r
        for r in range(lists)
        for i in ids[b, n, r, : counts[b, n, r]]
        if i == key
      ]
      assert rows[b, n, offsets[b, n, key] : offsets[b, n, key + 1]].tolist() == want
    assert (rows[b, n, offsets[b, n, -1] :] == selection.num_query_tiles).all()


from_mask = jax.jit(TileSelection.from_mask)


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_from_mask_round_trip(seed, density):
  mask = np.random.default_rng(seed).random((2, 2, 4, 6)) < density
  selection = TileSelection.from_mask(mask)
  assert selection.width == mask.sum(-1).max()
  assert (np.diff(np.asarray(selection.indices), axis=-1) >= 0).all()
  past = np.arange(selection.width) >= np.asarray(selection.counts)[..., None]
  assert (np.asarray(selection.indices)[past] == 6).all()
  np.testing.assert_array_equal(to_mask(selection), mask)
  traced = from_mask(mask)
  assert traced.width == 6
  np.testing.assert_array_equal(to_mask(traced), mask)


@pytest.mark.parametrize("mask", [np.ones((1, 2, 3), bool), np.ones((1, 1, 2, 2), int), True, None])
def test_from_mask_wants_a_block_mask(mask):
  with pytest.raises(ValueError, match=r"mask: got .* want bool \[B, N, Jq, Jk\]"):
    TileSelection.from_mask(mask)


def test_defaults():
  selection = TileSelection(jnp.zeros((1, 1, 4, 2), jnp.int32), jnp.zeros((1, 1, 4), jnp.int32), 3)
  assert selection.num_dense_rows == 3
  assert selection.num_key_tiles == selection.num_query_tiles == 7


def test_it_is_a_pytree():
  selection = TileSelection(
    jnp.zeros((1, 1, 4, 2), jnp.int32), jnp.zeros((1, 1, 4), jnp.int32), 1, num_key_tiles=9
  )
  leaves, tree = jax.tree.flatten(selection)
  assert len(leaves) == 2
  assert jax.tree.unflatten(tree, ["a", "b"]).indices == "a"  # no checks on the way
  doubled = jax.jit(lambda s: jax.tree.map(lambda x: 2 * x, s))(selection)
  assert (doubled.num_prefix_tiles, doubled.num_key_tiles) == (1, 9)
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(selection)]
  assert paths == [".indices", ".counts"]


def attend(selection, batch=1, heads=1, query_tiles=4, key_tiles=4):
  query = jnp.ones((batch, query_tiles * 2, heads, 4))
  key = jnp.ones((batch, key_tiles * 2, heads, 4))
  return block_sparse_attention(query, key, key, selection)


def table(ids, counts, *args, **kwargs):
  return TileSelection(jnp.asarray(ids, jnp.int32), jnp.asarray(counts, jnp.int32), *args, **kwargs)


FOUR = np.arange(4).reshape(1, 1, 4, 1)
ONES = np.ones((1, 1, 4))


@pytest.mark.parametrize(
  ("selection", "message"),
  [
    (np.ones((1, 1, 4, 4), bool), "from_mask turns a block mask"),
    (None, "selection: got NoneType"),
    (table(FOUR[0], ONES), r"selection.indices: got shape \[1, 4, 1\]"),
    (table(FOUR, ONES[0]), r"selection.counts: got shape \[1, 4\], want \[1, 1, 4\]"),
    (table(np.repeat(FOUR, 2, 1), np.repeat(ONES, 2, 1)), r"want \[1, 1, R, W\]"),
    (
      dataclasses.replace(table(FOUR, ONES), indices=jnp.asarray(FOUR * 1.0)),
      "float32, want int32",
    ),
    (table(FOUR, ONES * 2), r"selection.counts\[0, 0, 0\]: got 2, want 0..1"),
    (table(FOUR, -ONES), r"selection.counts\[0, 0, 0\]: got -1"),
    (table(FOUR + 1, ONES), r"selection.indices\[0, 0, 3, 0\]: got key tile 4, want \[0, 4\)"),
    (table(FOUR - 1, ONES), r"selection.indices\[0, 0, 0, 0\]: got key tile -1"),
    (table(FOUR, ONES, 1, num_dense_rows=0, num_key_tiles=4), "kept already"),
    (table(FOUR, ONES, 5, num_dense_rows=0, num_key_tiles=4), "num_prefix_tiles=5"),
    (table(FOUR, ONES, -1, num_dense_rows=0, num_key_tiles=4), "num_prefix_tiles=-1"),
    (table(FOUR, ONES, num_key_tiles=5), r"key: got 8 tokens, want 10"),
    (table(FOUR[:, :, :3], ONES[:, :, :3]), "query: got 8 tokens, want a multiple"),
  ],
)
def test_wrong_tables_are_named(selection, message):
  with pytest.raises(ValueError, match=message):
    attend(selection)


def test_junk_past_the_counts_is_not_read():
  rng = np.random.default_rng(0)
  operands = [jnp.asarray(rng.standard_normal((1, 8, 1, 4)), jnp.float32) for _ in range(3)]
  ids = np.array([[2, 1], [3, 0], [1, 2], [0, 3]])[None, None]
  counts = np.array([[[2, 1, 0, 1]]])
  attend = lambda ids: block_sparse_attention(*operands, table(ids, counts), return_lse=True)
  past = np.arange(2) >= counts[..., None]
  out, lse = attend(np.where(past, 4, ids))
  for junk in (99, -7, 0):
    for got, want in zip(attend(np.where(past, junk, ids)), (out, lse), strict=True):
      np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(out[:, 4:6], 0.0)  # row 2 counts nothing
  np.testing.assert_array_equal(lse[:, 4:6], -np.inf)
  assert np.abs(out).max() > 0.1


def test_conversions_refuse_a_bad_table():
  for ids, counts in (([[[[7]]]], [[[1]]]), ([[[[0]]]], [[[2]]])):
    bad = TileSelection(np.array(ids), np.array(counts), num_key_tiles=2)
    for convert in (bad.to_mask, bad.to_q2k, bad.transposed):
      with pytest.raises(ValueError, match=r"selection\.(indices|counts)\[0, 0, 0"):
        convert()
