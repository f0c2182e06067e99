"""`reference`: dense masked attention, for small sizes and for truth.  jvp and hessian work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vsa_jax.arguments import accumulator, valid_slots
from vsa_jax.block_sparse.base import LOG2_E, Problem, Sizes
from vsa_jax.selection import TileSelection


class Reference:
  """Differentiated by JAX itself: it has no backward of its own."""

  name = "reference"
  backward: Any = None

  def supports(self, problem: Problem) -> str | None:
    """It runs anything; None does not choose it."""
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
    """out and base-2 LSE, all in the accumulator dtype at the highest precision."""
    del precision
    dtype = accumulator(query.dtype)
    tile_size = query.shape[1] // selection.num_query_tiles
    query_valid, key_valid = (valid_slots(s, tile_size) for s in (sizes.query, sizes.key))
    # 0 * NaN is NaN: padding is replaced, not only masked.
    q = jnp.where(query_valid[..., None, None], query.astype(dtype), 0)
    k, v = (jnp.where(key_valid[..., None, None], x.astype(dtype), 0) for x in (key, value))
    k, v = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (k, v))

    times = jnp.repeat(jnp.repeat(selection.multiplicity(), tile_size, axis=2), tile_size, axis=3)
    times = jnp.where(query_valid[:, None, :, None] & key_valid[:, None, None, :], times, 0)
    times = times.astype(dtype)
    some = (times > 0).any(-1)
    logits = jnp.einsum("bqnh,bknh->bnqk", q, k, precision=lax.Precision.HIGHEST) * scale
    top = lax.stop_gradient(jnp.where(times > 0, logits, -jnp.inf).max(-1, initial=-jnp.inf))
    top = jnp.where(some, top, 0)
    # Twice `where`: the unkept logits may overflow exp, and 0 * inf in its derivative is NaN.
    weights = times * jnp.exp(jnp.where(times > 0, logits - top[..., None], 0))
    total = weights.sum(-1)
    total = jnp.where(total == 0, 1, total)
    out = jnp.einsum(
      "bnqk,bknh->bqnh", weights / total[..., None], v, precision=lax.Precision.HIGHEST
    )
    lse = (top + jnp.log(total)) * LOG2_E
    # The last `where` also cuts off the cotangents of rows without keys.
    out = jnp.where(jnp.moveaxis(some, 1, 2)[..., None], out, 0)
    return out.astype(query.dtype), jnp.where(some, lse, -jnp.inf)
