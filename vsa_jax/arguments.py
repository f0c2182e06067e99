"""What the arguments of the ops must be; what their dtypes and padding imply.

Letters: B batch, L tokens, P padded tokens, N query heads, K kv heads, H head dim, J tiles.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vsa_jax.layout import TileLayout


def check_layout(layout: Any) -> None:
  """ValueError unless it is a TileLayout."""
  if not isinstance(layout, TileLayout):
    raise ValueError(
      f"layout: got {type(layout).__name__}, want a TileLayout, for instance TileLayout([(21, 45, 80)], (4, 4, 4))"
    )


def check_tokens(x: jax.Array, name: str, layout: TileLayout, *, tiled: bool) -> None:
  """ValueError unless x is [B, P, ...] (tiled) or [B, L, ...] as the layout says."""
  check_layout(layout)
  if getattr(x, "dtype", np.dtype("O")).kind in "OUS":
    raise ValueError(
      f"{name}: got {getattr(x, 'dtype', type(x).__name__)}, want an array of numbers"
    )
  want = layout.padded_length if tiled else layout.num_tokens
  shape = jnp.shape(x)
  if len(shape) >= 2 and shape[1] == want:
    return
  kind = "padded_length" if tiled else "num_tokens"
  remedy = "build the layout for this sequence"
  if len(shape) < 2:
    remedy = "tokens are on axis 1, after the batch"
  elif shape[1] == (layout.num_tokens if tiled else layout.padded_length):
    remedy = (
      "x is in packed order: tile_tokens first"
      if tiled
      else "x is tiled already: say tiled=True, or untile first"
    )
  elif (
    len(layout.segments) == 3 and not layout.video_spans and shape[1] == math.prod(layout.segments)
  ):
    remedy = f"three ints are three dense segments; one video is [{layout.segments}]"
  raise ValueError(
    f"{name}: got shape {list(shape)}, want [B, {want}, ...] (the layout's {kind}; its segments are"
    f" {layout.segments}, its tile is {layout.tile}); {remedy}"
  )


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


def check_heads(heads: int, kv_heads: int) -> None:
  """ValueError unless query heads are a multiple of kv heads."""
  if kv_heads < 1 or heads % kv_heads:
    raise ValueError(
      f"key: got {kv_heads} heads for {heads} query heads, want a divisor of {heads}: each key head serves"
      " N / K query heads (GQA)"
    )


def tile_sizes_of(name: str, sizes: Any, batch: int, tiles: int, most: Any) -> jax.Array:
  """int32 [B, J] out of sizes [J] or [B, J], checked; clipped to [0, most] when traced.

  most: an int or [J], also the default of sizes; None where there is no limit and no default.
  """
  sizes = as_array(np.broadcast_to(most, (tiles,)) if sizes is None else sizes)
  if sizes.shape not in ((tiles,), (batch, tiles)) or sizes.dtype.kind not in "iu":
    raise ValueError(
      f"{name}: got {sizes.dtype}{list(sizes.shape)}, want ints [{tiles}] or [{batch}, {tiles}]"
    )
  limit = np.iinfo(np.int32).max if most is None else most
  if is_known(sizes):
    known = np.asarray(sizes)
    limits = np.broadcast_to(limit, known.shape)
    wrong = np.argwhere((known < 0) | (known > limits))
    if wrong.size:
      at = tuple(wrong[0].tolist())
      raise ValueError(
        f"{name}{list(at)}: got {known[at]}, want 0..{limits[at]}: how many leading slots of the tile are valid"
      )
  elif most is not None:
    wide = jnp.promote_types(sizes.dtype, jnp.int32)  # or the limit might not fit
    sizes = jnp.clip(sizes.astype(wide), 0, limit)
  return jnp.broadcast_to(jnp.asarray(sizes, jnp.int32), (batch, tiles))


def static_scale(scale: Any, head_dim: int) -> float:
  """The softmax scale as a Python float; default head_dim**-0.5."""
  if scale is None:
    return head_dim**-0.5
  value = static_real(
    "scale", scale, "it is static; to vary it under jit or vmap multiply query by a traced factor"
  )
  if not (math.isfinite(value) and value > 0):
    raise ValueError(f"scale: got {scale!r}, want a finite real > 0")
  return value


def check_precision(precision: Any) -> Any:
  """`precision` if dot_general takes it; ValueError otherwise."""
  x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  try:
    jax.eval_shape(functools.partial(jnp.matmul, precision=precision), x, x)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f'precision: got {precision!r}, want None, "default", "high", "highest" or a jax.lax.Precision ({error})'
    ) from None
  return precision


def static_real(name: str, value: Any, remedy: str) -> float:
  """value as a Python float; ValueError unless it is a real number known now."""
  if isinstance(value, jax.core.Tracer):
    raise ValueError(f"{name}: got a traced value, want a static real; {remedy}")
  is_scalar = isinstance(value, numbers.Real) or (
    isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0
  )
  dtype = value.dtype if hasattr(value, "dtype") else np.result_type(type(value))
  if not is_scalar or isinstance(value, (bool, np.bool_)) or dtype.kind not in "iuf":
    raise ValueError(f"{name}: got {value!r}, want a static real number")
  return float(value)


def check_broadcasts(
  name: str, x: Any, kind: str, letters: str, full: tuple[int, ...]
) -> jax.Array:
  """x with all axes of `full`, each 1 or full; ValueError unless it broadcasts and is "iu" or "f"."""
  x = as_array(x)
  shape = x.shape
  fits = len(shape) <= len(full) and all(
    n in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)
  )
  floating = jnp.issubdtype(x.dtype, jnp.floating)
  if not fits or not (floating if kind == "f" else x.dtype.kind in "iu"):
    words = "floats" if kind == "f" else "ints"
    raise ValueError(
      f"{name}: got {x.dtype}{list(shape)}, want {words} that broadcast to {letters} = {list(full)}"
    )
  return jnp.asarray(x).reshape((1,) * (len(full) - len(shape)) + shape)


def accumulator(dtype: Any) -> Any:
  """The dtype of sums, LSE, pooling and scores."""
  return jnp.promote_types(dtype, jnp.float32)


def valid_slots(sizes: jax.Array, tile_size: int) -> jax.Array:
  """bool [B, J*M] of sizes [B, J]."""
  valid = jnp.arange(tile_size) < sizes[..., None]
  return valid.reshape(sizes.shape[0], sizes.shape[1] * tile_size)


def as_array(x: Any) -> Any:
  """x as an array, NumPy's for what is not JAX's, so that known values stay readable."""
  return x if isinstance(x, jax.Array) else np.asarray(x)


def is_known(array: Any) -> bool:
  """Whether the values of an array can be read here: not traced, and all on this process."""
  if isinstance(array, jax.core.Tracer):
    return False
  return not isinstance(array, jax.Array) or array.is_fully_addressable
