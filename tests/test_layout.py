"""TileLayout: values, equality, errors; against a token-by-token oracle."""

import copy
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given
from numpy_oracle import cut

from tests.strategies import layouts
from vsa_jax import TileLayout


@given(layouts())
def test_agrees_with_the_rules(layout):
  tiles = cut(layout.segments, layout.tile)
  sizes = [len(tokens) for tokens in tiles.members]
  np.testing.assert_array_equal(layout.slots, tiles.slots(layout.tile_size))
  np.testing.assert_array_equal(layout.tile_sizes, sizes)
  assert layout.tile_sizes.dtype == layout.slots.dtype == np.int32
  assert layout.num_tiles == len(sizes)
  assert layout.padded_length == len(sizes) * layout.tile_size
  assert layout.is_ragged == (min(sizes) < layout.tile_size)
  assert layout.num_prefix_tiles == tiles.num_prefix
  assert list(layout.video_spans) == tiles.spans


@given(layouts())
def test_full_lengths_are_the_layouts_own_sizes(layout):
  full = np.array([[s if isinstance(s, int) else int(np.prod(s)) for s in layout.segments]])
  np.testing.assert_array_equal(layout.tile_sizes_for(full)[0], layout.tile_sizes)
  assert not layout.tile_sizes_for(0 * full).any()


def test_sizes_for_shorter_samples():
  layout = TileLayout([5, (3, 2, 3)], (2, 2, 2))
  lengths = np.array([[5, 18], [3, 12], [0, 6]])
  want = [
    [5, 8, 4, 4, 2],
    [3, 8, 4, 0, 0],
    [0, 4, 2, 0, 0],
  ]
  np.testing.assert_array_equal(layout.tile_sizes_for(lengths), want)
  traced = jax.jit(layout.tile_sizes_for)(lengths)
  np.testing.assert_array_equal(traced, want)
  assert traced.dtype == np.int32


def test_a_short_sample_keeps_its_first_tokens():
  layout = TileLayout([5, (3, 2, 3)], (2, 2, 2))
  valid = np.arange(8) < np.asarray(layout.tile_sizes_for([[3, 12]]))[0][:, None]
  kept = np.flatnonzero(valid.ravel()[layout.slots])
  np.testing.assert_array_equal(kept, [0, 1, 2, *range(5, 17)])


@pytest.mark.parametrize(
  ("lengths", "message"),
  [
    ([5, 18], "want an integer array"),
    ([[5, 18, 1]], "one column per segment"),
    ([[5.0, 18.0]], "float64"),
    ([[6, 18]], r"lengths\[0, 0\]: got 6, want 0..5"),
    ([[5, -6]], r"lengths\[0, 1\]: got -6"),
    ([[5, 7]], "in whole frames of 6 tokens"),
  ],
)
def test_wrong_lengths(lengths, message):
  with pytest.raises(ValueError, match=message):
    TileLayout([5, (3, 2, 3)], (2, 2, 2)).tile_sizes_for(lengths)


def test_equal_layouts_are_equal():
  a = TileLayout([0, 77, (4, 5, 6)], (2, 2, 2))
  b = TileLayout((np.int64(77), np.array([4, 5, 6])), [2, np.int32(2), 2])
  assert a == b
  assert hash(a) == hash(b)
  assert a != TileLayout([77, (4, 6, 5)], (2, 2, 2))
  assert a.segments == (77, (4, 5, 6))
  assert all(type(n) is int for n in (*a.tile, a.segments[0], *a.segments[1]))
  assert a.slots is b.slots  # computed once per value


def test_it_copies_and_pickles():
  layout = TileLayout([7, (4, 5, 6)], (2, 2, 2))
  assert copy.deepcopy(layout) == pickle.loads(pickle.dumps(layout)) == layout


def test_arrays_are_read_only():
  layout = TileLayout([(4, 4, 4)], (2, 2, 2))
  with pytest.raises(ValueError, match="read-only"):
    layout.slots[0] = 1
  with pytest.raises(ValueError, match="read-only"):
    layout.tile_sizes[0] = 1
  with pytest.raises(AttributeError):
    layout.tile = (1, 1, 1)


@pytest.mark.parametrize(
  ("segments", "tile", "message"),
  [
    ([], (2, 2, 2), "holds no tokens"),
    ([0, 0], (2, 2, 2), "holds no tokens"),
    ([-1], (2, 2, 2), r"segments\[0\]: got -1"),
    ([3, (4, 0, 4)], (2, 2, 2), r"segments\[1\].*three positive ints"),
    ([(4, 4)], (2, 2, 2), "three positive ints"),
    ([(4, 4, 4, 4)], (2, 2, 2), "three positive ints"),
    ([2.0], (2, 2, 2), r"segments\[0\]: got 2.0"),
    ([(4, 4.5, 4)], (2, 2, 2), r"segments\[0\]"),
    ([True], (2, 2, 2), r"segments\[0\]: got True"),
    (["text"], (2, 2, 2), r"segments\[0\]: got 'text'"),
    ("abc", (2, 2, 2), "segments: got 'abc'"),
    (5, (2, 2, 2), "segments: got 5"),
    (None, (2, 2, 2), "segments: got None"),
    ([(4, 4, 4)], 64, "tile: got 64.*three positive ints"),
    ([(4, 4, 4)], (4, 4), "tile: got"),
    ([(4, 4, 4)], (4, 4, 0), "tile: got"),
    ([(4, 4, 4)], (4, 4, -4), "tile: got"),
    ([(4, 4, 4)], (4.0, 4, 4), "tile: got"),
    ([(4, 4, 4)], "444", "tile: got"),
    ([(4, 4, 4)], None, "tile: got"),
    ([(2**11, 2**10, 2**10)], (4, 4, 4), "at most 2147483647"),
  ],
)
def test_wrong_arguments(segments, tile, message):
  with pytest.raises(ValueError, match=message):
    TileLayout(segments, tile)


def test_it_is_an_ordinary_argument():
  traces = []

  @jax.jit
  def f(x, layout):
    traces.append(layout)
    return x * layout.num_tokens

  for _ in range(3):
    assert f(1.0, TileLayout([3, (4, 4, 4)], (2, 2, 2))) == 67
  assert len(traces) == 1
  assert f(1.0, TileLayout([4, (4, 4, 4)], (2, 2, 2))) == 68
  assert len(traces) == 2
