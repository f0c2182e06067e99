"""video_sparse_attention: tile, route, attend, add the gated coarse branch, untile.  And explain."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from vsa_jax.arguments import (
  accumulator,
  check_broadcasts,
  check_precision,
  check_qkv,
  check_tokens,
  static_scale,
  tile_sizes_of,
  valid_slots,
)
from vsa_jax.block_sparse.api import Static, attend_local
from vsa_jax.block_sparse.automatic import Automatic
from vsa_jax.block_sparse.base import Implementation, Problem, Sizes
from vsa_jax.block_sparse.choice import choose, survey
from vsa_jax.block_sparse.ffi import platform_of
from vsa_jax.layout import TileLayout
from vsa_jax.routing import Plan, pool_tiles, routing_scores
from vsa_jax.selection import TileSelection
from vsa_jax.sharding import (
  Placement,
  check_key_placement,
  check_placement,
  has_auto_axes,
  placement_of,
  shard_map,
)
from vsa_jax.tiling import tile_tokens, untile_tokens

# Scores beyond this are made, ranked and averaged in blocks of rows.  An axis added by vmap is not counted.
MAX_SCORE_BYTES = 256 * 2**20


class Aux(NamedTuple):
  """What a call can return beside its output."""

  selection: TileSelection
  lse: jax.Array  # natural log, [B, L, N] ([B, P, N] when tiled), float32 or float64


jax.export.register_namedtuple_serialization(Aux, serialized_name="vsa_jax.Aux")


def video_sparse_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  layout: TileLayout,
  *,
  sparsity: float | Sequence[float] | None = None,
  topk: int | Sequence[int] | None = None,
  budget: Any = None,
  gate: jax.Array | None = None,
  tiled: bool = False,
  prefix: str = "exempt",
  tile_sizes: Any = None,
  scale: float | None = None,
  precision: Any = None,
  implementation: str | Implementation | Sequence[str | Implementation] | None = None,
  sharding: jax.sharding.NamedSharding | None = None,
  return_aux: bool = False,
) -> Any:
  """Video Sparse Attention of one packed sequence (arXiv 2505.13389; rules 1-4).

  Prefix (text, audio, image) queries see everything.  A video query tile sees the whole prefix and, of
  each video region, the tiles whose mean key scores highest with its mean query; attention over what is
  kept is exact.  Keeping everything, with no gate, is `jax.nn.dot_product_attention`.

  Letters: B batch, L tokens, P padded tokens, N query heads, K kv heads, H head dim, J tiles.

  Args:
    query: [B, L, N, H] in packed order ([B, P, N, H] when tiled); positions already applied.
    key, value: [B, L, K, H] (P when tiled), of query's dtype; N is a multiple of K.
    layout: the geometry of the sequence.
    sparsity: the share of each video region's tiles to drop, in [0, 1]; a scalar or one per region.  It
      counts the layout's tiles, also where a sample is shorter; `budget` sets a number per sample.
    topk: or the number of tiles to keep; a scalar or one per region.  Exactly one of the two.
    budget: ints that broadcast to [B, N, J, regions]: tiles to keep, at most what sparsity or topk says.
      It may be traced, so it can change from step to step without recompiling.
    gate: None: no coarse branch.  Else a floating array that broadcasts to query's shape, and
      out = fine + gate * coarse, where coarse is softmax(tile scores over all tiles) . mean value, equal
      for all tokens of a tile.  A gate of zeros gives the output of None (-0.0 may become 0.0), and still
      has a gradient.  Other packages add the coarse branch at weight 1 when the gate is left out; this
      one does not.
    tiled: query, key, value, the gate, the output and Aux.lse are in tiled order.
    prefix: "exempt", or "compete" (rules 2.4; one video region).
    tile_sizes: int [J] or [B, J], valid tokens of each tile where samples differ, see
      `TileLayout.tile_sizes_for`; default layout.tile_sizes.
    scale: static real > 0, of attention, routing and coarse branch; default H**-0.5.
    precision: of the attention matmuls; routing and coarse branch are always HIGHEST.
    implementation: of the attention over kept tiles; see `block_sparse_attention`.
    sharding: the NamedSharding of query where types do not carry it (auto mode); batch and heads only.
    return_aux: return (out, Aux(selection, lse)).

  Returns:
    out, of query's shape and dtype, or (out, Aux).

  Raises:
    ValueError: a wrong argument; the message names it, what it got, what it wants.
    NotImplementedError: an implementation asked for by name cannot run this here.
  """
  options, problem, operands = _prepare(
    query,
    key,
    value,
    layout,
    sparsity=sparsity,
    topk=topk,
    budget=budget,
    gate=gate,
    tiled=tiled,
    prefix=prefix,
    tile_sizes=tile_sizes,
    scale=scale,
    precision=precision,
  )
  placement = placement_of(query, sharding)
  partitioned = placement is None and has_auto_axes(query)
  chosen = choose(implementation, problem, partitioned=partitioned)
  run = functools.partial(_attention, dataclasses.replace(options, implementation=chosen))
  if placement is not None:
    run = _on_shards(run, placement, operands)
  out, aux = run(operands)
  return (out, aux) if return_aux else out


class _Operands(NamedTuple):
  """The arrays of a call; also the form of a tree of their specs."""

  query: Any
  key: Any
  value: Any
  tile_sizes: Any  # int32 [B, J]
  budget: Any  # None, or [1 or B, 1 or N, J, regions]
  gate: Any  # None, or 4-D, each axis 1 or query's


@dataclasses.dataclass(frozen=True)
class _Options:
  """The static side of a call."""

  plan: Plan
  tiled: bool
  ragged: bool  # whether any tile may have padding
  scale: float
  precision: Any
  max_score_bytes: int
  implementation: Any = None


def _prepare(
  query,
  key,
  value,
  layout,
  *,
  sparsity=None,
  topk=None,
  budget=None,
  gate=None,
  tiled=False,
  prefix="exempt",
  tile_sizes=None,
  scale=None,
  precision=None,
) -> tuple[_Options, Problem, _Operands]:
  """Checks every argument."""
  check_qkv(query, key, value)
  for name, x in (("query", query), ("key", key), ("value", value)):
    check_tokens(x, name, layout, tiled=tiled)
  batch, _, heads, head_dim = query.shape
  plan = Plan.of(layout, sparsity, topk, prefix, has_budget=budget is not None)
  if budget is not None:
    budget = plan.check_budget(budget, batch, heads)
  if gate is not None:
    gate = check_broadcasts("gate", gate, "f", "query's shape", query.shape)
  tiles, size = layout.num_tiles, layout.tile_size
  sizes = tile_sizes_of("tile_sizes", tile_sizes, batch, tiles, layout.tile_sizes)
  problem = Problem(
    query.dtype, batch, heads, key.shape[2], head_dim, size, tiles, tiles, plan.width
  )
  ragged = layout.is_ragged or tile_sizes is not None
  options = _Options(
    plan,
    bool(tiled),
    ragged,
    static_scale(scale, head_dim),
    check_precision(precision),
    MAX_SCORE_BYTES,
  )
  return options, problem, _Operands(query, key, value, sizes, budget, gate)


@functools.partial(jax.jit, static_argnums=0)
def _attention(options: _Options, operands: _Operands) -> tuple[jax.Array, Aux]:
  """The op on one device (or one shard)."""
  layout, sizes = options.plan.layout, operands.tile_sizes
  query, key, value = operands[:3]
  gate = operands.gate
  if not options.tiled:
    query, key, value = (tile_tokens(x, layout) for x in (query, key, value))
    if gate is not None and gate.shape[1] != 1:
      gate = tile_tokens(gate, layout)

  selection, coarse = _route(
    options, query, key, value, sizes, operands.budget, with_coarse=gate is not None
  )
  static = Static(options.implementation, options.scale, options.precision)
  out, lse = attend_local(static, query, key, value, selection, Sizes(sizes, sizes))
  if gate is not None:
    out = _combine(options, out, gate, coarse, sizes)
  if not options.tiled:
    out, lse = untile_tokens(out, layout), untile_tokens(lse, layout)
  return out, Aux(selection, lse)


def _route(options: _Options, query, key, value, sizes, budget, *, with_coarse: bool):
  """(selection, coarse [B, N, J, H] or None)."""
  plan, layout = options.plan, options.plan.layout
  batch, _, heads, _ = query.shape
  ranks = not plan.keeps_all
  if not ranks and not with_coarse:
    return plan.selection(batch, heads), None
  sizes_or_none = sizes if options.ragged else None
  pooled_query, pooled_key = (pool_tiles(x, layout, sizes_or_none) for x in (query, key))
  pooled_value = pool_tiles(value, layout, sizes_or_none) if with_coarse else None

  def rows(pooled_query, budget):
    scores = routing_scores(pooled_query, pooled_key, options.scale, tile_sizes=sizes_or_none)
    lists = plan.rank(scores, budget) if ranks else None
    return lists, None if pooled_value is None else _coarse(scores, pooled_value)

  tiles = layout.num_tiles
  known = batch if isinstance(batch, int) else 1  # a symbolic batch, of jax.export, counts as one
  row_bytes = known * heads * tiles * pooled_query.dtype.itemsize
  block = max(1, min(tiles, options.max_score_bytes // max(row_bytes, 1)))
  if block == tiles:
    lists, coarse = rows(pooled_query, budget)
  else:
    lists, coarse = _in_row_blocks(rows, block, pooled_query, budget)
  if ranks:
    lists = tuple(x[:, :, layout.num_prefix_tiles :] for x in lists)
  return plan.selection(batch, heads, lists), coarse


def _in_row_blocks(rows: Any, block: int, pooled_query: jax.Array, budget: jax.Array | None) -> Any:
  """`rows` over blocks of query tiles, one after the other; the backward makes the scores again."""
  tiles = pooled_query.shape[1]
  count = -(-tiles // block)

  def cut(x: jax.Array, axis: int) -> jax.Array:
    x = jnp.pad(x, [(0, count * block - tiles if a == axis else 0) for a in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)

  def join(x: jax.Array) -> jax.Array:  # [count, B, N, block, ...]
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], count * block, *x.shape[4:])[:, :, :tiles]

  blocks = (cut(pooled_query, 1), None if budget is None else cut(budget, 2))
  return jax.tree.map(join, lax.map(jax.checkpoint(lambda b: rows(*b)), blocks))


def _coarse(scores: jax.Array, pooled_value: jax.Array) -> jax.Array:
  """softmax(scores) . pooled value [B, J, K, H] -> [B, N, rows, H]; 0 where every key tile is empty."""
  top = lax.stop_gradient(scores.max(-1, keepdims=True))
  weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
  total = weights.sum(-1, keepdims=True)
  weights = weights / jnp.where(total == 0, 1, total)
  batch, heads, rows, tiles = weights.shape
  kv_heads = pooled_value.shape[2]
  weights = weights.reshape(batch, kv_heads, heads // kv_heads, rows, tiles)
  coarse = jnp.einsum("bkgqj,bjkh->bkgqh", weights, pooled_value, precision=lax.Precision.HIGHEST)
  return coarse.reshape(batch, heads, rows, pooled_value.shape[3])


def _combine(
  options: _Options, fine: jax.Array, gate: jax.Array, coarse: jax.Array, sizes: jax.Array
) -> jax.Array:
  """fine + gate * coarse, rounded once; all in tiled order."""
  batch, length, heads, head_dim = fine.shape
  layout = options.plan.layout
  dtype = accumulator(fine.dtype)
  by_tile = (batch, layout.num_tiles, layout.tile_size, heads, head_dim)
  if gate.shape[1] == 1:
    gate = gate[:, :, None]
  else:
    gate = gate.reshape(gate.shape[0], layout.num_tiles, layout.tile_size, *gate.shape[2:])
  gate = jnp.broadcast_to(gate, by_tile).astype(dtype)
  valid = valid_slots(sizes, layout.tile_size).reshape(*by_tile[:3], 1, 1)
  if options.ragged:
    gate = jnp.where(valid, gate, 0)  # before the product: its padding may hold NaN
  coarse = jnp.moveaxis(coarse, 1, 2)[:, :, None]
  out = fine.reshape(by_tile).astype(dtype) + gate * coarse
  if options.ragged:
    out = jnp.where(valid, out, 0)
  return out.reshape(batch, length, heads, head_dim).astype(fine.dtype)


def _on_shards(run: Any, placement: Placement, operands: _Operands) -> Any:
  """`run` inside one shard_map."""
  query, key, value, sizes, budget, gate = operands
  check_key_placement(placement, query, key, value)
  tokens: Any = placement.spec(query.shape, 2)
  keys: Any = placement.spec(key.shape, 2)
  gate_spec: Any = None if gate is None else placement.spec(gate.shape, 2)
  if gate is not None and gate.shape == query.shape:
    check_placement(placement, "gate", gate, gate_spec)
  specs = _Operands(
    tokens,
    keys,
    keys,
    placement.spec(sizes.shape),
    None if budget is None else placement.spec(budget.shape, 1),
    gate_spec,
  )
  selection: Any = PartitionSpec(placement.batch, placement.heads)
  lse: Any = placement.spec(query.shape[:3], 2)
  return shard_map(placement.mesh, run, (specs,), (tokens, Aux(selection, lse)))


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What a call would run, and why; print it."""

  layout: TileLayout
  problem: Problem
  chosen: str | None  # on the default device; None: what was asked for cannot run
  elsewhere: dict[str, str]  # what runs on other platforms, if it depends on that; "" is any other
  reasons: dict[str, str | None]  # by implementation: why it cannot run this call, None if it can
  kept_pairs: int  # tile pairs computed, per head
  devices: str

  @property
  def kept_fraction(self) -> float:
    """Tile pairs computed over all tile pairs."""
    return self.kept_pairs / self.layout.num_tiles**2

  def __str__(self) -> str:
    layout = self.layout
    lines = [
      f"{layout.num_tokens} tokens in {layout.num_tiles} tiles of {layout.tile_size}"
      f" ({layout.num_prefix_tiles} prefix"
      f" tiles; video regions of {[stop - start for start, stop in layout.video_spans]} tiles),"
      f" {layout.padded_length - layout.num_tokens} slots of padding",
      f"keeps {self.kept_pairs} of {layout.num_tiles**2} tile pairs per head ({self.kept_fraction:.1%})",
      f"jax {jax.__version__} on {self.devices}",
    ]
    if self.chosen is None:
      lines.append("nothing that was asked for can run this: the call raises NotImplementedError")
    for name, reason in self.reasons.items():
      verdict = (
        "chosen" if name == self.chosen else "can run" if reason is None else f"no: {reason}"
      )
      lines.append(f"  {name:<10} {verdict}")
    for platform, name in self.elsewhere.items():
      lines.append(f"compiled for {platform or 'any other platform'}, it runs {name}")
    return "\n".join(lines)


def explain(
  query: Any,
  key: Any,
  value: Any,
  layout: TileLayout,
  *,
  implementation: str | Implementation | Sequence[str | Implementation] | None = None,
  sharding: jax.sharding.NamedSharding | None = None,
  **arguments: Any,
) -> Explanation:
  """Says which implementation `video_sparse_attention` would run on these arguments, and why no other.

  Args:
    query, key, value: arrays, or jax.ShapeDtypeStruct; so may gate, budget and tile_sizes be.
    layout, implementation, sharding, arguments: as for `video_sparse_attention`.

  Returns:
    An Explanation; `print` it.  Where nothing asked for can run (the call would raise
    NotImplementedError), its `chosen` is None.

  Raises:
    ValueError: as `video_sparse_attention` would.
  """
  arguments.pop("return_aux", None)  # changes nothing
  arrays = {"query": query, "key": key, "value": value, **arguments}
  shapes = {n: x for n, x in arrays.items() if isinstance(x, jax.ShapeDtypeStruct)}
  prepared: Any = None

  def prepare(shapes):
    nonlocal prepared
    prepared = _prepare(layout=layout, **{**arrays, **shapes})

  jax.eval_shape(prepare, shapes)
  options, problem, _ = prepared
  partitioned = placement_of(query, sharding) is None and has_auto_axes(query)
  plan, tiles, prefix = options.plan, layout.num_tiles, layout.num_prefix_tiles
  device = jax.devices()[0]
  chosen, elsewhere = None, {}
  with contextlib.suppress(NotImplementedError):
    found = choose(implementation, problem, partitioned=partitioned)
    if isinstance(found, Automatic):
      elsewhere = {platform: i.name for platform, i in found.branches} | {"": found.default.name}
      elsewhere.pop(platform_of(device), None)
      found = found.on(platform_of(device))
    chosen = found.name
  per_row = tiles if plan.keeps_all else plan.num_prefix_tiles + plan.width
  return Explanation(
    layout=layout,
    problem=problem,
    chosen=chosen,
    elsewhere=elsewhere,
    reasons=survey(implementation, problem),
    kept_pairs=prefix * tiles + (tiles - prefix) * per_row,
    devices=f"{jax.device_count()} x {device.device_kind} ({device.platform})",
  )
