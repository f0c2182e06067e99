"""block_sparse_attention: validation, choice of the implementation, the custom VJP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vsa_jax.arguments import (
  accumulator,
  check_precision,
  check_qkv,
  static_scale,
  tile_sizes_of,
)
from vsa_jax.block_sparse.base import LN_2, Implementation, Problem, Residual, Sizes
from vsa_jax.block_sparse.choice import choose
from vsa_jax.block_sparse.forward_mode import reverse_mode_only
from vsa_jax.selection import TileSelection, check_selection
from vsa_jax.sharding import (
  Placement,
  check_key_placement,
  check_placement,
  has_auto_axes,
  placement_of,
  shard_map,
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
    implementation: a name ("cpu", "cuda", "xla", "reference"), an `Implementation`, or a sequence of them,
      tried in order.  A named one never falls back.  None takes the best that can run on the platform the
      program is compiled for; see `vsa_jax.explain`.
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
  problem = check_problem(query, key, value, selection)
  sizes = sizes_of(problem, tile_sizes, query_tile_sizes)
  placement = placement_of(query, sharding)
  partitioned = placement is None and has_auto_axes(query)
  static = Static(
    choose(implementation, problem, partitioned=partitioned),
    static_scale(scale, problem.head_dim),
    check_precision(precision),
  )
  attend: Any = functools.partial(attend_local, static)
  if placement is not None:
    tokens, keys, lists, both_sizes = operand_specs(placement, query, key, value, selection)
    specs = (tokens, keys, keys, lists, both_sizes)
    lse_spec = placement.spec(query.shape[:3], 2)
    attend = shard_map(placement.mesh, attend, specs, (tokens, lse_spec))
  out, lse = attend(query, key, value, selection, sizes)
  return (out, lse) if return_lse else out


class Static(NamedTuple):
  """What a compiled call depends on beside its arrays."""

  implementation: Implementation
  scale: float
  precision: Any


def check_problem(
  query: jax.Array, key: jax.Array, value: jax.Array, selection: TileSelection
) -> Problem:
  """Checks the arrays against each other and against the selection."""
  check_qkv(query, key, value)
  check_selection(selection, query.shape[0], query.shape[2])
  query_tiles, key_tiles = selection.num_query_tiles, selection.num_key_tiles
  query_length, key_length = query.shape[1], key.shape[1]
  if query_tiles < 1 or key_tiles < 1 or query_length % query_tiles or not query_length:
    raise ValueError(
      f"query: got {query_length} tokens, want a multiple of the selection's {query_tiles} query tiles"
      f" ({key_tiles} key tiles); tile_tokens pads to whole tiles"
    )
  problem = Problem.of(query, key, selection)
  if key_length != key_tiles * problem.tile_size:
    raise ValueError(
      f"key: got {key_length} tokens, want {key_tiles * problem.tile_size}: the selection's {key_tiles} key tiles"
      f" of {problem.tile_size} tokens, query's tile size ({query_length} tokens in {query_tiles} tiles)"
    )
  return problem


def sizes_of(problem: Problem, tile_sizes: Any, query_tile_sizes: Any) -> Sizes:
  """Checked valid slots of query and key tiles; the defaults are `block_sparse_attention`'s."""
  if query_tile_sizes is None and problem.query_tiles == problem.key_tiles:
    query_tile_sizes = tile_sizes

  def checked(name: str, sizes: Any, tiles: int) -> jax.Array:
    return tile_sizes_of(name, sizes, problem.batch, tiles, problem.tile_size)

  key = checked("tile_sizes", tile_sizes, problem.key_tiles)
  return Sizes(checked("query_tile_sizes", query_tile_sizes, problem.query_tiles), key)


def operand_specs(
  placement: Placement,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  selection: TileSelection,
) -> tuple[Any, Any, Any, Any]:
  """Specs of query, key (and value), selection, Sizes; ValueError when one is sharded otherwise."""
  check_key_placement(placement, query, key, value)
  lists = jax.tree.map(lambda x: placement.spec(x.shape, 1), selection)
  for name in ("indices", "counts"):
    check_placement(placement, f"selection.{name}", getattr(selection, name), getattr(lists, name))
  sizes: Any = placement.spec((query.shape[0], 0))
  return placement.spec(query.shape, 2), placement.spec(key.shape, 2), lists, Sizes(sizes, sizes)


@functools.partial(jax.jit, static_argnums=0)
def attend_local(
  static: Static,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  selection: TileSelection,
  sizes: Sizes,
) -> tuple[jax.Array, jax.Array]:
  """(out, natural LSE [B, Jq*M, N]) of checked arguments, on one device (or one shard)."""
  implementation = static.implementation
  if query.shape[0] == 0:  # nothing to run: no implementation has to know an empty batch
    batch, length, heads, _ = query.shape
    return query, jnp.zeros((batch, length, heads), accumulator(query.dtype))
  query, key, value, selection, sizes = vary_alike(query, key, value, selection, sizes)
  if implementation.backward is None:
    out, lse = _run_forward(static, query, key, value, selection, sizes)
    return out, _natural(lse)
  query, key, value = (reverse_mode_only(x) for x in (query, key, value))
  return _attend(static, query, key, value, selection, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, selection, sizes):
  return _attend_forward(static, query, key, value, selection, sizes)[0]


def _attend_forward(static, query, key, value, selection, sizes):
  out, lse = _run_forward(static, query, key, value, selection, sizes)
  # Named here, inside the rule: outside it, a policy that saves them would still run the forward twice.
  out, lse = checkpoint_name(out, "vsa_out"), checkpoint_name(lse, "vsa_lse")
  return (out, _natural(lse)), Residual(query, key, value, selection, sizes, out, lse)


def _attend_backward(static, residual, cotangents):
  implementation, scale, precision = static
  d_out, d_lse = cotangents
  out, lse = residual.out, residual.lse
  # A product and a sum: an einsum would round it to the backend's matmul precision.
  delta = (out.astype(lse.dtype) * d_out.astype(lse.dtype)).sum(-1) - d_lse
  delta = jnp.moveaxis(delta, 1, 2)
  delta = jnp.where(lse == -jnp.inf, 0, delta)
  gradients = implementation.backward(residual, d_out, delta, scale=scale, precision=precision)
  _check_results(implementation, "backward", gradients, residual[:3])
  return (*gradients, None, None)


def _run_forward(static, query, key, value, selection, sizes):
  implementation, scale, precision = static
  results = implementation.forward(
    query, key, value, selection, sizes, scale=scale, precision=precision
  )
  batch, length, heads, _ = query.shape
  lse = jax.ShapeDtypeStruct((batch, heads, length), accumulator(query.dtype))
  _check_results(implementation, "forward", results, (query, lse))
  return results


def _check_results(implementation: Implementation, function: str, got: Any, want: Any) -> None:
  """ValueError unless an implementation returned what `Implementation` says."""
  got = got if isinstance(got, (tuple, list)) else (got,)
  told = [f"{getattr(x, 'dtype', type(x))}{list(jnp.shape(x))}" for x in got]
  wanted = [f"{x.dtype}{list(x.shape)}" for x in want]
  if told != wanted:
    raise ValueError(
      f"implementation: {implementation.name!r}.{function} returned {told}, want {wanted}"
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _natural(lse: jax.Array) -> jax.Array:
  """Base 2 [B, N, P] -> natural [B, P, N]."""
  return jnp.moveaxis(lse * LN_2, 1, 2)
