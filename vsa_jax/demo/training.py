"""The demo's training: one dense model, then three that go on from its weights, step by step in turns."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from vsa_jax import TileLayout
from vsa_jax.checkpoints import load_params
from vsa_jax.demo.clip import PATCH, Clip
from vsa_jax.examples.video_dit import VideoDiT

_RATE = 2e-3
# Flattened: one vector compiles faster than many arrays.
_ADAM = optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99)))


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
    """The model's output for a video [1, T, Y, X, 3]."""
    return np.asarray(_velocity(self.model, self.params, video, one_time(flow_time)))


def build(options: argparse.Namespace, *, sparsity: float, use_gate: bool) -> VideoDiT:
  """A model with new weights."""
  return VideoDiT(
    patch=PATCH,
    depth=options.depth,
    sparsity=sparsity,
    use_gate=use_gate,
    implementation=options.implementation,
    rngs=nnx.Rngs(options.seed),
  )


def example_query(model: VideoDiT, layout: TileLayout) -> jax.ShapeDtypeStruct:
  """Shape and dtype of the queries, keys and values of a model."""
  attention = model.blocks.attention
  shape = (1, layout.num_tokens, attention.num_heads, attention.head_dim)
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def one_time(flow_time: float) -> np.ndarray:
  """The flow time of a batch of one."""
  return np.full(1, flow_time, np.float32)


def train(
  options: argparse.Namespace, clip: Clip, dense: VideoDiT, start: float
) -> tuple[Variant, list[Variant]]:
  """(the dense model, trained; the three variants that went on from it).

  Args:
    options: the command line.
    clip: what to train on.
    dense: the model before the first step.
    start: when the demo started, by time.perf_counter.
  """
  from tqdm import tqdm

  costs = []
  for variant in tqdm(_swap(options, dense), desc="compiling the training steps", unit="model"):
    for step in range(3):  # thrown away: the first compiles, the others tell what a step costs
      variant.step(_batch(options, clip, step), 0.0)
    costs.append(min(variant.seconds[1:]))

  now = time.perf_counter()
  # The comparison compiles about as much as was compiled until here.
  end = start + options.seconds - max(0.3 * options.seconds, now - start)
  both = 2 * costs[0] + sum(costs)  # two dense steps, then one of each
  first = options.steps or 2 * int(np.clip((end - now) / both, 4, 500))
  pause = now + (end - now) * 2 * costs[0] / both
  trained = Variant.of("dense", dense)
  with tqdm(total=first + 3 * (first // 2), unit="step", mininterval=0.5) as bar:
    bar.set_description("training dense")
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
    bar.set_description(f"training {' | '.join(v.name for v in variants)}")
    for step in range(then):
      # In turns, so that whatever else the machine does falls on all alike.
      rate = _RATE * min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / then)) / 2
      batch = _batch(options, clip, first + step)
      losses = []
      for variant in variants:
        losses.append(f"{variant.step(batch, rate):.3f}")
        bar.update()
      bar.set_postfix(loss=" | ".join(losses), refresh=False)
  return trained, variants


def _swap(options: argparse.Namespace, trained: VideoDiT) -> list[Variant]:
  """Three models with the weights of the dense one; a gate that they lack starts at zero."""
  variants = []
  for name, sparsity, use_gate in (
    ("dense", 0.0, False),
    ("sparse", options.sparsity, False),
    ("sparse + gate", options.sparsity, True),
  ):
    model = build(options, sparsity=sparsity, use_gate=use_gate)
    weights = nnx.to_pure_dict(nnx.state(trained, nnx.Param))
    load_params(model, weights, zero_missing_gates=use_gate)
    variants.append(Variant.of(name, model))
  return variants


def _batch(options: argparse.Namespace, clip: Clip, step: int) -> tuple[Any, ...]:
  """(clean [1, T, Y, X, 3], flow time, noise): the same for whoever takes that step."""
  rng = np.random.default_rng([options.seed, step])
  clean = clip.window(int(rng.integers(clip.num_train - clip.span + 1)))
  flow_time = np.float32(0.3 + 0.7 * (step * 0.618034 % 1))  # spread evenly over any run of steps
  return clean, flow_time, rng.standard_normal(clean.shape, dtype=np.float32)


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
