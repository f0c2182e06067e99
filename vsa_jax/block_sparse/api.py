"""block_sparse_attention: validation, choice of the implementation, the custom VJP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from vsa_jax.block_sparse.base import LN_2, Implementation, Problem, Residual, Sizes, accumulator
from vsa_jax.block_sparse.choice import choose
from vsa_jax.block_sparse.forward_mode import reverse_mode_only
from vsa_jax.routing import check_heads, static_scale, tile_sizes_of
from vsa_jax.selection import TileSelection, check_selection
from vsa_jax.sharding import (
  Placement,
  check_key_placement,
  check_placement,
  placement_of,
  vary_alike,
)


def block_sparse_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  selection: TileSelection,
  *,
  tile_sizes: Any = None,
  query_tile_sizes: Any = None,
  scale: float | None = None,
  precision: Any = None,
  implementation: str | Implementation | Sequence[str | Implementation] | None = None,
  sharding: jax.sharding.NamedSharding | None = None,
  return_lse: bool = False,
) -> Any:
  """Exact softmax attention of every query tile over the key tiles it keeps (rules 3).

  Letters: B batch, N query heads, K kv heads, H head dim; Jq and Jk query and key tiles of M slots each.

  Args:
    query: [B, Jq*M, N, H], tiled; float16, bfloat16, float32 or float64.
    key, value: [B, Jk*M, K, H], of query's dtype; N is a multiple of K (GQA: query head n reads kv head
      n // (N / K)).
    selection: which key tiles each query tile keeps.
    tile_sizes: int [Jk] or [B, Jk]: how many leading slots of each key tile are valid; default all.  What
      the other slots hold never matters, NaN included.
    query_tile_sizes: likewise for query tiles; default tile_sizes when Jq = Jk, else all.
    scale: static real > 0, times the logits; default H**-0.5.
    precision: of the attention matmuls, as in jax.lax.dot_general.  None is the backend's default, which
      on GPUs computes float32 in TF32.
    implementation: a name ("xla", "reference", ...), an `Implementation`, or a sequence of them, tried in
      order.  A named one never falls back.  None takes the best that can run; see `vsa_jax.explain`.
    sharding: the NamedSharding of query, where types do not carry it (auto mode); batch and heads only.
    return_lse: also return the log-sum-exp.

  Returns:
    out [B, Jq*M, N, H] in query's dtype, or (out, lse) with lse [B, Jq*M, N] the natural log-sum-exp of
    the scaled logits, float32 (float64 for float64), differentiable.  Padded query rows and rows without
    keys give 0 and -inf, and no gradient.

  Raises:
    ValueError: a wrong argument; the message names it, what it got, what it wants.
    NotImplementedError: an implementation asked for by name cannot run this here.
  """
  config = attention_config(query, key, value, selection, scale, precision)
  problem = config.problem
  sizes = sizes_of(problem, tile_sizes, query_tile_sizes)
  placement = placement_of(query, sharding)
  static = (
    choose(implementation, problem, placed=placement is not None),
    config.scale,
    config.precision,
  )
  attend = functools.partial(attend_local, static)
  if placement is not None:
    check_key_placement(placement, query, key, value)
    attend = _on_shards(attend, placement, query, key, selection)
  out, lse = attend(query, key, value, selection, sizes)
  return (out, lse) if return_lse else out


class AttentionConfig(NamedTuple):
  """The static, checked side of a call."""

  problem: Problem
  scale: float
  precision: Any


def attention_config(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  selection: TileSelection,
  scale: Any,
  precision: Any,
) -> AttentionConfig:
  """Checks the arrays against each other and against the selection."""
  check_qkv(query, key, value)
  batch, _, heads, head_dim = query.shape
  check_selection(selection, batch, heads)
  query_tiles, key_tiles = selection.num_query_tiles, selection.num_key_tiles
  tile_size = _tile_size(query, key, query_tiles, key_tiles)
  problem = Problem(
    query.dtype,
    batch,
    heads,
    key.shape[2],
    head_dim,
    tile_size,
    query_tiles,
    key_tiles,
    selection.width,
  )
  return AttentionConfig(problem, static_scale(scale, head_dim), check_precision(precision))


def check_qkv(query: Any, key: Any, value: Any) -> None:
  """ValueError unless query, key and value are BLNH arrays that fit each other."""
  for name, x, letters in (
    ("query", query, "[B, L, N, H]"),
    ("key", key, "[B, L, K, H]"),
    ("value", value, "[B, L, K, H]"),
  ):
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or np.ndim(x) != 4:
      got = type(x).__name__ if dtype is None else f"{dtype}{list(np.shape(x))}"
      raise ValueError(f"{name}: got {got}, want a floating {letters}")
    if x.dtype != query.dtype:
      raise ValueError(f"{name}: got {x.dtype}, want query's dtype {query.dtype}; cast one")
    if x.dtype.itemsize not in (2, 4, 8):
      raise ValueError(f"{name}: got {x.dtype}, want float16, bfloat16, float32 or float64")
  if key.shape != value.shape:
    raise ValueError(f"value: got shape {list(value.shape)}, want key's {list(key.shape)}")
  if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
    raise ValueError(
      f"key: got shape {list(key.shape)}, want [{query.shape[0]}, L, K, {query.shape[3]}] as query is"
      f" {list(query.shape)} (the order is batch, tokens, heads, head dim)"
    )
  if query.shape[3] < 1 or query.shape[2] < 1:
    raise ValueError(
      f"query: got shape {list(query.shape)}, want at least one head and one head dim"
    )
  check_heads(query.shape[2], key.shape[2])


def check_precision(precision: Any) -> Any:
  """`precision` if dot_general takes it; ValueError otherwise."""
  x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  try:
    jax.eval_shape(functools.partial(jnp.matmul, precision=precision), x, x)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f'precision: got {precision!r}, want None, "default", "high", "highest" or a jax.lax.Precision ({error})'
    ) from None
  return tuple(precision) if isinstance(precision, list) else precision


def _tile_size(query: jax.Array, key: jax.Array, query_tiles: int, key_tiles: int) -> int:
  query_length, key_length = query.shape[1], key.shape[1]
  if query_tiles < 1 or key_tiles < 1 or query_length % query_tiles or not query_length:
    raise ValueError(
      f"query: got {query_length} tokens, want a multiple of the selection's {query_tiles} query tiles"
      f" ({key_tiles} key tiles); tile_tokens pads to whole tiles"
    )
  tile_size = query_length // query_tiles
  if key_length != key_tiles * tile_size:
    raise ValueError(
      f"key: got {key_length} tokens, want {key_tiles * tile_size}: the selection's {key_tiles} key tiles of"
      f" {tile_size} tokens, query's tile size ({query_length} tokens in {query_tiles} tiles)"
    )
  return tile_size


def sizes_of(problem: Problem, tile_sizes: Any, query_tile_sizes: Any) -> Sizes:
  """Checked valid slots of query and key tiles; the defaults are `block_sparse_attention`'s."""
  if query_tile_sizes is None and problem.query_tiles == problem.key_tiles:
    query_tile_sizes = tile_sizes

  def checked(name: str, sizes: Any, tiles: int) -> jax.Array:
    full = np.full(tiles, problem.tile_size, np.int32)
    return tile_sizes_of(name, sizes, problem.batch, tiles, problem.tile_size, full)

  key = checked("tile_sizes", tile_sizes, problem.key_tiles)
  return Sizes(checked("query_tile_sizes", query_tile_sizes, problem.query_tiles), key)


def _on_shards(
  attend: Any, placement: Placement, query: jax.Array, key: jax.Array, selection: TileSelection
) -> Any:
  tokens, keys = placement.spec(query.shape, 0, 2), placement.spec(key.shape, 0, 2)
  lists = jax.tree.map(lambda x: placement.spec(x.shape, 0, 1), selection)
  jax.tree.map(
    lambda name, x, spec: check_placement(placement, name, x, spec),
    _names(selection),
    selection,
    lists,
  )
  sizes: Any = placement.spec((query.shape[0], 0), 0)
  return placement.shard_map(
    attend,
    (tokens, keys, keys, lists, Sizes(sizes, sizes)),
    (tokens, placement.spec(query.shape[:3], 0, 2)),
  )


def _names(selection: TileSelection) -> TileSelection:
  leaves = ["selection.indices", "selection.counts"]
  return jax.tree.unflatten(jax.tree.structure(selection), leaves)


@functools.partial(jax.jit, static_argnums=0)
def attend_local(
  static: tuple[Implementation, float, Any],
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  selection: TileSelection,
  sizes: Sizes,
) -> tuple[jax.Array, jax.Array]:
  """(out, natural LSE [B, Jq*M, N]) of checked arguments, on one device (or one shard)."""
  implementation, scale, precision = static
  if not query.shape[0]:  # nothing to run: no implementation has to know an empty batch
    batch, length, heads, _ = query.shape
    return query, jnp.zeros((batch, length, heads), accumulator(query.dtype))
  query, key, value, selection, sizes = vary_alike(query, key, value, selection, sizes)
  if implementation.backward is None:
    out, lse = implementation.forward(
      query, key, value, selection, sizes, scale=scale, precision=precision
    )
    return out, _natural(lse)
  query, key, value = (reverse_mode_only(x) for x in (query, key, value))
  return _attend(static, query, key, value, selection, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, selection, sizes):
  return _attend_forward(static, query, key, value, selection, sizes)[0]


def _attend_forward(static, query, key, value, selection, sizes):
  implementation, scale, precision = static
  out, lse = implementation.forward(
    query, key, value, selection, sizes, scale=scale, precision=precision
  )
  # Named here, inside the rule: outside it, a policy that saves them would still run the forward twice.
  out, lse = checkpoint_name(out, "vsa_out"), checkpoint_name(lse, "vsa_lse")
  return (out, _natural(lse)), Residual(query, key, value, selection, sizes, out, lse)


def _attend_backward(static, residual, cotangents):
  implementation, scale, precision = static
  d_out, d_lse = cotangents
  out, lse = residual.out, residual.lse
  delta = jnp.einsum(
    "bqnh,bqnh->bnq", out.astype(lse.dtype), d_out.astype(lse.dtype)
  ) - jnp.moveaxis(d_lse, 1, 2)
  delta = jnp.where(lse == -jnp.inf, 0, delta)
  gradients = implementation.backward(residual, d_out, delta, scale=scale, precision=precision)
  return (*gradients, None, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _natural(lse: jax.Array) -> jax.Array:
  """Base 2 [B, N, P] -> natural [B, P, N]."""
  return jnp.moveaxis(lse * LN_2, 1, 2)
