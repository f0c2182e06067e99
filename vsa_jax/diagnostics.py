"""What a selection keeps of dense attention.  For looking, not for training: it costs what dense attention does.

Letters: B batch, N query heads, K kv heads, H head dim; Jq and Jk query and key tiles of M slots each.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vsa_jax.arguments import accumulator, static_scale, valid_slots
from vsa_jax.block_sparse.api import check_problem, operand_specs, sizes_of
from vsa_jax.block_sparse.base import Sizes
from vsa_jax.selection import TileSelection
from vsa_jax.sharding import placement_of, shard_map


def coverage(
  query: jax.Array,
  key: jax.Array,
  selection: TileSelection,
  *,
  tile_sizes: Any = None,
  query_tile_sizes: Any = None,
  scale: float | None = None,
) -> jax.Array:
  """The share of dense softmax probability that lies inside the kept key tiles.

  With coverage c of a token, dense = c * kept + (1 - c) * dropped, where kept is what sparse attention
  computes: its error is (1 - c) * (kept - dropped).  Tiles kept at random would cover about the share of
  tiles that is kept.

  Query tiles are visited one after the other, so memory is one tile's rows of the attention matrix of
  one kv head, never the whole.

  Args:
    query: [B, Jq*M, N, H], tiled, positions applied.
    key: [B, Jk*M, K, H], of query's dtype; N is a multiple of K.
    selection: which key tiles each query tile keeps; a duplicate counts once.
    tile_sizes, query_tile_sizes, scale: as for `block_sparse_attention`.

  Returns:
    float32 [B, N, Jq] in [0, 1]: the mean over the valid tokens of each query tile; 0 for a tile without
    tokens or without keys.

  Raises:
    ValueError: a wrong argument, named.
  """
  problem = check_problem(query, key, key, selection)
  sizes = sizes_of(problem, tile_sizes, query_tile_sizes)
  run: Any = functools.partial(_coverage, static_scale(scale, problem.head_dim))
  placement = placement_of(query, None)
  if placement is not None:
    specs = operand_specs(placement, query, key, key, selection)
    run = shard_map(placement.mesh, run, specs, PartitionSpec(placement.batch, placement.heads))
  return run(query, key, selection, sizes)


@functools.partial(jax.jit, static_argnums=0)
def _coverage(
  scale: float, query: jax.Array, key: jax.Array, selection: TileSelection, sizes: Sizes
) -> jax.Array:
  batch, length, heads, dim = query.shape
  kv_heads, tiles = key.shape[2], selection.num_query_tiles
  group, size = heads // kv_heads, length // tiles
  dtype = accumulator(query.dtype)
  key_valid = valid_slots(sizes.key, size)
  # 0 * NaN is NaN: padding is replaced, not only masked.
  keys = jnp.moveaxis(jnp.where(key_valid[..., None, None], key.astype(dtype), 0), 2, 0)
  queries = query.astype(dtype).reshape(batch, tiles, size, kv_heads, group, dim)
  queries = queries.transpose(1, 3, 0, 4, 2, 5)  # [Jq, K, B, G, M, H]
  kept = selection.to_mask().reshape(batch, kv_heads, group, tiles, -1)
  kept = kept.transpose(3, 1, 0, 2, 4)  # [Jq, K, B, G, Jk]

  def one_head(row):
    queries, keys, kept = row
    logits = jnp.einsum("bgmh,bkh->bgmk", queries, keys, precision=lax.Precision.HIGHEST) * scale
    logits = jnp.where(key_valid[:, None, None], logits, -jnp.inf)
    top = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(top == -jnp.inf, 0, top))
    mass = weights.reshape(*weights.shape[:-1], -1, size).sum(-1)  # [B, G, M, Jk]
    total = mass.sum(-1)
    return jnp.where(kept[:, :, None], mass, 0).sum(-1) / jnp.where(total == 0, 1, total)

  def one_tile(row):
    queries, kept, valid = row  # valid [B]: how many of the tile's tokens are
    shares = lax.map(one_head, (queries, keys, kept))  # [K, B, G, M]
    shares = jnp.where(jnp.arange(size) < valid[:, None, None], shares, 0)
    return shares.sum(-1) / jnp.maximum(valid, 1)[:, None]

  shares = lax.map(one_tile, (queries, kept, sizes.query.T))  # [Jq, K, B, G]
  return shares.transpose(2, 1, 3, 0).reshape(batch, heads, tiles).astype(jnp.float32)
