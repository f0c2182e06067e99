"""`python -m vsa_jax bench`: what the op costs beside dense attention, on this device.

All candidates of a shape run in one process, round after round in turn, so that clocks and neighbours
hit them alike.  Times are wall clock around a finished call; medians and quartiles over the rounds.
The ratio is per token pair: (time / pairs computed) over dense attention's (time / all pairs) in the
same run; 1 means that a kept pair costs what a dense pair costs.  What is timed is checked first.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vsa_jax.attention import explain, video_sparse_attention
from vsa_jax.block_sparse.api import block_sparse_attention
from vsa_jax.layout import TileLayout
from vsa_jax.routing import pool_tiles, routing_scores, select_tiles
from vsa_jax.tiling import tile_tokens, untile_tokens


@dataclasses.dataclass(frozen=True)
class Shape:
  """One problem to time."""

  segments: tuple[Any, ...]
  tile: tuple[int, int, int]
  sparsity: float
  heads: int
  head_dim: int
  dtype: str


SHAPES = {
  # For CPUs.
  "small-64": Shape(((8, 16, 16),), (4, 4, 4), 0.75, 2, 64, "float32"),
  "small-128": Shape(((8, 16, 16),), (4, 4, 4), 0.75, 2, 128, "float32"),
  "medium-64": Shape(((8, 32, 32),), (4, 4, 4), 0.875, 2, 64, "float32"),
  "medium-128": Shape(((8, 32, 32),), (4, 4, 4), 0.875, 2, 128, "float32"),
  "prefix": Shape((150, (8, 16, 16)), (4, 4, 4), 0.75, 2, 128, "float32"),
  # Rules 1.8, for GPUs.
  "wan-480p": Shape(((21, 30, 52),), (4, 4, 4), 0.9, 12, 128, "bfloat16"),
  "wan-720p": Shape(((21, 45, 80),), (4, 4, 4), 0.9, 12, 128, "bfloat16"),
  "paper": Shape(((16, 32, 32),), (4, 4, 4), 0.875, 12, 64, "bfloat16"),
}
_DEFAULT = {"cpu": ("small-64", "small-128", "medium-128", "prefix")}


def main(argv: list[str]) -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m vsa_jax bench", description=__doc__.split("\n\n")[0]
  )
  parser.add_argument(
    "shapes", nargs="*", help=f"of {', '.join(SHAPES)}; default: those for this device"
  )
  parser.add_argument(
    "--implementation",
    nargs="+",
    metavar="NAME",
    help="one or several, side by side; default: what None chooses, and xla",
  )
  parser.add_argument("--rounds", type=int, default=7, help="times each call is timed; default: 7")
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
  options = parser.parse_args(argv)
  platform = jax.devices()[0].platform
  names = options.shapes or _DEFAULT.get(platform, ("paper", "wan-480p"))
  unknown = [name for name in names if name not in SHAPES]
  if unknown or options.rounds < 1:
    parser.error(
      f"shapes: got {unknown}, want some of {list(SHAPES)}"
      if unknown
      else "--rounds: want at least 1"
    )
  if options.json and not options.json.absolute().parent.is_dir():
    parser.error(f"--json: got {options.json}, want a file in a folder that exists")
  about = {
    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    "commit": _commit(),
    "jax": jax.__version__,
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
  }
  print("  ".join(f"{k} {v}" for k, v in about.items()))
  rows = [row for name in names for row in bench(name, options.implementation, options.rounds)]
  if options.json:
    options.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


def bench(name: str, implementations: list[str] | None, rounds: int) -> list[dict[str, Any]]:
  """Times one shape and prints its rows; implementations None: what None chooses, and xla."""
  shape = SHAPES[name]
  layout = TileLayout(shape.segments, shape.tile)
  length, batch = layout.num_tokens, 1
  rng = np.random.default_rng(0)
  size = (batch, length, shape.heads, shape.head_dim)
  query, key, value, d_out = (jnp.asarray(rng.standard_normal(size), shape.dtype) for _ in range(4))

  tile = jax.jit(lambda *arrays: tuple(tile_tokens(x, layout) for x in arrays))
  packed = (query, key, value, d_out)
  tiled = tile(*packed)

  @jax.jit
  def route(query, key):
    scores = routing_scores(pool_tiles(query, layout), pool_tiles(key, layout))
    return select_tiles(scores, layout, sparsity=shape.sparsity)

  if implementations is None:
    best = str(explain(query, key, value, layout, sparsity=shape.sparsity).chosen)
    implementations = list(dict.fromkeys((best, "xla")))

  def whole(query, key, value, implementation, **options):
    return video_sparse_attention(
      query, key, value, layout, sparsity=shape.sparsity, implementation=implementation, **options
    )

  first = functools.partial(whole, implementation=implementations[0], return_aux=True)
  out, aux = jax.jit(first)(*packed[:3])
  selection = aux.selection

  def sparse(query, key, value, implementation):
    sizes = layout.tile_sizes
    return block_sparse_attention(
      query, key, value, selection, tile_sizes=sizes, implementation=implementation
    )

  fused = jax.devices()[0].platform == "gpu" and shape.dtype != "float32"
  dense = functools.partial(
    jax.nn.dot_product_attention, implementation="cudnn" if fused else "xla"
  )

  kept = float(np.asarray(selection.to_mask()).mean()) * layout.padded_length**2
  parts: dict[str, tuple[Callable, tuple, float]] = {
    "dense fwd": (jax.jit(dense), packed[:3], length**2),
    "dense fwd+bwd": (_with_gradient(dense), packed, length**2),
  }
  for each in implementations:
    alone = functools.partial(sparse, implementation=each)
    with_routing = functools.partial(whole, implementation=each)
    parts |= {
      f"{each} fwd": (jax.jit(alone), tiled[:3], kept),
      f"{each} fwd+bwd": (_with_gradient(alone), tiled, kept),
      f"{each} whole op fwd": (jax.jit(with_routing), packed[:3], kept),
      f"{each} whole op fwd+bwd": (_with_gradient(with_routing), packed, kept),
    }
  untile = jax.jit(lambda *arrays: [untile_tokens(x, layout) for x in arrays])
  want = _exact(layout, packed, selection.to_mask(), out, aux.lse)
  for part, (function, args, _) in parts.items():
    if part.endswith("bwd") and not part.startswith("dense"):
      out, gradients = function(*args)
      results = (out, *gradients)
      _check(part, untile(*results) if args is tiled else results, want)
  parts |= {"route": (route, tiled[:2], 0), "tile q, k, v": (tile, packed[:3], 0)}
  times = _in_turn({part: (f, args) for part, (f, args, _) in parts.items()}, rounds)
  print(
    f"\n{name}: {layout.num_tokens} tokens, {layout.num_tiles} tiles of {layout.tile_size},"
    f" {shape.heads} heads of {shape.head_dim}, {shape.dtype}, {kept / layout.padded_length**2:.1%} of pairs kept"
  )
  rows = []
  for part, (_, _, pairs) in parts.items():
    low, median, high = np.percentile(times[part], (25, 50, 75))
    row = {"shape": name, "part": part, "ms": median, "quartiles_ms": [low, high]}
    base = part.split("fwd")[-1] if "fwd" in part else None
    text = f"  {part:<24} {median:9.2f} ms  [{low:.2f}, {high:.2f}]"
    if base is not None and not part.startswith("dense"):
      dense_ms = float(np.median(times[f"dense fwd{base}"]))
      row["ratio_per_pair"] = (median / pairs) / (dense_ms / length**2)
      row["speedup"] = dense_ms / median
      text += (
        f"   {row['ratio_per_pair']:.2f} x dense per pair, {row['speedup']:.2f} x dense's speed"
      )
    print(text)
    rows.append(row)
  return rows


def _with_gradient(function: Callable) -> Callable:
  def both(query, key, value, d_out):
    out, vjp = jax.vjp(function, query, key, value)
    return out, vjp(d_out)

  return jax.jit(both)


def _check(part: str, results: Any, want: Any) -> None:
  """What is timed against `_exact`, by the norm of the error over the norm of the truth.

  A key tile lost by every query tile is an error of about 0.1, a row tile lost is one of about 1.
  """
  tokens = _sample(results[0].shape[1])
  for name, got, truth in zip(("out", "d_query", "d_key", "d_value"), results, want, strict=True):
    allowed = 1e-5 if got.dtype == jnp.float32 else 1e-2
    got, truth = (np.asarray(x, np.float64) for x in (got[:, tokens], truth))
    error = np.linalg.norm(got - truth) / np.linalg.norm(truth)
    if not error <= allowed:
      raise AssertionError(
        f"numerics: {name} of {part}: relative error {error:.2g}, allowed {allowed}"
      )


def _sample(length: int) -> np.ndarray:
  return np.linspace(0, length - 1, 64).astype(int)


@functools.partial(jax.jit, static_argnums=0)
def _exact(
  layout: TileLayout, operands: Any, mask: jax.Array, out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, ...]:
  """(out, d_query, d_key, d_value) at a sample of tokens: dense masked attention, full float32.

  A key's gradients have a part of every query token; those take the LSE and the output of the op, which
  the sample has shown to be right: mask bool [B, N, J, J], out [B, L, N, H], lse [B, L, N].
  """
  query, key, value, d_out = (x.astype(jnp.float32) for x in operands)
  tokens, tile_of = _sample(layout.num_tokens), layout.slots // layout.tile_size

  def gradients(queries, keys, out=None, lse=None):
    dot = functools.partial(jnp.einsum, precision="highest")
    scale = query.shape[-1] ** -0.5
    q, d, k, v = query[:, queries], d_out[:, queries], key[:, keys], value[:, keys]
    kept = mask[:, :, tile_of[queries]][..., tile_of[keys]]
    logits = jnp.where(kept, dot("bqnh,bknh->bnqk", q, k) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1) if lse is None else jnp.moveaxis(lse, 1, 2)
    weights = jnp.exp(logits - lse[..., None])
    out = dot("bnqk,bknh->bqnh", weights, v) if out is None else out.astype(jnp.float32)
    delta = jnp.moveaxis((out * d).sum(-1), 1, 2)
    d_logits = weights * (dot("bqnh,bknh->bnqk", d, v) - delta[..., None]) * scale
    d_query, d_key = dot("bnqk,bknh->bqnh", d_logits, k), dot("bnqk,bqnh->bknh", d_logits, q)
    return out, d_query, d_key, dot("bnqk,bqnh->bknh", weights, d)

  everything = np.arange(layout.num_tokens)
  return *gradients(tokens, everything)[:2], *gradients(everything, tokens, out, lse)[2:]


def _in_turn(calls: dict[str, tuple[Callable, tuple]], rounds: int) -> dict[str, np.ndarray]:
  """Milliseconds of each call, one after the other in every round."""
  times: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, (function, args) in calls.items():
      # Untimed first: it compiles, and what ran before (dense attention's gigabytes) leaves memory cold.
      jax.block_until_ready(function(*args))
      start = time.perf_counter()
      jax.block_until_ready(function(*args))
      times[name].append(1e3 * (time.perf_counter() - start))
  return {name: np.array(t) for name, t in times.items()}


def _commit() -> str:
  """The commit of a source checkout, marked when it has changes; "release" elsewhere."""
  here = pathlib.Path(__file__).parent
  if not (here.parent / ".git").exists():  # a repository further up is somebody else's
    return "release"
  try:
    name = subprocess.run(
      ["git", "describe", "--always", "--dirty"],
      cwd=here,
      capture_output=True,
      text=True,
      check=True,
      timeout=10,
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return "release"
  return name
