"""A small video diffusion transformer with Video Sparse Attention, to copy into a project.

Everything in a block but self-attention works token by token, so the hidden states are tiled once after
patchify and untiled once before unpatchify; between the two no layer moves a token:

    video -> patchify -> tile_tokens -> block, block, ... -> untile_tokens -> unpatchify -> velocity

Letters: a video is [B, T, Y, X, C]: batch, frames, rows, columns, channels.  L tokens, P padded tokens in
tiled order; D features; N heads of H features each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vsa_jax import TileLayout, VSAAttention, tile_tokens, untile_tokens

_zeros = nnx.initializers.zeros_init()


class VideoDiT(nnx.Module):
  """The velocity of a rectified flow, noised = (1 - time) clean + time noise, at a noised video.

  The network estimates the clean video, and velocity = (noised - clean) / time: unlike noise, a clean
  video is simple, so a small network learns it in few steps.

  Example::

    model = VideoDiT(sparsity=0.8, rngs=nnx.Rngs(0))
    velocity = model(video, time)  # both videos [B, T, Y, X, 3]; time [B], 0 clean to 1 noise

  One model takes videos of any size that the patch divides; the tile need not divide the token grid.

  To add text (or audio, or images): embed it, with its own positions, to [B, S, D], concatenate it before
  the video's tokens, tile with TileLayout([S, grid], tile), and drop the first S tokens after
  untile_tokens.  Such tokens see everything and every query sees them.

  Args:
    channels: C.
    patch: (frames, rows, columns) of pixels that make a token.
    tile: (frames, rows, columns) of tokens that make a tile, as in TileLayout.
    features: D.
    num_heads: N.
    depth: the number of blocks.
    mlp_ratio: width of the MLPs, over D.
    sparsity: the share of key tiles that each query tile drops; 0 is dense attention.
    use_gate: add the coarse branch; its gate starts at zero, so that a new one changes nothing.
    min_time: velocity divides by no less than this.
    remat: keep only the input of each block for the backward pass, and compute the rest again.
    implementation: see `vsa_jax.block_sparse_attention`.
    rngs: of the initialisers.
  """

  def __init__(
    self,
    *,
    channels: int = 3,
    patch: tuple[int, int, int] = (1, 4, 4),
    tile: tuple[int, int, int] = (4, 4, 4),
    features: int = 128,
    num_heads: int = 2,
    depth: int = 4,
    mlp_ratio: int = 4,
    sparsity: float = 0.8,
    use_gate: bool = True,
    min_time: float = 0.1,
    remat: bool = False,
    implementation: Any = None,
    rngs: nnx.Rngs,
  ):
    self.patch, self.tile, self.min_time, self.remat = patch, tile, min_time, remat
    self.head_dim = features // num_heads
    self.patch_embed = nnx.Linear(channels * math.prod(patch), features, rngs=rngs)
    self.time_embed = TimeEmbedding(features, rngs=rngs)

    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def make_blocks(rngs: nnx.Rngs) -> Block:
      return Block(
        features,
        num_heads,
        mlp_ratio,
        tile=tile,
        sparsity=sparsity,
        use_gate=use_gate,
        implementation=implementation,
        rngs=rngs,
      )

    self.blocks = make_blocks(rngs)  # one Block whose parameters have a leading axis of depth
    self.modulation = nnx.Linear(features, 2 * features, kernel_init=_zeros, rngs=rngs)
    self.norm = _plain_norm(features, rngs)
    self.head = nnx.Linear(features, channels * math.prod(patch), kernel_init=_zeros, rngs=rngs)

  def layout(self, video_shape: tuple[int, ...]) -> TileLayout:
    """The geometry of a video [B, T, Y, X, C]: its grid of tokens, cut in tiles."""
    grid = tuple(n // p for n, p in zip(video_shape[1:4], self.patch, strict=True))
    return TileLayout([grid], self.tile)

  def __call__(
    self,
    video: jax.Array,
    time: jax.Array,
    *,
    sparsity: float | None = None,
    budget: Any = None,
    return_aux: bool = False,
  ) -> Any:
    """Velocity of a noised video.

    Args:
      video: [B, T, Y, X, C].
      time: [B], the flow time of each sample.
      sparsity: instead of the model's.
      budget: ints, broadcastable to [B, N, tiles, 1]: how many key tiles a query tile keeps, at most
        what the sparsity says.  It may be traced, so that a schedule does not recompile.
      return_aux: also return the vsa_jax.Aux of the blocks, each array with a leading axis of depth.

    Returns:
      velocity [B, T, Y, X, C], or (velocity, Aux).
    """
    layout = self.layout(video.shape)
    position_fn = rotary_3d(layout, self.head_dim)
    x, condition = self.embed(video, time)

    def run(x, block):
      x, aux = block(x, condition, layout, position_fn, sparsity=sparsity, budget=budget)
      return x, aux if return_aux else None

    if self.remat:
      run = nnx.remat(run)

    x, aux = nnx.scan(run, in_axes=(nnx.Carry, 0))(x, self.blocks)
    clean = self.unembed(x, condition, video.shape)
    velocity = (video - clean) / jnp.maximum(time, self.min_time)[:, None, None, None, None]
    return (velocity, aux) if return_aux else velocity

  def embed(self, video: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, P, D] in tiled order, and the condition [B, D]."""
    layout = self.layout(video.shape)
    x = self.patch_embed(patchify(video, self.patch))
    angles = _place_angles(layout, x.shape[-1] // 2)
    x = x + jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return tile_tokens(x, layout), self.time_embed(time)

  def unembed(self, x: jax.Array, condition: jax.Array, video_shape: tuple[int, ...]) -> jax.Array:
    """Tokens [B, P, D] in tiled order -> the clean video, as estimated, [B, T, Y, X, C]."""
    shift, scale = jnp.split(self.modulation(condition)[:, None], 2, axis=-1)
    x = self.head(_modulate(self.norm(x), shift, scale))
    return unpatchify(untile_tokens(x, self.layout(video_shape)), video_shape, self.patch)


class Block(nnx.Module):
  """Attention and MLP, each shifted, scaled and gated by the condition (adaLN-zero)."""

  def __init__(self, features, num_heads, mlp_ratio, *, rngs, **attention):
    self.modulation = nnx.Linear(features, 6 * features, kernel_init=_zeros, rngs=rngs)
    self.attention_norm = _plain_norm(features, rngs)
    self.attention = VSAAttention(num_heads, features, normalize_qk=True, rngs=rngs, **attention)
    self.mlp_norm = _plain_norm(features, rngs)
    self.mlp_in = nnx.Linear(features, mlp_ratio * features, rngs=rngs)
    self.mlp_out = nnx.Linear(mlp_ratio * features, features, rngs=rngs)

  def __call__(self, x, condition, layout, position_fn, *, sparsity=None, budget=None):
    """x [B, P, D] in tiled order, condition [B, D] -> (x, Aux)."""
    modulation = jnp.split(self.modulation(condition)[:, None], 6, axis=-1)
    shift, scale, gate = modulation[:3]
    y, aux = self.attention(
      _modulate(self.attention_norm(x), shift, scale),
      layout,
      position_fn=position_fn,
      tiled=True,
      sparsity=sparsity,
      budget=budget,
      return_aux=True,
    )
    x = x + gate * y
    shift, scale, gate = modulation[3:]
    y = _modulate(self.mlp_norm(x), shift, scale)
    return x + gate * self.mlp_out(nnx.gelu(self.mlp_in(y))), aux


class TimeEmbedding(nnx.Module):
  """Flow time [B] in [0, 1] -> condition [B, D]."""

  def __init__(self, features, *, rngs):
    self.features = features
    self.hidden = nnx.Linear(features, features, rngs=rngs)
    self.out = nnx.Linear(features, features, rngs=rngs)

  def __call__(self, time):
    """[B] -> [B, D]."""
    frequencies = jnp.exp(jnp.linspace(0, math.log(1000), self.features // 2))
    angles = time[:, None] * frequencies
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return nnx.silu(self.out(nnx.silu(self.hidden(waves))))


def patchify(video: jax.Array, patch: tuple[int, int, int]) -> jax.Array:
  """[B, T, Y, X, C] -> [B, L, pixels of a patch * C], tokens T slowest and X fastest."""
  batch, *sides, channels = video.shape
  if any(n % p for n, p in zip(sides, patch, strict=True)):
    raise ValueError(
      f"video: got {sides} frames, rows and columns, want multiples of the patch {patch}; crop or resize it"
    )
  (t, a), (y, b), (x, c) = ((n // p, p) for n, p in zip(sides, patch, strict=True))
  video = video.reshape(batch, t, a, y, b, x, c, channels).transpose(0, 1, 3, 5, 2, 4, 6, 7)
  return video.reshape(batch, t * y * x, a * b * c * channels)


def unpatchify(
  tokens: jax.Array, video_shape: tuple[int, ...], patch: tuple[int, int, int]
) -> jax.Array:
  """The inverse of `patchify`."""
  batch, *sides, channels = video_shape
  (t, a), (y, b), (x, c) = ((n // p, p) for n, p in zip(sides, patch, strict=True))
  video = tokens.reshape(batch, t, y, x, a, b, c, channels).transpose(0, 1, 4, 2, 5, 3, 6, 7)
  return video.reshape(batch, *sides, channels)


def rotary_3d(layout: TileLayout, head_dim: int) -> Callable[[jax.Array], jax.Array]:
  """A rotary embedding of the places (t, y, x) of a video's tokens, for tokens in tiled order.

  The angles are tiled as the tokens are, so a token keeps its place in the video wherever it sits in
  memory.

  Args:
    layout: dense segments are not turned.
    head_dim: H, even.

  Returns:
    x [B, P, N, H] -> [B, P, N, H], a `jax.tree_util.Partial`, which crosses jit, remat and scan.
  """
  angles = tile_tokens(_place_angles(layout, head_dim // 2), layout)
  return jax.tree_util.Partial(_rotate, angles[:, :, None])


def _place_angles(layout: TileLayout, pairs: int, base: float = 100.0) -> jax.Array:
  """[1, L, pairs]: a third of the angles (about) each for a token's t, y and x; 0 for text.

  The slowest turns by about 1 / base per token; a video's grid is short next to a text.
  """
  shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)

  def angles(segment):
    if isinstance(segment, int):
      return jnp.zeros((segment, pairs))
    axes = jnp.meshgrid(*map(jnp.arange, segment), indexing="ij")
    turns = [base ** -(jnp.arange(share) / share) for share in shares]
    return jnp.concatenate([a.reshape(-1, 1) * t for a, t in zip(axes, turns, strict=True)], axis=1)

  return jnp.concatenate([angles(segment) for segment in layout.segments])[None]


def _rotate(angles: jax.Array, x: jax.Array) -> jax.Array:
  """Turns each pair of x [B, P, N, H] by angles [1, P, 1, H / 2]."""
  a, b = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
  return x * (1 + scale) + shift


def _plain_norm(features: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
  return nnx.LayerNorm(features, use_bias=False, use_scale=False, rngs=rngs)
