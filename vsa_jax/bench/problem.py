"""Operands and lists to time with, and what the results must be."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vsa_jax.bench.shapes import Shape
from vsa_jax.layout import TileLayout
from vsa_jax.selection import TileSelection


def noise(shape: Shape, layout: TileLayout) -> tuple[jax.Array, ...]:
  """(query, key, value, d_out) [1, L, N, H], standard normal."""
  size = (1, layout.num_tokens, shape.heads, shape.head_dim)
  keys = jax.random.split(jax.random.key(0), 4)
  return tuple(jax.random.normal(key, size, shape.dtype) for key in keys)


def smooth(shape: Shape, layout: TileLayout) -> tuple[jax.Array, ...]:
  """The same, but query and key vary slowly over the video, as a model's do: neighbouring tiles agree.

  Each channel is a few random waves, of wavelengths from a quarter of the video to all of it, plus noise.
  """
  waves, (query, key, value, d_out) = 6, noise(shape, layout)
  rng = np.random.default_rng(1)
  parts = []
  for segment in layout.segments:
    sizes = (segment, 1, 1) if isinstance(segment, int) else segment
    grid = np.stack(np.meshgrid(*(np.arange(n) / n for n in sizes), indexing="ij"), -1)
    frequency = rng.normal(size=(3, waves)) * 2.5
    phase = grid.reshape(-1, 3) @ frequency  # [tokens, waves]
    parts.append(np.concatenate([np.cos(2 * np.pi * phase), np.sin(2 * np.pi * phase)], -1))
  basis = jnp.asarray(np.concatenate(parts), jnp.float32)
  mixing = rng.normal(size=(2 * waves, shape.heads, shape.head_dim)) / waves**0.5
  field = jnp.einsum("lw,wnh->lnh", basis, jnp.asarray(mixing, jnp.float32))[None]
  mix = lambda x: (field + 0.5 * x.astype(jnp.float32)).astype(shape.dtype)
  return mix(query), mix(key), value, d_out


def random_lists(like: TileSelection) -> TileSelection:
  """As many tiles in every list, drawn at random, ascending."""
  batch, heads, rows, width = like.indices.shape
  rng = np.random.default_rng(2)
  candidates = np.arange(like.num_prefix_tiles, like.num_key_tiles, dtype=np.int32)
  order = rng.random((batch, heads, rows, candidates.size), dtype=np.float32)
  ids = np.sort(np.argpartition(order, width - 1, axis=-1)[..., :width], axis=-1)
  return TileSelection(
    jnp.asarray(candidates[ids]),
    like.counts,
    like.num_prefix_tiles,
    num_dense_rows=like.num_dense_rows,
    num_key_tiles=like.num_key_tiles,
  )


def share_of_loads(selection: TileSelection, group: int) -> float:
  """What is left of the loads of key tiles when `group` neighbouring lists are walked as one."""
  ids = np.asarray(selection.indices)
  ids = ids[:, :, : ids.shape[2] // group * group]
  batch, heads, rows, width = ids.shape
  if not rows * width:
    return 1.0
  grouped = np.sort(ids.reshape(batch, heads, rows // group, group * width), axis=-1)
  return float((np.diff(grouped, axis=-1) != 0).sum() + grouped[..., 0].size) / ids.size


def check(part: str, results: dict[str, Any], want: dict[str, Any]) -> None:
  """AssertionError unless the norm of the error is small beside the norm of the truth.

  A key tile lost by every query tile is an error of about 0.1, a row tile lost is one of about 1.
  """
  for name, got in results.items():
    allowed = 1e-5 if got.dtype == jnp.float32 else 1e-2
    got, truth = (np.asarray(x, np.float64) for x in (got[:, sample(got.shape[1])], want[name]))
    error = np.linalg.norm(got - truth) / np.linalg.norm(truth)
    if not error <= allowed:
      raise AssertionError(
        f"numerics: {name} of {part}: relative error {error:.2g}, allowed {allowed}"
      )


def sample(length: int) -> np.ndarray:
  """64 token numbers, evenly spread."""
  return np.linspace(0, length - 1, 64).astype(int)


@functools.partial(jax.jit, static_argnums=0)
def exact(
  layout: TileLayout, operands: Any, selection: TileSelection, out: jax.Array, lse: jax.Array
) -> dict[str, jax.Array]:
  """out and gradients at a sample of tokens: dense masked attention, full float32.

  A key's gradients have a part of every query token; those take the LSE and the output of the op, which
  the sample has shown to be right: out [B, L, N, H], lse [B, L, N].
  """
  query, key, value, d_out = (x.astype(jnp.float32) for x in operands)
  tokens, tile_of = sample(layout.num_tokens), layout.slots // layout.tile_size
  mask = selection.to_mask()

  def gradients(queries, keys, out=None, lse=None):
    dot = functools.partial(jnp.einsum, precision="highest")
    scale = query.shape[-1] ** -0.5
    q, d, k, v = query[:, queries], d_out[:, queries], key[:, keys], value[:, keys]
    kept = mask[:, :, tile_of[queries]][..., tile_of[keys]]
    logits = jnp.where(kept, dot("bqnh,bknh->bnqk", q, k) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1) if lse is None else jnp.moveaxis(lse, 1, 2)
    weights = jnp.exp(logits - lse[..., None])
    out = dot("bnqk,bknh->bqnh", weights, v) if out is None else out.astype(jnp.float32)
    delta = jnp.moveaxis((out * d).sum(-1), 1, 2)
    d_logits = weights * (dot("bqnh,bknh->bnqk", d, v) - delta[..., None]) * scale
    d_query, d_key = dot("bnqk,bknh->bqnh", d_logits, k), dot("bnqk,bqnh->bknh", d_logits, q)
    return out, d_query, d_key, dot("bnqk,bqnh->bknh", weights, d)

  everything = np.arange(layout.num_tokens)
  made = *gradients(tokens, everything)[:2], *gradients(everything, tokens, out, lse)[2:]
  return dict(zip(("out", "d_query", "d_key", "d_value"), made, strict=True))
