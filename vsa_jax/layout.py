"""TileLayout: which token sits in which slot.  Integers and NumPy only.

Packed order (what the model sees) is a row of segments; tiled order (what the kernels see) is a row
of equal tiles of M slots.  Dense segments (text, audio, images) are cut in 1-D chunks of M tokens and
come first, as the "prefix"; every video segment is cut in 3-D tiles and follows as a run of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

Segment = int | tuple[int, int, int]

_INT32_MAX = 2**31 - 1


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TileLayout:
  """The geometry of one packed sequence, cut in tiles.

  Args:
    segments: the sequence in packed order.  An int is a dense segment of that many tokens (text, audio,
      an image); a triple ``(T, H, W)`` is a video region of T*H*W tokens, T slowest and W fastest.  A
      zero int is dropped.  Note the brackets of a single video: ``[(T, H, W)]``; three bare ints are
      three dense segments.
    tile: ``(bT, bH, bW)``; its product M is the number of slots of every tile, dense chunks included.

  Two layouts of equal segments and tile are equal, hash equal and cause one trace: the layout passes as
  an ordinary argument through jit, scan, vmap, remat and the Flax transforms.

  Rules 1.2 and 1.3: a tile never straddles a segment; all dense chunks come first, in packed order,
  then each video region, in packed order, its tiles ordered as tokens are (T slowest, W fastest).  Edge
  tiles are compact: their valid tokens fill the first slots, padding the rest.

  Raises:
    ValueError: for a segment or tile that is not as above, or a layout without tokens.
  """

  segments: tuple[Segment, ...]
  tile: tuple[int, int, int]

  def __init__(self, segments: Iterable[Any], tile: Iterable[int]):
    object.__setattr__(self, "tile", _normalise_tile(tile))
    object.__setattr__(self, "segments", _normalise_segments(segments))
    if self.padded_length > _INT32_MAX:
      raise ValueError(
        f"segments: got {self.padded_length} slots after padding, want at most {_INT32_MAX} (slots are"
        " int32); cut the sequence or choose a tile that divides it better"
      )

  @property
  def tile_size(self) -> int:
    """M, the number of slots of a tile."""
    return math.prod(self.tile)

  @property
  def num_tokens(self) -> int:
    """L, the number of tokens of the packed sequence."""
    return sum(segment_length(s) for s in self.segments)

  @property
  def num_tiles(self) -> int:
    """J, the number of tiles."""
    return self.num_prefix_tiles + sum(stop - start for start, stop in self.video_spans)

  @property
  def padded_length(self) -> int:
    """P = J * M, the length of the tiled sequence."""
    return self.num_tiles * self.tile_size

  @property
  def num_prefix_tiles(self) -> int:
    """The number of leading tiles that hold dense segments."""
    return sum(-(-s // self.tile_size) for s in self.segments if isinstance(s, int))

  @property
  def video_spans(self) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of tile numbers, one per video region."""
    spans, start = [], self.num_prefix_tiles
    for segment in self.segments:
      if not isinstance(segment, int):
        stop = start + math.prod(tile_counts(segment, self.tile))
        spans.append((start, stop))
        start = stop
    return tuple(spans)

  @property
  def tile_sizes(self) -> np.ndarray:
    """int32 [J]: the number of valid tokens of each tile, 1..M."""
    return _tile_sizes(self)

  @property
  def slots(self) -> np.ndarray:
    """int32 [L]: token i of the packed sequence sits at position ``slots[i]`` of the tiled one."""
    return _slots(self)

  @property
  def is_ragged(self) -> bool:
    """Whether any tile has padding."""
    return self.num_tokens != self.padded_length

  def tile_sizes_for(self, lengths: Any) -> Any:
    """Valid tokens per tile when the samples of a batch fill their segments to different lengths.

    Args:
      lengths: int [B, S], S = len(layout.segments): the number of leading tokens of each segment that
        are valid.  In a video segment whole frames are valid or not, so its length is a multiple of
        H*W (a traced length is rounded down to one).  NumPy or JAX, concrete or traced.

    Returns:
      int32 [B, J], of the kind (NumPy or JAX) of ``lengths``, for the argument ``tile_sizes``.

    Raises:
      ValueError: lengths of the wrong shape or dtype; concrete ones outside [0, segment length], or not
        whole frames.
    """
    if not isinstance(lengths, jax.Array):
      lengths = np.asarray(lengths)
    want = f"an integer array [B, {len(self.segments)}], one column per segment {self.segments}"
    if (
      lengths.ndim != 2 or lengths.shape[1] != len(self.segments) or lengths.dtype.kind not in "iu"
    ):
      raise ValueError(f"lengths: got {lengths.dtype}{list(lengths.shape)}, want {want}")
    pieces = _pieces(self)
    if not isinstance(lengths, jax.core.Tracer):
      _check_lengths(np.asarray(lengths), self.segments, pieces.unit)
    # A tile is `extent` units long and starts `start` units into its segment; a unit is one token of a
    # dense segment, or one frame of a video, of which this tile holds `plane` tokens.
    units = (lengths // pieces.unit)[:, pieces.segment]
    return ((units - pieces.start).clip(0, pieces.extent) * pieces.plane).astype(np.int32)


def segment_length(segment: Segment) -> int:
  """The number of tokens of a segment."""
  return segment if isinstance(segment, int) else math.prod(segment)


def tile_counts(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> tuple[int, ...]:
  """The number of tiles along T, H and W."""
  return tuple(-(-n // b) for n, b in zip(grid, tile, strict=True))


def _normalise_tile(tile: Any) -> tuple[int, int, int]:
  want = "want three positive ints (bT, bH, bW), for instance (4, 4, 4)"
  try:
    sides = tuple(_int(b) for b in tile)
  except TypeError:
    raise ValueError(f"tile: got {tile!r}, {want}") from None
  if len(sides) != 3 or min(sides) < 1:
    raise ValueError(f"tile: got {tile!r}, {want}")
  return sides


def _normalise_segments(segments: Any) -> tuple[Segment, ...]:
  want = "want a sequence of ints (dense tokens) and triples (T, H, W) (video), for instance [77, (21, 45, 80)]"
  if isinstance(segments, (str, bytes, dict, set, frozenset)):
    raise ValueError(f"segments: got {segments!r}, {want}")
  try:
    items = list(segments)
  except TypeError:
    raise ValueError(f"segments: got {segments!r}, {want}") from None
  normal: list[Segment] = []
  for i, item in enumerate(items):
    try:
      segment: Any = tuple(_int(n) for n in item) if np.ndim(item) else _int(item)
    except (TypeError, ValueError):
      raise ValueError(f"segments[{i}]: got {item!r}, {want}") from None
    if isinstance(segment, int):
      if segment < 0:
        raise ValueError(
          f"segments[{i}]: got {segment}, want a length >= 0; leave an absent segment out or give 0"
        )
      if segment:
        normal.append(segment)
    elif len(segment) != 3 or min(segment) < 1:
      raise ValueError(
        f"segments[{i}]: got {item!r}, want three positive ints (T, H, W); leave an absent video out of the list"
      )
    else:
      normal.append(segment)
  if not normal:
    raise ValueError(f"segments: got {items!r}, which holds no tokens; {want}")
  return tuple(normal)


def _int(value: Any) -> int:
  if isinstance(value, (bool, np.bool_)):
    raise TypeError("a bool is not a length")
  return operator.index(value)


@dataclasses.dataclass(frozen=True)
class _Pieces:
  """What fills the tiles; every array has one entry per tile, but for `unit` (one per segment)."""

  segment: np.ndarray  # the segment the tile belongs to
  start: np.ndarray  # first unit of the segment that the tile holds
  extent: np.ndarray  # how many units it holds when the segment is full
  plane: np.ndarray  # tokens it holds of each unit
  unit: np.ndarray  # tokens per unit of each segment: 1 (dense), H*W (video: a frame)


@functools.lru_cache(maxsize=256)
def _pieces(layout: TileLayout) -> _Pieces:
  parts: list[tuple[np.ndarray, ...]] = []  # (segment, start, extent, plane) of a segment's tiles
  for i, s in enumerate(layout.segments):
    if isinstance(s, int):
      starts, extents = _cut(s, layout.tile_size)
      parts.append((np.full_like(starts, i), starts, extents, np.ones_like(starts)))
  for i, s in enumerate(layout.segments):
    if not isinstance(s, int):
      (starts, frames), (_, rows), (_, columns) = (
        _cut(n, b) for n, b in zip(s, layout.tile, strict=True)
      )
      planes = np.multiply.outer(rows, columns).ravel()
      starts, frames, planes = (
        np.repeat(starts, planes.size),
        np.repeat(frames, planes.size),
        np.tile(planes, starts.size),
      )
      parts.append((np.full_like(starts, i), starts, frames, planes))
  segment, start, extent, plane = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
  unit = np.array([1 if isinstance(s, int) else s[1] * s[2] for s in layout.segments])
  return _Pieces(segment, start, extent, plane, unit)


def _cut(length: int, step: int) -> tuple[np.ndarray, np.ndarray]:
  """Starts and extents of the pieces of `length` cut every `step`."""
  starts = np.arange(0, length, step)
  return starts, np.minimum(step, length - starts)


def _check_lengths(lengths: np.ndarray, segments: tuple[Segment, ...], unit: np.ndarray) -> None:
  full = np.array([segment_length(s) for s in segments])
  wrong = np.argwhere((lengths < 0) | (lengths > full) | (lengths % unit != 0))
  if wrong.size:
    b, i = wrong[0]
    raise ValueError(
      f"lengths[{b}, {i}]: got {lengths[b, i]}, want 0..{full[i]}"
      + (f" in whole frames of {unit[i]} tokens" if unit[i] > 1 else "")
      + f" for segment {segments[i]}"
    )


@functools.lru_cache(maxsize=256)
def _tile_sizes(layout: TileLayout) -> np.ndarray:
  pieces = _pieces(layout)
  return _read_only(pieces.extent * pieces.plane)


@functools.lru_cache(maxsize=16)
def _slots(layout: TileLayout) -> np.ndarray:
  size = layout.tile_size
  dense_start, video_start = 0, layout.num_prefix_tiles * size
  runs = []
  for segment in layout.segments:
    if isinstance(segment, int):
      runs.append(dense_start + np.arange(segment))
      dense_start += -(-segment // size) * size
    else:
      runs.append(video_start + _video_slots(segment, layout.tile))
      video_start += math.prod(tile_counts(segment, layout.tile)) * size
  return _read_only(np.concatenate(runs))


def _video_slots(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> np.ndarray:
  """int [T*H*W]: the slot of each token of one video region, counted from the region's first slot."""
  counts = tile_counts(grid, tile)
  number = np.zeros((1, 1, 1), np.int64)  # the tile a token is in
  offset = np.zeros((1, 1, 1), np.int64)  # its place among the tile's valid tokens, in raster order
  for axis, (n, b, count) in enumerate(zip(grid, tile, counts, strict=True)):
    place = np.arange(n).reshape([-1 if a == axis else 1 for a in range(3)])
    extent = np.minimum(b, n - place // b * b)  # the tile's side, clipped at the edge
    number = number * count + place // b
    offset = offset * extent + place % b
  return (number * math.prod(tile) + offset).ravel()


def _read_only(array: np.ndarray) -> np.ndarray:
  array = array.astype(np.int32)
  array.setflags(write=False)
  return array


jax.export.register_pytree_node_serialization(
  TileLayout,
  serialized_name="vsa_jax.TileLayout",
  serialize_auxdata=lambda layout: json.dumps([layout.segments, layout.tile]).encode(),
  deserialize_auxdata=lambda data: TileLayout(*json.loads(data)),
)
