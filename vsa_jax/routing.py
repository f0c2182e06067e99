"""Routing: pool, score, rank.  Pure JAX, float32 at the highest precision, ties to the lowest tile.

Letters: B batch, P padded tokens, N query heads, K kv heads, H head dim, J tiles, M slots of a tile.
"""

from __future__ import annotations

import dataclasses
import fractions
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vsa_jax.arguments import (
  accumulator,
  as_array,
  check_broadcasts,
  check_heads,
  check_layout,
  check_tokens,
  is_known,
  static_real,
  static_scale,
  tile_sizes_of,
)
from vsa_jax.layout import TileLayout
from vsa_jax.selection import TileSelection
from vsa_jax.sharding import has_auto_axes, on_own_shards


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
    return on_own_shards(lambda x: _by_tile(x, layout).mean(2), xt, unsharded_axis=1)
  batch, tiles = xt.shape[0], layout.num_tiles
  sizes = tile_sizes_of("tile_sizes", tile_sizes, batch, tiles, layout.tile_sizes)
  sizes = jnp.broadcast_to(sizes[(..., *[None] * (xt.ndim - 2))], (*sizes.shape, *xt.shape[2:]))
  return on_own_shards(functools.partial(_pool, layout), xt, sizes, unsharded_axis=1)


def _by_tile(xt: jax.Array, layout: TileLayout) -> jax.Array:
  """[B, J, M, ...] in the accumulator dtype."""
  x = xt.reshape(xt.shape[0], layout.num_tiles, layout.tile_size, *xt.shape[2:])
  return x.astype(accumulator(xt.dtype))


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
      " and [B, Jq, N, H] with equal B and H, as pool_tiles makes them"
    )
  batch, rows, heads, dim = pooled_query.shape
  _, columns, kv_heads, _ = pooled_key.shape
  check_heads(heads, kv_heads)
  dtype = accumulator(pooled_query.dtype)
  query = pooled_query.astype(dtype).reshape(batch, rows, kv_heads, heads // kv_heads, dim)
  scores = jnp.einsum(
    "bqkgh,bjkh->bkgqj", query, pooled_key.astype(dtype), precision=lax.Precision.HIGHEST
  )
  scores = scores.reshape(batch, heads, rows, columns) * static_scale(scale, dim)
  if tile_sizes is None:
    return scores
  sizes = tile_sizes_of("tile_sizes", tile_sizes, batch, columns, None)
  return jnp.where(sizes[:, None, None, :] > 0, scores, -jnp.inf)


def tile_budget(sparsity: float, num_tiles: int) -> int:
  """How many of num_tiles a sparsity keeps: max(1, min(ceil((1 - s) n), n)), in exact arithmetic.

  The sparsity is read as the nearest fraction of denominator <= 10 000, so that 0.7 of 10 keeps 3 (binary
  floating point gives 4) and np.float32(0.9) of 640 keeps 64 (rules 2.3).

  Args:
    sparsity: the share to drop, a static real in [0, 1].
    num_tiles: n >= 1, the tiles to choose from, ragged ones included.

  Raises:
    ValueError: sparsity is not a static real in [0, 1], or num_tiles not an int >= 1.
  """
  if isinstance(num_tiles, bool) or not isinstance(num_tiles, numbers.Integral) or num_tiles < 1:
    raise ValueError(f"num_tiles: got {num_tiles!r}, want an int, at least 1 tile to choose from")
  keep = 1 - fractions.Fraction(_share(sparsity)).limit_denominator(10_000)
  return max(1, min(math.ceil(keep * int(num_tiles)), int(num_tiles)))


def plain_budget(sparsity: Any, topk: Any) -> tuple[Any, Any]:
  """(sparsity, topk) as Python numbers or tuples of them, each checked; None stays None."""
  return _each(_share, sparsity), _each(_count, topk)


def _each(check: Callable, value: Any) -> Any:
  if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1):
    return tuple(check(v) for v in value)
  return None if value is None else check(value)


def region_budgets(layout: TileLayout, sparsity: Any, topk: Any) -> tuple[int, ...]:
  """The number of tiles each video region keeps, from exactly one of sparsity and topk."""
  if (sparsity is None) == (topk is None):
    got = "neither" if sparsity is None else f"sparsity={sparsity!r} and topk={topk!r}"
    raise ValueError(
      f"sparsity, topk: got {got}, want exactly one: the share of tiles to drop, or the number to keep"
    )
  sparsity, topk = plain_budget(sparsity, topk)
  name, value = ("topk", topk) if sparsity is None else ("sparsity", sparsity)
  sizes = [stop - start for start, stop in layout.video_spans]
  values = value if isinstance(value, tuple) else (value,) * len(sizes)
  if len(values) != len(sizes):
    raise ValueError(
      f"{name}: got {len(values)} values {list(values)}, want a scalar or one per video region, of which this"
      f" layout has {len(sizes)}"
    )
  if name == "sparsity":
    return tuple(tile_budget(s, n) for s, n in zip(values, sizes, strict=True))
  return tuple(min(k, n) for k, n in zip(values, sizes, strict=True))


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
  check_layout(layout)
  tiles = layout.num_tiles
  shape, dtype = np.shape(scores), getattr(scores, "dtype", np.dtype("O"))
  if len(shape) != 4 or shape[2:] != (tiles, tiles) or not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
      f"scores: got {dtype}{list(shape)}, want floating [B, N, {tiles}, {tiles}] for this layout, as"
      " routing_scores makes them"
    )
  plan = Plan.of(layout, sparsity, topk, prefix, has_budget=budget is not None)
  batch, heads = shape[:2]
  if budget is not None:
    budget = plan.check_budget(budget, batch, heads)
  if plan.keeps_all:
    return plan.selection(batch, heads)
  first = layout.num_prefix_tiles
  operands = [lax.slice_in_dim(jnp.asarray(scores), first, tiles, axis=2)]
  if budget is not None:
    budget = lax.slice_in_dim(budget, first, tiles, axis=2)
    operands.append(jnp.broadcast_to(budget, (batch, heads, *budget.shape[2:])))
  return plan.selection(batch, heads, on_own_shards(plan.rank, *operands, unsharded_axis=3))


@dataclasses.dataclass(frozen=True)
class Plan:
  """The static side of a selection: what is ranked, how much of it is kept."""

  layout: TileLayout
  num_prefix_tiles: int  # leading key tiles that every row keeps, unranked
  spans: tuple[tuple[int, int], ...]  # of key tiles, each ranked by itself
  widths: tuple[int, ...]  # how many tiles of each span a row keeps at most
  prefix_quota: int  # places among those that are the prefix's, when it competes
  keeps_all: bool  # whatever the scores are

  @classmethod
  def of(
    cls, layout: TileLayout, sparsity: Any, topk: Any, prefix: str, *, has_budget: bool
  ) -> Plan:
    """Checks the static arguments of `select_tiles`."""
    if prefix not in ("exempt", "compete"):
      raise ValueError(
        f'prefix: got {prefix!r}, want "exempt" (every row keeps the prefix) or "compete" (it is ranked)'
      )
    budgets = region_budgets(layout, sparsity, topk)
    spans, num_prefix_tiles, quota = layout.video_spans, layout.num_prefix_tiles, 0
    if prefix == "compete" and num_prefix_tiles and spans:
      if len(spans) > 1:
        raise ValueError(
          f'prefix: got "compete" with {len(spans)} video regions, want one; use "exempt"'
        )
      spans, num_prefix_tiles, quota = ((0, layout.num_tiles),), 0, num_prefix_tiles
    widths = tuple(k + quota for k in budgets)
    whole = all(k == stop - start for k, (start, stop) in zip(widths, spans, strict=True))
    keeps_all = not spans or (whole and not has_budget)
    return cls(layout, num_prefix_tiles, spans, widths, quota, keeps_all)

  @property
  def width(self) -> int:
    """W, of the lists."""
    return 0 if self.keeps_all else sum(self.widths)

  def check_budget(self, budget: Any, batch: int, heads: int) -> jax.Array:
    """`budget` as [1 or B, 1 or N, J, regions]; ValueError when it does not broadcast."""
    full = (batch, heads, self.layout.num_tiles, len(self.spans))
    budget = as_array(budget)
    if is_known(budget) and budget.dtype.kind in "iu":  # before 64 bits are cut to 32
      budget = np.clip(np.asarray(budget), 0, self.layout.num_tiles)
    budget = check_broadcasts("budget", budget, "iu", "[B, N, J, regions]", full)
    return jnp.broadcast_to(budget, (*budget.shape[:2], *full[2:]))

  def rank(self, scores: jax.Array, budget: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(indices [B, N, rows, W], counts [B, N, rows]) of any rows of the scores [B, N, rows, J].

    budget: [1 or B, 1 or N, rows, regions] or None.
    """
    fill, quota = self.layout.num_tiles, self.prefix_quota
    scores = lax.stop_gradient(scores)
    lists, counts = [], []
    for region, ((start, stop), width) in enumerate(zip(self.spans, self.widths, strict=True)):
      ids = start + top_tiles(scores[..., start:stop], width)
      kept = jnp.full(ids.shape[:-1], width, jnp.int32)
      if budget is not None:
        kept = jnp.clip(budget[..., region], 1, width - quota).astype(jnp.int32) + quota
        kept = jnp.broadcast_to(kept, ids.shape[:-1])
        ids = jnp.where(jnp.arange(width) < kept[..., None], ids, fill)
      lists.append(ids)
      counts.append(kept)
    indices = lax.sort(jnp.concatenate(lists, -1), dimension=lists[0].ndim - 1)
    return indices, jnp.stack(counts).sum(0, dtype=jnp.int32)  # a plain sum is int64 in x64 mode

  def selection(
    self, batch: int, heads: int, lists: tuple[jax.Array, jax.Array] | None = None
  ) -> TileSelection:
    """The selection of lists made by `rank` for every video query tile; without, when all is kept."""
    if lists is None:  # implied by the static integers
      lists = jnp.zeros((batch, heads, 0, 0), jnp.int32), jnp.zeros((batch, heads, 0), jnp.int32)
      return TileSelection(*lists, self.layout.num_tiles)
    return TileSelection(
      *lists,
      self.num_prefix_tiles,
      num_dense_rows=self.layout.num_prefix_tiles,
      num_key_tiles=self.layout.num_tiles,
    )


def top_tiles(scores: jax.Array, k: int) -> jax.Array:
  """int32 [..., k]: positions of the k highest scores of the last axis, best first, ties to the lowest."""
  # NaN would rank first, and -0.0 below +0.0 on some backends.
  scores = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, 0.0, scores))
  if not has_auto_axes(scores):
    return lax.top_k(scores, k)[1].astype(jnp.int32)
  # XLA gathers a sharded operand of top_k; it partitions a sort along the other axes.
  positions = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
  _, positions = lax.sort(
    (-scores, positions), dimension=scores.ndim - 1, num_keys=1, is_stable=True
  )
  return positions[..., :k]


def _share(sparsity: Any) -> float:
  value = static_real("sparsity", sparsity, "use `budget` for a number that changes at run time")
  if not 0 <= value <= 1:
    raise ValueError(
      f"sparsity: got {sparsity!r}, want the share of tiles to drop, in [0, 1]; topk takes a count"
    )
  return value


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
