"""The demo's comparison, on held-out frames: before the variants went on, after, and what it costs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import vsa_jax
from vsa_jax import TileLayout
from vsa_jax.demo.clip import Clip
from vsa_jax.demo.training import Variant, example_query, one_time
from vsa_jax.diagnostics import coverage
from vsa_jax.examples.video_dit import rotary_3d

_TIMES = (0.3, 0.5, 0.7, 0.9)  # flow times of the held-out loss
_START = 0.6  # flow time at which the pictures are noised
_EULER_STEPS = 4  # from there back to 0


def compare(
  options: argparse.Namespace,
  clip: Clip,
  layout: TileLayout,
  trained: Variant,
  variants: list[Variant],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """(numbers for JSON, arrays for pictures).

  Args:
    options: the command line.
    clip: its held-out window is what the models are compared on.
    layout: of that window.
    trained: the dense model that the variants started from.
    variants: dense, sparse, sparse + gate.
  """
  from tqdm import tqdm

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
    "steps": {"dense": len(trained.losses), "then each": len(variants[0].losses)},
    "flow_times": {"loss": list(_TIMES), "pictures": _START},
    "euler_steps": _EULER_STEPS,
    "noised_psnr": clip.psnr(at(_START), original),
    "variants": {},
  }
  arrays: dict[str, Any] = {
    "original": original,
    "noised": at(_START),
    "denoised": {},
    "losses": {v.name: v.losses for v in variants},
    "first losses": trained.losses,
  }
  with tqdm(total=len(variants) + 2, desc="comparing on held-out frames", unit="part") as bar:
    references = outputs(trained)
    for variant in variants:
      swapped = dataclasses.replace(variant, params=variant.start)
      velocities = outputs(swapped)
      share_before, _ = _look(variant.model, swapped.params, at(_START), one_time(_START))
      share, mask = _look(variant.model, variant.params, at(_START), one_time(_START))
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
      bar.update()
    report["budgets"] = _sweep(variants[1], layout, at, loss)
    bar.update()
    report["attention"] = _time_attention(options, trained, layout)
    bar.update()
  return report, arrays


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


def _relative(x: np.ndarray, reference: np.ndarray) -> float:
  return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def _denoise(variant: Variant, video: np.ndarray, flow_time: float) -> np.ndarray:
  """Follows the velocity from flow_time to 0 in Euler steps."""
  times = np.linspace(flow_time, 0, _EULER_STEPS + 1)
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
      loss([velocity(params, at(t), one_time(t), jnp.int32(budget)) for t in _TIMES])
      for budget in budgets
    ]
    for name, params in (("swapped in", variant.start), ("trained on", variant.params))
  }
  return {"kept tiles": budgets, "loss": losses, "compilations": len(traces)}


def _time_attention(
  options: argparse.Namespace, trained: Variant, layout: TileLayout
) -> dict[str, Any]:
  """Milliseconds of attention alone, forward and backward: the best of 5, taken in turns."""
  x = example_query(nnx.merge(trained.model, trained.params), layout)
  qkv = [jax.random.normal(key, x.shape) for key in jax.random.split(jax.random.key(0), 3)]

  def ours(sparsity):
    return lambda q, k, v: vsa_jax.video_sparse_attention(
      q, k, v, layout, sparsity=sparsity, implementation=options.implementation
    )

  contenders = {
    "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
    "vsa_jax keeping everything": ours(0.0),
    f"vsa_jax at sparsity {options.sparsity:g}": ours(options.sparsity),
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
  return {"shape": list(x.shape), "ms": best}
