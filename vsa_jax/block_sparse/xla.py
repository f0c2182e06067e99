"""`xla`: pure JAX, a scan over query tiles, on any device XLA has.

Forward: a step gathers the key and value tiles of one list, and makes one softmax over them.
Backward: the same walk, recomputing the weights from the LSE; dK and dV are carried in the accumulator
dtype and each step adds its tiles to them.  A step serves one query head of each kv head, and a list
names a tile once (a duplicate becomes a weight), so no two additions of a step meet: the sums have
one order, on every backend, without atomics.

Memory: copies of the inputs and what one row keeps; never an L x L or J x J x M array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vsa_jax.arguments import accumulator
from vsa_jax.block_sparse.base import LOG2_E, Problem, Residual, Sizes
from vsa_jax.selection import TileSelection
from vsa_jax.sharding import vary_over, varying_axes


class Xla:
  """See the module."""

  name = "xla"

  def supports(self, problem: Problem) -> str | None:
    """It runs anything."""
    del problem
    return None

  def forward(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    selection: TileSelection,
    sizes: Sizes,
    *,
    scale: float,
    precision: Any,
  ) -> tuple[jax.Array, jax.Array]:
    """out and base-2 LSE; see `Implementation.forward`."""
    shape = Problem.of(query, key, selection)
    q = _query_tiles(query, sizes.query, shape)
    keys, values = _key_tiles(key, sizes.key, shape), _key_tiles(value, sizes.key, shape)

    def dense_row(_, row):
      (q,) = row
      kept = _all(keys), _all(values), _slot_bias(sizes.key, shape)
      return None, _softmax(q, kept, scale, precision)

    def listed_row(_, row):
      q, ids, counts = row
      entries = _entries(ids, counts, selection, sizes.key, shape)
      kept = _gather(keys, entries), _gather(values, entries), entries.bias
      return None, _softmax(q, kept, scale, precision)

    _, (out, lse) = _walk(dense_row, listed_row, None, (q,), selection, shape)
    lse = lse[..., 0]
    valid = _valid(sizes.query.T, shape)[:, :, None]  # [Jq, B, 1, M]
    out = jnp.where(valid[..., None], out, 0)
    lse = jnp.where(valid, lse, -jnp.inf)
    return _untile(out, shape).astype(query.dtype), _rows_to_tokens(lse)

  def backward(
    self, residual: Residual, d_out: jax.Array, delta: jax.Array, *, scale: float, precision: Any
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_query, d_key, d_value); see `Implementation.backward`."""
    query, key, value, selection, sizes, _, lse = residual
    shape = Problem.of(query, key, selection)
    dtype = accumulator(query.dtype)
    q = _query_tiles(query, sizes.query, shape)
    keys, values = _key_tiles(key, sizes.key, shape), _key_tiles(value, sizes.key, shape)
    # A row without keys, or a padded one, has lse -inf: no weight, whatever its cotangent holds.
    no_keys = lse == -jnp.inf
    d_out = jnp.where(jnp.moveaxis(no_keys, 1, 2)[..., None], 0, d_out)
    lse = _tokens_to_rows(jnp.where(no_keys, jnp.inf, lse), shape)
    delta = _tokens_to_rows(delta, shape)
    d_out = _query_tiles(d_out.astype(query.dtype), None, shape)
    rows = (q, d_out, lse[..., None], delta[..., None])

    def dense_row(carry, row):
      d_keys, d_values = carry
      kept = _all(keys), _all(values), _slot_bias(sizes.key, shape)
      d_q, d_k, d_v = _softmax_vjp(row, kept, scale, precision)
      return (d_keys + _in_tiles(d_k, shape), d_values + _in_tiles(d_v, shape)), d_q

    def listed_row(carry, row):
      d_keys, d_values = carry
      *row, ids, counts = row
      entries = _entries(ids, counts, selection, sizes.key, shape)
      kept = _gather(keys, entries), _gather(values, entries), entries.bias
      d_q, d_k, d_v = _softmax_vjp(row, kept, scale, precision)
      return (_add(d_keys, d_k, entries, shape), _add(d_values, d_v, entries, shape)), d_q

    zeros = jnp.zeros(
      (shape.batch, shape.kv_heads, shape.key_tiles, shape.tile_size, shape.head_dim), dtype
    )
    carry = (vary_over(zeros, varying_axes(q, keys, values, selection.indices)),) * 2
    carry, d_rows = _walk(dense_row, listed_row, carry, rows, selection, shape)
    d_query = _untile(d_rows, shape).astype(query.dtype)
    d_key, d_value = (
      jnp.transpose(x, (0, 2, 3, 1, 4)).reshape(key.shape).astype(like.dtype)
      for x, like in zip(carry, (key, value), strict=True)
    )
    return d_query, d_key, d_value


# Attention of one row of tiles.  q [B, K, rows, H], k and v [B, K, columns, H], bias [B, 1 or K, columns]:
# -inf where there is no key, else log2 of how often it counts.


def _softmax(q, kept, scale, precision):
  """(out, lse), both in the accumulator dtype, lse [B, K, rows, 1] base 2; no keys: 0, -inf."""
  k, v, bias = kept
  logits = _logits(q, k, bias, scale, precision)
  top = logits.max(-1, keepdims=True, initial=-jnp.inf)
  # A row that has keys, all of logit -inf, is NaN, as in dense attention.
  top = jnp.where((bias > -jnp.inf).any(-1)[:, :, None, None], top, 0)
  weights = jnp.exp2(logits - top)
  total = weights.sum(-1, keepdims=True)
  some = jnp.where(total == 0, 1, total)  # also for the derivatives of what follows
  out = _dot("bnqk,bnkh->bnqh", weights.astype(v.dtype), v, precision) / some
  return out, jnp.where(total == 0, -jnp.inf, top + jnp.log2(some))


def _softmax_vjp(row, kept, scale, precision):
  """(d_q, d_k, d_v) in the accumulator dtype; lse +inf marks a row without keys."""
  q, d_out, lse, delta = row
  k, v, bias = kept
  weights = jnp.exp2(_logits(q, k, bias, scale, precision) - lse)
  d_v = _dot("bnqk,bnqh->bnkh", weights.astype(v.dtype), d_out, precision)
  d_weights = _dot("bnqh,bnkh->bnqk", d_out, v, precision)
  d_logits = (weights * (d_weights - delta)).astype(q.dtype)
  # The scale comes last, in the accumulator: scaling k in bfloat16 would make large logits wrong.
  d_q = _dot("bnqk,bnkh->bnqh", d_logits, k, precision) * scale
  d_k = _dot("bnqk,bnqh->bnkh", d_logits, q, precision) * scale
  return d_q, d_k, d_v


def _logits(q, k, bias, scale, precision):
  return _dot("bnqh,bnkh->bnqk", q, k, precision) * (scale * LOG2_E) + bias[:, :, None, :]


def _dot(subscripts, a, b, precision):
  return jnp.einsum(
    subscripts, a, b, precision=precision, preferred_element_type=accumulator(a.dtype)
  )


def _walk(dense_row, listed_row, carry, rows, selection: TileSelection, shape: Problem):
  """Scans dense rows, then listed rows, of arrays [Jq, B, N, M, last].

  dense_row sees the rows of all query heads of a kv head at once, [B, K, G*M, last]; listed_row those of
  one query head of each, [B, K, M, last], and after them its ids [B, K, W] and counts [B, K].

  Returns:
    The last carry, and what the steps made, joined as [Jq, B, N, M, last].
  """
  batch, heads, kv_heads, groups, size = (
    shape.batch,
    shape.heads,
    shape.kv_heads,
    shape.groups,
    shape.tile_size,
  )
  everything = selection.num_prefix_tiles == selection.num_key_tiles
  dense = selection.num_query_tiles if everything else selection.num_dense_rows
  listed = shape.query_tiles - dense

  def by_group(x):  # [R, B, N, ...] -> [R*G, B, K, ...]
    x = jnp.moveaxis(x.reshape(listed, batch, kv_heads, groups, *x.shape[3:]), 3, 1)
    return x.reshape(listed * groups, batch, kv_heads, *x.shape[4:])

  def join_dense(x):
    return x.reshape(dense, batch, heads, size, x.shape[-1])

  def join_listed(x):
    x = jnp.moveaxis(x.reshape(listed, groups, batch, kv_heads, size, x.shape[-1]), 1, 3)
    return x.reshape(listed, batch, heads, size, x.shape[-1])

  parts = []
  if dense:
    stacked = [x[:dense].reshape(dense, batch, kv_heads, groups * size, x.shape[-1]) for x in rows]
    carry, part = lax.scan(dense_row, carry, tuple(stacked))
    parts.append(jax.tree.map(join_dense, part))
  if listed:
    lists = (jnp.moveaxis(x, 2, 0) for x in (selection.indices, selection.counts))
    stacked = [by_group(x) for x in (*(x[dense:] for x in rows), *lists)]
    carry, part = lax.scan(listed_row, carry, tuple(stacked))
    parts.append(jax.tree.map(join_listed, part))
  return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


# Query side: [Jq, B, N, M, H].


def _query_tiles(x: jax.Array, sizes: jax.Array | None, shape: Problem) -> jax.Array:
  x = x.reshape(shape.batch, shape.query_tiles, shape.tile_size, shape.heads, shape.head_dim)
  if sizes is not None:
    x = jnp.where(_valid(sizes, shape)[..., None, None], x, 0)
  return jnp.transpose(x, (1, 0, 3, 2, 4))


def _tokens_to_rows(x: jax.Array, shape: Problem) -> jax.Array:
  """[B, N, Jq*M] -> [Jq, B, N, M]."""
  return jnp.moveaxis(x.reshape(shape.batch, shape.heads, shape.query_tiles, shape.tile_size), 2, 0)


def _rows_to_tokens(x: jax.Array) -> jax.Array:
  """[Jq, B, N, M] -> [B, N, Jq*M]."""
  tiles, batch, heads, size = x.shape
  return jnp.moveaxis(x, 0, 2).reshape(batch, heads, tiles * size)


def _untile(x: jax.Array, shape: Problem) -> jax.Array:
  """[Jq, B, N, M, H] -> [B, Jq*M, N, H]."""
  x = jnp.transpose(x, (1, 0, 3, 2, 4))
  return x.reshape(shape.batch, shape.query_tiles * shape.tile_size, shape.heads, x.shape[-1])


# Key side: [B, K, Jk + 1, M, H]; padding is zeroed (0 * NaN is NaN), and the tile past the last is zero.


def _key_tiles(x: jax.Array, sizes: jax.Array, shape: Problem) -> jax.Array:
  x = x.reshape(shape.batch, shape.key_tiles, shape.tile_size, shape.kv_heads, shape.head_dim)
  x = jnp.where(_valid(sizes, shape)[..., None, None], x, 0)
  return jnp.pad(jnp.transpose(x, (0, 3, 1, 2, 4)), [(0, 0), (0, 0), (0, 1), (0, 0), (0, 0)])


def _all(tiles: jax.Array) -> jax.Array:
  batch, heads, count, size, dim = tiles.shape
  return tiles[:, :, :-1].reshape(batch, heads, (count - 1) * size, dim)


def _slot_bias(sizes: jax.Array, shape: Problem) -> jax.Array:
  """[B, 1, Jk*M] of every key slot."""
  return jnp.where(_valid(sizes, shape), 0.0, -jnp.inf).reshape(shape.batch, 1, -1)


def _valid(sizes: jax.Array, shape: Problem) -> jax.Array:
  """bool [..., M]."""
  return jnp.arange(shape.tile_size) < sizes[..., None]


# Lists.


class _Entries(NamedTuple):
  """What one row keeps, the implied prefix included."""

  ids: jax.Array  # int32 [B, K, P + W], distinct; num_key_tiles or more: no tile
  bias: jax.Array  # [B, K, (P + W) * M]


def _entries(ids, counts, selection: TileSelection, sizes: jax.Array, shape: Problem) -> _Entries:
  row = TileSelection(
    ids[:, :, None],
    counts[:, :, None],
    selection.num_prefix_tiles,
    num_key_tiles=selection.num_key_tiles,
  )
  nothing = selection.num_key_tiles
  ids = jnp.where(row.keeps()[:, :, 0], ids, nothing).astype(jnp.int32)
  prefix = jnp.arange(selection.num_prefix_tiles, dtype=jnp.int32)
  ids = jnp.concatenate([jnp.broadcast_to(prefix, (*ids.shape[:2], prefix.size)), ids], axis=-1)
  order = jnp.arange(ids.shape[-1], dtype=jnp.int32)
  same = ids[..., :, None] == ids[..., None, :]
  repeats = (same & (order[None, :] < order[:, None])).any(-1)
  times = same.sum(-1).astype(jnp.float32)
  ids = jnp.where(repeats | (ids == nothing), nothing + order, ids)
  sizes = jnp.pad(sizes, [(0, 0), (0, 1)])
  sizes = jnp.take_along_axis(sizes[:, None], jnp.minimum(ids, nothing), axis=2)
  bias = jnp.where(_valid(sizes, shape), jnp.log2(times)[..., None], -jnp.inf)
  return _Entries(ids, bias.reshape(*bias.shape[:2], -1))


def _gather(tiles: jax.Array, entries: _Entries) -> jax.Array:
  """[B, K, (P + W) * M, H]."""
  take = jax.vmap(jax.vmap(lambda tiles, ids: tiles.at[ids].get(mode="clip")))
  kept = take(tiles, entries.ids)
  return kept.reshape(*kept.shape[:2], -1, kept.shape[-1])


def _add(carry: jax.Array, update: jax.Array, entries: _Entries, shape: Problem) -> jax.Array:
  """Adds the tiles of one row to theirs; ids past the last tile are dropped."""
  add = jax.vmap(
    jax.vmap(lambda carry, ids, new: carry.at[ids].add(new, mode="drop", unique_indices=True))
  )
  return add(carry, entries.ids, _in_tiles(update, shape))


def _in_tiles(x: jax.Array, shape: Problem) -> jax.Array:
  return x.reshape(*x.shape[:2], -1, shape.tile_size, shape.head_dim)
