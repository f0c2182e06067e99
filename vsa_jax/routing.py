"""Routing: pool, score, rank.  Pure JAX, float32 at the highest precision, ties to the lowest tile.

Letters: B batch, P padded tokens, N query heads, K kv heads, H head dim, J tiles, M slots of a tile.
"""

from __future__ import annotations

import fractions
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vsa_jax.layout import TileLayout
from vsa_jax.selection import TileSelection, is_known
from vsa_jax.sharding import on_own_shards
from vsa_jax.tiling import check_tokens


def pool_tiles(xt: jax.Array, layout: TileLayout, tile_sizes: Any = None) -> jax.Array:
  """The mean of each tile over its valid tokens (rules 2.1).

  Args:
    xt: [B, P, N, H], tiled (see `tile_tokens`).  Padding may hold anything, NaN included.
    layout: the geometry.
    tile_sizes: int [J] or [B, J], valid tokens of each tile; default layout.tile_sizes.

  Returns:
    [B, J, N, H], float32 (float64 for float64).  A tile of size 0 pools to 0.

  Raises:
    ValueError: xt or tile_sizes does not fit the layout.
  """
  check_tokens(xt, "xt", layout, tiled=True)
  if tile_sizes is None and not layout.is_ragged:
    return on_own_shards(lambda x: _by_tile(x, layout).mean(2), xt, whole=1)
  tiles, size = layout.num_tiles, layout.tile_size
  sizes = tile_sizes_of("tile_sizes", tile_sizes, xt.shape[0], tiles, size, layout.tile_sizes)
  sizes = jnp.broadcast_to(sizes[(..., *[None] * (xt.ndim - 2))], (*sizes.shape, *xt.shape[2:]))
  return on_own_shards(functools.partial(_pool, layout), xt, sizes, whole=1)


def _by_tile(xt: jax.Array, layout: TileLayout) -> jax.Array:
  """[B, J, M, ...] in the accumulator dtype."""
  x = xt.reshape(xt.shape[0], layout.num_tiles, layout.tile_size, *xt.shape[2:])
  return x.astype(jnp.promote_types(xt.dtype, jnp.float32))


def _pool(layout: TileLayout, xt: jax.Array, sizes: jax.Array) -> jax.Array:
  """xt [B, P, ...], sizes [B, J, ...]."""
  x = _by_tile(xt, layout)
  slot = jnp.arange(layout.tile_size).reshape(-1, *[1] * (x.ndim - 3))
  total = jnp.where(slot < sizes[:, :, None], x, 0).sum(2)
  return total / jnp.maximum(sizes, 1).astype(x.dtype)


def routing_scores(
  pooled_query: jax.Array,
  pooled_key: jax.Array,
  scale: float | None = None,
  *,
  tile_sizes: Any = None,
) -> jax.Array:
  """scale * mean(query tile) . mean(key tile), at Precision.HIGHEST (rules 2.2).

  Equal to the mean of all scaled token logits of the two tiles, since the dot product is linear.

  Args:
    pooled_query: [B, Jq, N, H].
    pooled_key: [B, Jk, K, H]; N is a multiple of K (GQA).
    scale: static real > 0; default H**-0.5.
    tile_sizes: int [Jk] or [B, Jk]; where given, a key tile of size 0 scores -inf.

  Returns:
    [B, N, Jq, Jk], float32 (float64 for float64).

  Raises:
    ValueError: shapes that do not fit, or a scale that is not a static real > 0.
  """
  if (
    pooled_query.ndim != 4
    or pooled_key.ndim != 4
    or pooled_query.shape[::3] != pooled_key.shape[::3]
  ):
    raise ValueError(
      f"pooled_key: got {list(pooled_key.shape)} for pooled_query {list(pooled_query.shape)}, want [B, Jk, K, H]"
      " and [B, Jq, N, H] with equal B and H"
    )
  batch, rows, heads, dim = pooled_query.shape
  _, columns, kv_heads, _ = pooled_key.shape
  check_heads(heads, kv_heads)
  dtype = jnp.promote_types(pooled_query.dtype, jnp.float32)
  query = pooled_query.astype(dtype).reshape(batch, rows, kv_heads, heads // kv_heads, dim)
  scores = jnp.einsum(
    "bqkgh,bjkh->bkgqj", query, pooled_key.astype(dtype), precision=lax.Precision.HIGHEST
  )
  scores = scores.reshape(batch, heads, rows, columns) * static_scale(scale, dim)
  if tile_sizes is None:
    return scores
  sizes = tile_sizes_of("tile_sizes", tile_sizes, batch, columns, None, None)
  return jnp.where(sizes[:, None, None, :] > 0, scores, -jnp.inf)


def tile_budget(sparsity: float, num_tiles: int) -> int:
  """How many of num_tiles a sparsity keeps: max(1, min(ceil((1 - s) n), n)), in exact arithmetic.

  The sparsity is read as the nearest fraction of denominator <= 10 000, so that 0.7 of 10 keeps 3 (binary
  floating point gives 4) and np.float32(0.9) of 640 keeps 64 (rules 2.3).

  Args:
    sparsity: the share to drop, a static real in [0, 1].
    num_tiles: n, the tiles to choose from, ragged ones included.

  Raises:
    ValueError: sparsity is not a static real in [0, 1].
  """
  s = _static_real("sparsity", sparsity, "use `budget` for a number that changes at run time")
  if not 0 <= s <= 1:
    raise ValueError(
      f"sparsity: got {sparsity!r}, want the share of tiles to drop, in [0, 1]; topk takes a count"
    )
  keep = 1 - fractions.Fraction(s).limit_denominator(10_000)
  return max(1, min(math.ceil(keep * num_tiles), num_tiles))


def region_budgets(layout: TileLayout, sparsity: Any, topk: Any) -> tuple[int, ...]:
  """The number of tiles each video region keeps, from exactly one of sparsity and topk."""
  if (sparsity is None) == (topk is None):
    got = "neither" if sparsity is None else f"sparsity={sparsity!r} and topk={topk!r}"
    raise ValueError(
      f"sparsity, topk: got {got}, want exactly one: the share of tiles to drop, or the number to keep"
    )
  name, value = ("topk", topk) if sparsity is None else ("sparsity", sparsity)
  sizes = [stop - start for start, stop in layout.video_spans]
  if (
    isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) and np.ndim(value) == 1
  ):
    values = list(value)
    if len(values) != len(sizes):
      raise ValueError(
        f"{name}: got {len(values)} values {values}, want a scalar or one per video region ({len(sizes)} in this"
        " layout)"
      )
  else:
    values = [value] * max(len(sizes), 1)  # checked also where there is no video
  if name == "sparsity":
    budgets = [tile_budget(s, n) for s, n in zip(values, sizes or [1], strict=True)]
  else:
    budgets = [min(_count(k), n) for k, n in zip(values, sizes or [1], strict=True)]
  return tuple(budgets[: len(sizes)])


def select_tiles(
  scores: jax.Array,
  layout: TileLayout,
  *,
  sparsity: float | Sequence[float] | None = None,
  topk: int | Sequence[int] | None = None,
  budget: Any = None,
  prefix: str = "exempt",
) -> TileSelection:
  """Ranks key tiles for every video query tile, per video region (rules 2.4).

  Prefix query tiles keep everything.  A video query tile keeps the whole prefix ("exempt") and, of each
  video region, the tiles of the highest scores.  Equal scores go to the lower tile, NaN counts as -inf
  and -0.0 as 0.0.  Nothing here is differentiated.

  Args:
    scores: [B, N, J, J], as `routing_scores` makes them.
    layout: the geometry.
    sparsity: the share of a region's tiles to drop (see `tile_budget`); a scalar or one per video region.
    topk: how many tiles to keep of a region, an int >= 1, clamped to the region; a scalar or one per video
      region.  Give exactly one of sparsity and topk.
    budget: int, broadcastable to [B, N, J, regions]: how many tiles a row keeps of a region, clipped to
      [1, what sparsity or topk says].  May be traced: it changes counts, never shapes.
    prefix: "exempt", or "compete": prefix tiles are ranked with the video's, num_prefix_tiles places more
      are given (one video region only).

  Returns:
    A TileSelection of ascending lists.  When nothing is dropped its lists are empty (num_prefix_tiles = J).

  Raises:
    ValueError: a wrong argument, named.
  """
  tiles = layout.num_tiles
  if scores.ndim != 4 or scores.shape[2:] != (tiles, tiles):
    raise ValueError(
      f"scores: got shape {list(scores.shape)}, want [B, N, {tiles}, {tiles}] for this layout"
    )
  plan = Plan(layout, sparsity, topk, prefix, has_budget=budget is not None)
  batch, heads = scores.shape[:2]
  if plan.keeps_all:
    return everything(layout, batch, heads)
  first = layout.num_prefix_tiles
  operands = [lax.slice_in_dim(scores, first, tiles, axis=2)]
  if budget is not None:
    budget = lax.slice_in_dim(plan.check_budget(budget, batch, heads), first, tiles, axis=2)
    operands.append(jnp.broadcast_to(budget, (batch, heads, *budget.shape[2:])))
  return plan.selection(*on_own_shards(plan.rank, *operands, whole=3))


class Plan:
  """The static side of a selection: what is ranked, how much of it is kept.  Validates its arguments."""

  def __init__(
    self, layout: TileLayout, sparsity: Any, topk: Any, prefix: str, *, has_budget: bool
  ):
    if prefix not in ("exempt", "compete"):
      raise ValueError(f'prefix: got {prefix!r}, want "exempt" or "compete"')
    budgets = region_budgets(layout, sparsity, topk)
    spans = layout.video_spans
    compete = prefix == "compete" and layout.num_prefix_tiles > 0 and spans
    if compete and len(spans) > 1:
      raise ValueError(
        f'prefix: got "compete" with {len(spans)} video regions, want one; use "exempt"'
      )
    self.layout = layout
    self.num_prefix_tiles = 0 if compete else layout.num_prefix_tiles
    self.extra = (
      layout.num_prefix_tiles if compete else 0
    )  # places given to the prefix when it competes
    self.spans = ((0, layout.num_tiles),) if compete else spans
    self.widths = tuple(k + self.extra for k in budgets)
    whole = all(k == stop - start for k, (start, stop) in zip(self.widths, self.spans, strict=True))
    self.keeps_all = not spans or (whole and not has_budget)

  def check_budget(self, budget: Any, batch: int, heads: int) -> jax.Array:
    """`budget` as [1 or B, 1 or N, J, regions]; ValueError when it does not broadcast."""
    full = (batch, heads, self.layout.num_tiles, len(self.spans))
    budget = as_array(budget)
    shape = budget.shape
    fits = len(shape) <= 4 and all(
      n in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)
    )
    if budget.dtype.kind not in "iu" or not fits:
      raise ValueError(
        f"budget: got {budget.dtype}{list(shape)}, want ints that broadcast to [B, N, J, regions] = {list(full)}"
      )
    budget = jnp.asarray(budget).reshape((1,) * (4 - len(shape)) + shape)
    return jnp.broadcast_to(budget, (*budget.shape[:2], *full[2:]))

  def rank(self, scores: jax.Array, budget: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(indices [B, N, rows, W], counts [B, N, rows]) of any rows of the scores [B, N, rows, J].

    budget: [1 or B, 1 or N, rows, regions] or None.
    """
    fill = self.layout.num_tiles
    scores = lax.stop_gradient(scores)
    lists, counts = [], []
    for region, ((start, stop), width) in enumerate(zip(self.spans, self.widths, strict=True)):
      ids = start + top_tiles(scores[..., start:stop], width)
      kept = jnp.full(ids.shape[:-1], width, jnp.int32)
      if budget is not None:
        kept = jnp.clip(budget[..., region], 1, width - self.extra).astype(jnp.int32) + self.extra
        kept = jnp.broadcast_to(kept, ids.shape[:-1])
        ids = jnp.where(jnp.arange(width) < kept[..., None], ids, fill)
      lists.append(ids)
      counts.append(kept)
    indices = lax.sort(jnp.concatenate(lists, -1), dimension=lists[0].ndim - 1)
    return indices, jnp.stack(counts).sum(0, dtype=jnp.int32)  # a plain sum is int64 in x64 mode

  def selection(self, indices: jax.Array, counts: jax.Array) -> TileSelection:
    """The selection of lists made by `rank` for every video query tile."""
    layout = self.layout
    return TileSelection(
      indices,
      counts,
      self.num_prefix_tiles,
      num_dense_rows=layout.num_prefix_tiles,
      num_key_tiles=layout.num_tiles,
    )


def everything(layout: TileLayout, batch: int, heads: int) -> TileSelection:
  """The selection that drops nothing: implied by its static integers, its lists empty."""
  return TileSelection(
    jnp.zeros((batch, heads, 0, 0), jnp.int32),
    jnp.zeros((batch, heads, 0), jnp.int32),
    layout.num_tiles,
  )


def top_tiles(scores: jax.Array, k: int) -> jax.Array:
  """int32 [..., k]: positions of the k highest scores of the last axis, best first, ties to the lowest."""
  # NaN would rank first, and -0.0 below +0.0 on some backends.
  scores = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, 0.0, scores))
  if not has_auto_axes():
    return lax.top_k(scores, k)[1].astype(jnp.int32)
  # XLA gathers a sharded operand of top_k; it partitions a sort along the other axes.
  positions = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
  _, positions = lax.sort(
    (-scores, positions), dimension=scores.ndim - 1, num_keys=1, is_stable=True
  )
  return positions[..., :k]


def has_auto_axes() -> bool:
  """Whether XLA may be partitioning this code over mesh axes whose use types do not show."""
  mesh = jax.sharding.get_abstract_mesh()
  return any(
    kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
  )


def tile_sizes_of(
  name: str, sizes: Any, batch: int, tiles: int, tile_size: int | None, default: Any
) -> jax.Array:
  """int32 [B, J] out of sizes [J] or [B, J], checked, clipped to [0, tile_size] when traced."""
  sizes = as_array(default if sizes is None else sizes)
  if sizes.shape not in ((tiles,), (batch, tiles)) or sizes.dtype.kind not in "iu":
    raise ValueError(
      f"{name}: got {sizes.dtype}{list(sizes.shape)}, want ints [{tiles}] or [{batch}, {tiles}]"
    )
  if is_known(sizes):
    known = np.asarray(sizes)
    wrong = known[(known < 0) | (known > (known if tile_size is None else tile_size))]
    if wrong.size:
      raise ValueError(
        f"{name}: got {wrong[0]}, want 0..{tile_size or ''}, how many slots of a tile are valid"
      )
  elif tile_size is not None:
    sizes = jnp.clip(sizes, 0, tile_size)
  return jnp.broadcast_to(jnp.asarray(sizes, jnp.int32), (batch, tiles))


def as_array(x: Any) -> Any:
  """x as an array, NumPy's for what is not JAX's, so that known values stay readable."""
  return x if isinstance(x, jax.Array) else np.asarray(x)


def check_heads(heads: int, kv_heads: int) -> None:
  """ValueError unless query heads are a multiple of kv heads."""
  if kv_heads < 1 or heads % kv_heads:
    raise ValueError(
      f"key: got {kv_heads} heads for {heads} query heads, want a divisor of {heads}: each key head serves"
      " N / K query heads (GQA)"
    )


def static_scale(scale: Any, head_dim: int) -> float:
  """The softmax scale as a Python float; default head_dim**-0.5."""
  if scale is None:
    return head_dim**-0.5
  value = _static_real(
    "scale", scale, "it is static; to vary it under jit or vmap multiply query by a traced factor"
  )
  if not (math.isfinite(value) and value > 0):
    raise ValueError(f"scale: got {scale!r}, want a finite real > 0")
  return value


def _static_real(name: str, value: Any, remedy: str) -> float:
  if isinstance(value, jax.core.Tracer):
    raise ValueError(f"{name}: got a traced value, want a static real; {remedy}")
  is_scalar = isinstance(value, numbers.Real) or (
    isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0
  )
  dtype = value.dtype if hasattr(value, "dtype") else np.result_type(type(value))
  if not is_scalar or isinstance(value, (bool, np.bool_)) or dtype.kind not in "iuf":
    raise ValueError(f"{name}: got {value!r}, want a static real number")
  return float(value)


def _count(topk: Any) -> int:
  if isinstance(topk, jax.core.Tracer):
    raise ValueError(
      "topk: got a traced value, want a static int; use `budget` for a number that changes at run time"
    )
  if isinstance(topk, (bool, np.bool_)) or not isinstance(topk, numbers.Integral):
    raise ValueError(
      f"topk: got {topk!r}, want an int, the number of tiles to keep; sparsity takes the share to drop"
    )
  if topk < 1:
    raise ValueError(f"topk: got {topk}, want at least 1 tile")
  return int(topk)
