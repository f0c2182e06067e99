"""What an implementation of block-sparse attention is, and what all of them share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from vsa_jax.selection import TileSelection

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclasses.dataclass(frozen=True)
class Problem:
  """The static facts of a call, from which an implementation says whether it can run it."""

  dtype: Any  # of query, key and value
  batch: int  # B
  heads: int  # N, query heads
  kv_heads: int  # K
  head_dim: int  # H
  tile_size: int  # M
  query_tiles: int  # Jq
  key_tiles: int  # Jk
  width: int  # W, of the lists

  @classmethod
  def of(cls, query: Any, key: Any, selection: TileSelection) -> Problem:
    """The facts of tiled operands: query [B, Jq*M, N, H], key [B, Jk*M, K, H]."""
    batch, length, heads, head_dim = query.shape
    return cls(
      query.dtype,
      batch,
      heads,
      key.shape[2],
      head_dim,
      length // selection.num_query_tiles,
      selection.num_query_tiles,
      selection.num_key_tiles,
      selection.width,
    )

  @property
  def groups(self) -> int:
    """Query heads per kv head."""
    return self.heads // self.kv_heads


class Sizes(NamedTuple):
  """How many leading slots of each tile are valid; the rest may hold anything, NaN included."""

  query: jax.Array  # int32 [B, Jq]
  key: jax.Array  # int32 [B, Jk]


class Residual(NamedTuple):
  """What every forward leaves for every backward."""

  query: jax.Array  # [B, Jq*M, N, H]
  key: jax.Array  # [B, Jk*M, K, H]
  value: jax.Array  # [B, Jk*M, K, H]
  selection: TileSelection
  sizes: Sizes
  out: jax.Array  # [B, Jq*M, N, H], query's dtype
  lse: (
    jax.Array
  )  # [B, N, Jq*M], base 2, float32 (float64 for float64), -inf where a row has no keys


class Implementation(Protocol):
  """One way to run the op.  Also the form of a user's own (`implementation=` takes the object).

  Inputs are checked before they arrive.  Operands are BLNH; lse and delta are [B, N, Jq*M], and the LSE
  inside is base 2.  A hashable object: it is a static argument.  What padded slots and unkept tiles hold, NaN
  included, reaches no result.  `backward` may be None: then JAX differentiates `forward`.
  """

  name: str

  def supports(self, problem: Problem) -> str | None:
    """None when it can run the problem here, else the reason why not."""
    ...

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
    """(out [B, Jq*M, N, H] in query's dtype, lse [B, N, Jq*M] base 2, float32 or float64).

    Padded query rows and rows without keys: out 0, lse -inf.
    """
    ...

  def backward(
    self, residual: Residual, d_out: jax.Array, delta: jax.Array, *, scale: float, precision: Any
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_query, d_key, d_value), each in its operand's shape and dtype, 0 in padded slots.

    d_out [B, Jq*M, N, H] may hold anything where lse is -inf.  delta [B, N, Jq*M] is
    sum(out * d_out) - d_lse, 0 where lse is -inf: d_logits = p * (d_out . value - delta).
    """
    ...
