"""`python -m vsa_jax bench`: what the op costs beside dense attention, on this device.

Everything of a shape is timed in one process, in turn, so that clocks and neighbours hit all alike; see
vsa_jax.bench.timing.  "Per pair" is (time / token pairs computed) over dense attention's (time / all pairs) in
the same run and direction; 1 means that a kept pair costs what a dense pair costs.  What is timed is checked first.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vsa_jax.attention import explain, video_sparse_attention
from vsa_jax.bench.problem import check, exact, noise, random_lists, share_of_loads, smooth
from vsa_jax.bench.shapes import DEFAULTS, SHAPES, Shape
from vsa_jax.bench.timing import Times, in_turn, sustained
from vsa_jax.block_sparse.api import block_sparse_attention
from vsa_jax.layout import TileLayout
from vsa_jax.routing import pool_tiles, routing_scores, select_tiles
from vsa_jax.selection import TileSelection
from vsa_jax.tiling import tile_tokens, untile_tokens

_DATA = {"random": noise, "routed": smooth}
_GROUP = 3  # query tiles of 64 that share loads in the `cuda` kernel


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
    help="one or several, side by side; default: what None chooses, and on a CPU xla",
  )
  parser.add_argument(
    "--data",
    nargs="+",
    choices=_DATA,
    help="random: noise, and lists drawn at random; routed: activations that vary slowly over the video, and"
    " the lists that the router makes of them; default: random, on a GPU both",
  )
  parser.add_argument(
    "--rounds", type=int, help="how often each call is timed; default: 7, on a GPU 1"
  )
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
  options = parser.parse_args(argv)
  platform = jax.devices()[0].platform
  on_gpu = platform == "gpu"
  names = options.shapes or DEFAULTS.get(platform, DEFAULTS["cpu"])
  unknown = [name for name in names if name not in SHAPES]
  if unknown:
    parser.error(f"shapes: got {unknown}, want some of {list(SHAPES)}")
  if options.rounds is not None and options.rounds < 1:
    parser.error("--rounds: want at least 1")
  if options.json and not options.json.absolute().parent.is_dir():
    parser.error(f"--json: got {options.json}, want a file in a folder that exists")
  about = {
    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    "commit": _commit(),
    "jax": jax.__version__,
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
  }
  print("  ".join(f"{k} {v}" for k, v in about.items()))
  data = options.data or (["random", "routed"] if on_gpu else ["random"])
  rows = []
  for name in names:
    rows += bench(name, data, options.implementation, options.rounds or (1 if on_gpu else 7))
  if options.json:
    options.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


class _Part(NamedTuple):
  """Something to time."""

  function: Callable
  args: tuple[Any, ...]
  pairs: float = 0  # token pairs that count, 0: it is no attention
  direction: str = ""  # "fwd", "bwd" or "fwd+bwd": what it is compared with
  loads: float | None = None  # see share_of_loads


def bench(
  name: str, data: list[str], implementations: list[str] | None, rounds: int
) -> list[dict[str, Any]]:
  """Times one shape and prints its rows; implementations None: what None chooses, and on a CPU xla."""
  shape = SHAPES[name]
  layout = TileLayout(shape.segments, shape.tile)
  on_gpu = jax.devices()[0].platform == "gpu"
  packed = noise(shape, layout)
  if implementations is None:
    query, key, value, _ = packed
    best = str(explain(query, key, value, layout, sparsity=shape.sparsity).chosen)
    implementations = [best] if on_gpu else list(dict.fromkeys((best, "xla")))
  fused = on_gpu and shape.dtype != "float32"
  dense = functools.partial(
    jax.nn.dot_product_attention, implementation="cudnn" if fused else "xla"
  )
  parts = {
    f"dense {direction}": _Part(function, args, layout.num_tokens**2, direction)
    for direction, function, args in _directions(dense, packed)
  }
  for kind in data:
    parts |= _parts_of(kind, shape, layout, implementations)
  calls = {part: (each.function, each.args) for part, each in parts.items()}
  times = sustained(calls, rounds) if on_gpu else in_turn(calls, rounds)
  print(
    f"\n{name}: {layout.num_tokens} tokens, {layout.num_tiles} tiles of {layout.tile_size},"
    f" {shape.heads} heads of {shape.head_dim}, {shape.dtype}"
  )
  return [_row(name, shape, part, parts, times) for part in parts]


def _parts_of(
  kind: str, shape: Shape, layout: TileLayout, implementations: list[str]
) -> dict[str, _Part]:
  """What is timed on one kind of data, checked."""
  packed = _DATA[kind](shape, layout)
  tile = jax.jit(lambda *arrays: tuple(tile_tokens(x, layout) for x in arrays))
  untile = jax.jit(lambda *arrays: tuple(untile_tokens(x, layout) for x in arrays))
  tiled = tile(*packed)

  @jax.jit
  def route(query, key):
    scores = routing_scores(pool_tiles(query, layout), pool_tiles(key, layout))
    return select_tiles(scores, layout, sparsity=shape.sparsity)

  routed = route(*tiled[:2])
  lists = random_lists(routed) if kind == "random" else routed
  parts: dict[str, _Part] = {}
  for each in implementations:
    attend = functools.partial(_attend, layout, lists, each)
    out, lse = jax.jit(functools.partial(attend, return_lse=True))(*tiled[:3])
    want = exact(layout, packed, lists, *untile(out, lse))
    shares = each == "cuda" and layout.tile_size == 64
    loads = share_of_loads(lists, _GROUP) if shares else None
    kept = _pairs(lists, layout)
    for direction, function, args in _directions(attend, tiled):
      parts[f"{each}, {kind} lists, {direction}"] = _Part(function, args, kept, direction, loads)
      check(f"{each} {direction}", _named(direction, untile(*_flat(function(*args)))), want)
    del out, lse

    whole = functools.partial(
      video_sparse_attention, layout=layout, sparsity=shape.sparsity, implementation=each
    )
    out, aux = jax.jit(functools.partial(whole, return_aux=True))(*packed[:3])
    want = exact(layout, packed, aux.selection, out, aux.lse)
    kept = _pairs(aux.selection, layout)
    for direction, function, args in _both(whole, packed):
      parts[f"{each}, {kind} data, whole op {direction}"] = _Part(function, args, kept, direction)
      check(f"{each} whole op", _named(direction, _flat(function(*args))), want)
    del out, aux
  parts[f"route, {kind} data"] = _Part(route, tiled[:2])
  if kind == "random":
    parts["tile q, k, v"] = _Part(tile, packed[:3])
  return parts


def _attend(layout, lists, implementation, query, key, value, **options):
  sizes = layout.tile_sizes
  return block_sparse_attention(
    query, key, value, lists, tile_sizes=sizes, implementation=implementation, **options
  )


def _pairs(lists: TileSelection, layout: TileLayout) -> float:
  """Token pairs per head."""
  listed = (
    np.asarray(lists.counts).sum((0, 2)).mean() + lists.indices.shape[2] * lists.num_prefix_tiles
  )
  return float(listed + lists.num_dense_rows * lists.num_key_tiles) * layout.tile_size**2


def _directions(function: Callable, operands: tuple) -> list[tuple[str, Callable, tuple]]:
  """(direction, function, arguments) of the forward alone, and of the backward alone."""
  *inputs, d_out = operands
  _, pull = jax.jit(lambda *inputs: jax.vjp(function, *inputs))(*inputs)
  return [
    ("fwd", jax.jit(function), tuple(inputs)),
    ("bwd", jax.jit(lambda pull, d_out: pull(d_out)), (pull, d_out)),
  ]


def _both(function: Callable, operands: tuple) -> list[tuple[str, Callable, tuple]]:
  """The same of the forward alone, and of both."""

  @jax.jit
  def with_gradient(query, key, value, d_out):
    out, pull = jax.vjp(function, query, key, value)
    return out, *pull(d_out)

  return [("fwd", jax.jit(function), operands[:3]), ("fwd+bwd", with_gradient, operands)]


def _flat(results: Any) -> tuple:
  return results if isinstance(results, tuple) else (results,)


def _named(direction: str, results: tuple) -> dict[str, jax.Array]:
  gradients = ("d_query", "d_key", "d_value")
  names = {"fwd": ("out",), "bwd": gradients, "fwd+bwd": ("out", *gradients)}[direction]
  return dict(zip(names, results, strict=True))


def _row(
  name: str, shape: Shape, part: str, parts: dict[str, _Part], times: dict[str, Times]
) -> dict[str, Any]:
  """Prints a row and returns it."""
  each, time = parts[part], times[part]
  row = {"shape": name, "part": part, **dataclasses.asdict(time)}
  low, high = time.quartiles_ms
  text = f"  {part:<40} {time.ms:9.3f} ms  [{low:.3f}, {high:.3f}]"
  if time.burst_ms is not None:
    text += f"  burst {time.burst_ms:.3f}"
  if each.pairs:
    products = {"fwd": 2, "bwd": 5, "fwd+bwd": 7}[each.direction]
    flops = 2 * products * shape.heads * shape.head_dim * each.pairs
    row["tflops"] = flops / time.ms / 1e9
    text += f"  {row['tflops']:.3g} TFLOP/s"
    if not part.startswith("dense"):
      halves = ["fwd", "bwd"] if each.direction == "fwd+bwd" else [each.direction]
      dense_ms = sum(times[f"dense {half}"].ms for half in halves)
      per_pair = dense_ms / parts["dense fwd"].pairs
      row["ratio_per_pair"] = time.ms / each.pairs / per_pair
      row["speedup"] = dense_ms / time.ms
      row["of_dense"] = 1 / row["ratio_per_pair"]
      text += (
        f"  {row['of_dense']:.2f} of dense's rate ({row['ratio_per_pair']:.2f} per pair),"
        f" {row['speedup']:.2f} x its speed"
      )
  if each.loads is not None:
    row["share_of_loads"] = each.loads
    text += f"  loads {each.loads:.2f}"
  if time.sm_mhz is not None:
    text += f"  {time.sm_mhz:.0f} MHz {time.watts:.0f} W"
  print(text, flush=True)
  return row


def _commit() -> str:
  """The commit of a source checkout, marked when it has changes; "release" elsewhere."""
  package = pathlib.Path(__file__).parents[1]
  if not (package.parent / ".git").exists():  # a repository further up is somebody else's
    return "release"
  try:
    name = subprocess.run(
      ["git", "describe", "--always", "--dirty"],
      cwd=package,
      capture_output=True,
      text=True,
      check=True,
      timeout=10,
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return "release"
  return name
