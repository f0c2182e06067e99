"""Packed order to tiled order and back, by split, reshape, transpose, pad and concatenate.

No gather, scatter or index table in either direction, so gradients and forward mode come for free and the
program stays small at any grid (rules 1.4).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from vsa_jax.arguments import check_tokens
from vsa_jax.layout import TileLayout, segment_length, tile_counts
from vsa_jax.sharding import on_own_shards


def tile_tokens(x: jax.Array, layout: TileLayout) -> jax.Array:
  """Reorders tokens into tiles; padding slots are zero.

  Args:
    x: [B, L, ...], any trailing dims and dtype, L = layout.num_tokens.
    layout: the geometry.

  Returns:
    [B, P, ...], P = layout.padded_length; token i is at position layout.slots[i].

  Raises:
    ValueError: x does not have layout.num_tokens tokens on axis 1.
  """
  check_tokens(x, "x", layout, tiled=False)
  return on_own_shards(functools.partial(_tile, layout), x, unsharded_axis=1)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _tile(layout: TileLayout, x: jax.Array) -> jax.Array:
  prefix, videos, start = [], [], 0
  for segment in layout.segments:
    stop = start + segment_length(segment)
    part = lax.slice_in_dim(x, start, stop, axis=1)
    if isinstance(segment, int):
      prefix.append(_pad_axis(part, 1, -segment % layout.tile_size))
    else:
      videos.append(_tile_video(part, segment, layout.tile))
    start = stop
  return _concatenate(prefix + videos, axis=1)


def untile_tokens(xt: jax.Array, layout: TileLayout) -> jax.Array:
  """Puts tiled tokens back in packed order and drops the padding: the left inverse of `tile_tokens`.

  The two are each other's adjoint.

  Args:
    xt: [B, P, ...], P = layout.padded_length.
    layout: the geometry.

  Returns:
    [B, L, ...], L = layout.num_tokens.

  Raises:
    ValueError: xt does not have layout.padded_length slots on axis 1.
  """
  check_tokens(xt, "xt", layout, tiled=True)
  return on_own_shards(functools.partial(_untile, layout), xt, unsharded_axis=1)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _untile(layout: TileLayout, xt: jax.Array) -> jax.Array:
  spans = iter(layout.video_spans)
  parts, dense_start = [], 0
  for segment in layout.segments:
    if isinstance(segment, int):
      parts.append(lax.slice_in_dim(xt, dense_start, dense_start + segment, axis=1))
      dense_start += segment + -segment % layout.tile_size
    else:
      start, stop = (n * layout.tile_size for n in next(spans))
      parts.append(_untile_video(lax.slice_in_dim(xt, start, stop, axis=1), segment, layout.tile))
  return _concatenate(parts, axis=1)


def _tile_video(x: jax.Array, grid: tuple[int, int, int], tile: tuple[int, int, int]) -> jax.Array:
  """[B, T*H*W, ...] -> [B, tiles*M, ...]: up to 8 blocks (interior and edges) of equal tiles each."""
  trailing = x.shape[2:]
  x = x.reshape(x.shape[0], *grid, *trailing)

  def blocks(x: jax.Array, axis: int, counts: tuple[int, ...], sides: tuple[int, ...]) -> jax.Array:
    """Cuts axis 1 + axis; returns tiles [B, nT, nH, nW, M, ...] of what is left of x."""
    if axis == 3:
      x = x.reshape(
        x.shape[0], *(n for pair in zip(counts, sides, strict=True) for n in pair), *trailing
      )
      x = x.transpose(0, 1, 3, 5, 2, 4, 6, *range(7, x.ndim))
      x = x.reshape(x.shape[0], *counts, math.prod(sides), *trailing)
      return _pad_axis(x, 4, math.prod(tile) - math.prod(sides))
    parts = []
    for start, count, side in _runs(grid[axis], tile[axis]):
      part = lax.slice_in_dim(x, start, start + count * side, axis=1 + axis)
      parts.append(blocks(part, axis + 1, (*counts, count), (*sides, side)))
    return _concatenate(parts, axis=1 + axis)

  num_slots = math.prod(tile_counts(grid, tile)) * math.prod(tile)
  return blocks(x, 0, (), ()).reshape(x.shape[0], num_slots, *trailing)


def _untile_video(
  x: jax.Array, grid: tuple[int, int, int], tile: tuple[int, int, int]
) -> jax.Array:
  """The inverse of `_tile_video`, step by step."""
  trailing = x.shape[2:]
  x = x.reshape(x.shape[0], *tile_counts(grid, tile), math.prod(tile), *trailing)

  def blocks(x: jax.Array, axis: int, counts: tuple[int, ...], sides: tuple[int, ...]) -> jax.Array:
    """Takes tiles [B, nT, nH, nW, M, ...]; returns a grid of tokens [B, T, H, W, ...]."""
    if axis == 3:
      x = lax.slice_in_dim(x, 0, math.prod(sides), axis=4)
      x = x.reshape(x.shape[0], *counts, *sides, *trailing)
      x = x.transpose(0, 1, 4, 2, 5, 3, 6, *range(7, x.ndim))
      return x.reshape(x.shape[0], *(n * b for n, b in zip(counts, sides, strict=True)), *trailing)
    parts = []
    for start, count, side in _runs(grid[axis], tile[axis]):
      first = start // tile[axis]
      part = lax.slice_in_dim(x, first, first + count, axis=1 + axis)
      parts.append(blocks(part, axis + 1, (*counts, count), (*sides, side)))
    return _concatenate(parts, axis=1 + axis)

  return blocks(x, 0, (), ()).reshape(x.shape[0], math.prod(grid), *trailing)


def _runs(length: int, side: int) -> list[tuple[int, int, int]]:
  """(start, tile count, tile side) of the whole tiles of an axis, and of its shorter last tile."""
  count, rest = divmod(length, side)
  runs = [(0, count, side), (count * side, 1, rest)]
  return [run for run in runs if run[1] and run[2]]


def _pad_axis(x: jax.Array, axis: int, amount: int) -> jax.Array:
  if not amount:
    return x
  widths = [(0, amount, 0) if a == axis else (0, 0, 0) for a in range(x.ndim)]
  return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _concatenate(parts: list[jax.Array], axis: int) -> jax.Array:
  return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)
