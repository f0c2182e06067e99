"""Hypothesis strategies for layouts and selections."""

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from vsa_jax import TileLayout, TileSelection

tiles = st.tuples(*[st.integers(1, 4)] * 3)
grids = st.tuples(*[st.integers(1, 7)] * 3)


@st.composite
def layouts(draw, max_segments=4):
  segments = draw(st.lists(st.one_of(st.integers(0, 20), grids), min_size=1, max_size=max_segments))
  if not any(segments):
    segments.append(draw(st.integers(1, 20)))
  return TileLayout(segments, draw(tiles))


@st.composite
def selections(draw):
  """Any legal table: any order, any counts, duplicates, unequal tile counts, junk past the count."""
  seed = draw(st.integers(0, 2**32 - 1))
  rng = np.random.default_rng(seed)
  batch, heads = draw(st.integers(0, 2)), draw(st.integers(1, 3))
  keys = draw(st.integers(1, 7))
  prefix = draw(st.integers(0, keys))
  dense, rows, width = draw(st.integers(0, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 6))
  counts = rng.integers(0, width + 1, (batch, heads, rows))
  if prefix == keys:
    counts[...] = 0
  ids = rng.integers(prefix, max(keys, prefix + 1), (batch, heads, rows, width))
  junk = rng.integers(-3, keys + 3, ids.shape)
  ids = np.where(np.arange(width) < counts[..., None], ids, junk)
  return TileSelection(
    jnp.asarray(ids, jnp.int32),
    jnp.asarray(counts, jnp.int32),
    prefix,
    num_dense_rows=dense,
    num_key_tiles=keys,
  )
