"""python -m vsa_jax tour: the worked examples of Video Sparse Attention, each computed by the library."""

from __future__ import annotations

import argparse
import fractions
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vsa_jax
from vsa_jax import TileLayout, TileSelection

_NAMES = "ABCD"


def main(argv: list[str] | None = None) -> int:
  """Prints the tour."""
  parser = argparse.ArgumentParser(
    prog="python -m vsa_jax tour",
    description="Walks through Video Sparse Attention on examples small enough to check by hand.",
  )
  parser.parse_args(argv)
  layout = TileLayout([(4, 4, 4)], tile=(4, 2, 2))
  _tiles(layout)
  _scores(layout)
  selection = _choice(layout)
  _masks(layout)
  _work(layout, selection)
  _blind_spot()
  _budgets()
  _packed_sequence()
  return 0


def _tiles(layout: TileLayout) -> None:
  _title(
    f"1. Tiles: a video of {layout.segments[0]} tokens (T, H, W), cut in tiles of {layout.tile}"
  )
  tile_of = layout.slots // layout.tile_size
  cells = [f"{_NAMES[tile_of[i]]}{i:<3}" for i in range(layout.num_tokens)]
  print("  " + "".join(f"t = {t:<15}" for t in range(4)).rstrip())
  for y in range(4):
    rows = (" ".join(cells[16 * t + 4 * y :][:4]) for t in range(4))
    print("  " + "".join(f"{row:<19}" for row in rows).rstrip())
  tokens = jnp.arange(layout.num_tokens)[None]
  packed = vsa_jax.tile_tokens(tokens, layout)
  print("Neighbours in space and time share a tile; tile_tokens lays each tile in one run:")
  for name, run in zip(_NAMES, packed.reshape(layout.num_tiles, -1), strict=True):
    print(f"  {name}: {_row(run)}")
  back = jnp.array_equal(vsa_jax.untile_tokens(packed, layout), tokens)
  print(f"Position 2 holds token {packed[0, 2]}; untile_tokens puts it back at 4: {_yes(back)}.")


def _scores(layout: TileLayout) -> None:
  _title("2. Scores: mean query of a tile . mean key of a tile / sqrt(features)")
  # Every token of a frame is equal, and only query tile A and key tile B hold anything.
  query_frames = jnp.array([[2, 0], [0, 2], [2, 2], [0, 0]], jnp.float32)
  key_frames = jnp.array([[1, 0], [1, 0], [3, 2], [3, 2]], jnp.float32)
  query, key = (
    jnp.zeros((1, 4, 4, 4, 1, 2)).at[:, :, :2, x : x + 2].set(frames[None, :, None, None, None])
    for frames, x in ((query_frames, 0), (key_frames, 2))
  )
  pooled_query, pooled_key = (
    vsa_jax.pool_tiles(vsa_jax.tile_tokens(x.reshape(1, 64, 1, 2), layout), layout)
    for x in (query, key)
  )
  score = vsa_jax.routing_scores(pooled_query, pooled_key)[0, 0, 0, 1]
  print(
    f"  queries of A, frame by frame {_vectors(query_frames)}  mean {_vector(pooled_query[0, 0, 0])}"
  )
  print(
    f"  keys of B, frame by frame    {_vectors(key_frames)}  mean {_vector(pooled_key[0, 1, 0])}"
  )
  print(f"  score(A, B) = {score:.6f}    by hand: 3 / sqrt(2) = {3 / math.sqrt(2):.6f}")


def _choice(layout: TileLayout) -> TileSelection:
  _title("3. Choice: each query tile keeps the key tiles of its highest scores")
  row = jnp.array([0.2, 3.1, -0.5, 2.4])
  scores = jnp.stack([jnp.roll(row, shift) for shift in range(4)])[None, None]
  selection = vsa_jax.select_tiles(scores, layout, topk=2)
  table, counts = selection.to_q2k()
  mask = selection.to_mask()[0, 0]
  print("             A     B     C     D   kept   table          count")
  for i, name in enumerate(_NAMES):
    values = "".join(f"{float(s):6.1f}" for s in scores[0, 0, i])
    kept = "".join(_NAMES[j] for j in np.flatnonzero(mask[i]))
    print(f"  query {name} {values}   {kept:<6} {_row(table[0, 0, i]):<14} {counts[0, 0, i]}")
  print("A keeps B; B need not keep A. Every head, layer and step chooses anew.")
  return selection


def _masks(layout: TileLayout) -> None:
  _title("4. Why tiles are packed: the queries of A against the keys of B, first rows of frame 0")
  tile_of = layout.slots // layout.tile_size
  before = np.arange(8)
  after = before[np.argsort(layout.slots[before])]
  grids = [
    [f"{'q/k':>5} " + _row(order)]
    + [f"{query:>5} " + " ".join(_mark(query, key, tile_of) for key in order) for query in order]
    for order in (before, after)
  ]
  print(f"  {'before':<30}after")
  for left, right in zip(*grids, strict=True):
    print(f"  {left:<30}{right}")
  print("# is a pair to compute, * is query 4 on key 2: scattered pairs become one block.")


def _mark(query: int, key: int, tile_of: np.ndarray) -> str:
  if (tile_of[query], tile_of[key]) != (0, 1):
    return "."
  return "*" if (query, key) == (4, 2) else "#"


def _work(layout: TileLayout, selection: TileSelection) -> None:
  _title("5. Work: pairs of vectors multiplied")
  dense = layout.num_tokens**2
  sparse = int(selection.to_mask().sum()) * layout.tile_size**2
  print(f"  dense {dense}    routing {layout.num_tiles**2}    sparse {sparse}")
  query, key, value = (
    jax.random.normal(jax.random.key(i), (1, layout.num_tokens, 1, 8)) for i in range(3)
  )
  whole = vsa_jax.video_sparse_attention(query, key, value, layout, sparsity=0)
  error = jnp.abs(whole - jax.nn.dot_product_attention(query, key, value)).max()
  print("Within what is kept, attention is exact: one softmax over the original keys. Keeping all")
  print(f"is jax.nn.dot_product_attention; the largest difference on random input is {error:.0e}.")


def _blind_spot() -> None:
  _title("6. What means cannot see")
  layout = TileLayout([(1, 1, 4)], tile=(1, 1, 2))
  query = jnp.array([10.0, -10.0, 0, 0]).reshape(1, 4, 1, 1)
  key = jnp.array([0, 0, 10.0, 10.0]).reshape(1, 4, 1, 1)
  pooled_query, pooled_key = (vsa_jax.pool_tiles(x, layout) for x in (query, key))
  score = vsa_jax.routing_scores(pooled_query, pooled_key)[0, 0, 0, 1]
  best = jnp.max(query[0, :2, 0] @ key[0, 2:, 0].T)
  print(
    f"  queries {_vector(query[0, :2, 0, 0])} pool to {pooled_query[0, 0, 0, 0]:g}; against keys",
    end=" ",
  )
  print(
    f"{_vector(key[0, 2:, 0, 0])} the tiles score {score:g}, yet a token pair reaches {best:g}."
  )
  print(
    "Training with sparse attention teaches queries of a tile to agree; so measure quality, and"
  )
  print("coverage (vsa_jax.diagnostics), when weights were not trained with it.")


def _budgets() -> None:
  _title("7. Budgets: ceil((1 - sparsity) n) tiles, in exact arithmetic")
  for sparsity, tiles in ((0.7, 10), (0.75, 256), (0.9, 630)):
    floating = math.ceil((1 - sparsity) * tiles)
    print(
      f"  sparsity {sparsity:<4} of {tiles:>3} tiles keeps {vsa_jax.tile_budget(sparsity, tiles):>2}"
      f"    (in floating point {floating})"
    )
  exact = 1 - fractions.Fraction(0.7).limit_denominator(10_000)
  print(f"1 - 0.7 is {1 - 0.7!r} in floating point; here it is {exact}.")


def _packed_sequence() -> None:
  _title("8. A packed sequence: text, reference video, image, audio, target video")
  layout = TileLayout([130, (4, 8, 16), 60, 200, (8, 8, 16)], tile=(4, 4, 8))
  print(f"  TileLayout({list(layout.segments)}, tile={layout.tile})")
  print("Text, image and audio are cut in runs and come first, the prefix; no tile mixes segments.")
  spans = ", ".join(f"[{a}, {b})" for a, b in layout.video_spans)
  print(f"  {layout.num_tiles} tiles: prefix {layout.num_prefix_tiles}, video regions {spans}")
  print(f"  sizes {_row(layout.tile_sizes)}")
  print(
    f"  {layout.num_tokens} tokens in {layout.padded_length} slots ({layout.num_tiles} x {layout.tile_size})"
  )
  for token in (137, 138, 642, 1925):
    tile, place = divmod(int(layout.slots[token]), layout.tile_size)
    print(f"  token {token:>4} sits in tile {tile:>2} at place {place}")
  scores = jax.random.normal(jax.random.key(0), (1, 1, layout.num_tiles, layout.num_tiles))
  _, counts = vsa_jax.select_tiles(scores, layout, sparsity=0.75).to_q2k()
  print(f"  key tiles kept at sparsity 0.75, by query tile: {_row(counts[0, 0])}")
  print("Prefix queries see everything; a video query sees the prefix and the best of each region.")


def _title(text: str) -> None:
  print(f"\n{text}\n{'-' * len(text)}")


def _row(values: Iterable[Any]) -> str:
  return " ".join(str(int(v)) for v in values)


def _vector(values: Iterable[Any]) -> str:
  return "[" + ", ".join(f"{float(v):g}" for v in values) + "]"


def _vectors(rows: Iterable[Iterable[Any]]) -> str:
  return " ".join(map(_vector, rows))


def _yes(value: Any) -> str:
  return "yes" if value else "no"
