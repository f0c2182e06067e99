"""Memory, compile time, recompiles.  Nothing large is run: programs are traced, lowered or compiled."""

import re
import time
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import equations, normal

from vsa_jax import TileLayout, video_sparse_attention


def _shapes(layout, heads, dim):
  return (jax.ShapeDtypeStruct((1, layout.num_tokens, heads, dim), jnp.bfloat16),) * 4


def _both(layout, **options):
  def both(query, key, value, d_out):
    attend = lambda *x: video_sparse_attention(*x, layout, **options)
    out, vjp = jax.vjp(attend, query, key, value)
    return out, vjp(d_out)

  return jax.jit(both)


def _largest_tensor(text):
  """The most elements of a tensor type in a StableHLO program."""
  shapes = set(re.findall(r"tensor<((?:\d+x)+)", text))
  return max(np.prod([int(n) for n in s.split("x")[:-1]], dtype=np.int64) for s in shapes)


def test_J01_memory_of_masks():
  layout = TileLayout([(21, 30, 52)], (4, 4, 4))
  assert layout.num_tokens == 32_760
  shapes = _shapes(layout, 12, 128)
  lowered = _both(layout, sparsity=0.9, implementation="xla").lower(*shapes)
  operand = layout.padded_length * 12 * 128
  assert _largest_tensor(lowered.as_text()) <= 2 * operand < 32_760**2
  temporary = lowered.compile().memory_analysis().temp_size_in_bytes

  def dense(query, key, value, d_out):
    out, vjp = jax.vjp(jax.nn.dot_product_attention, query, key, value)
    return out, vjp(d_out)

  dense_temporary = jax.jit(dense).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
  assert temporary < 48 * operand  # bytes: copies of the operands, which a CPU widens to float32
  assert temporary < dense_temporary / 4


@pytest.mark.parametrize("gated", [False, True])
def test_J04_compile_time_from_static_metadata(gated):
  layout = TileLayout([77, (21, 45, 80)], (4, 4, 4))
  start = time.monotonic()
  gate = jnp.zeros((), jnp.bfloat16) if gated else None
  lowered = _both(layout, sparsity=0.9, gate=gate).lower(*_shapes(layout, 2, 64))
  assert len(lowered.as_text()) < 500_000
  lowered.compile()
  assert time.monotonic() - start < 60


def test_J04_no_large_constants():
  layout = TileLayout([77, (21, 45, 80)], (4, 4, 4))
  program = jax.make_jaxpr(_both(layout, sparsity=0.9))(*_shapes(layout, 2, 64))
  inner = [e.params["jaxpr"] for e in equations(program) if "jaxpr" in e.params]
  constants = [c for p in (program, *inner) for c in getattr(p, "consts", ())]
  assert sum(np.size(c) for c in constants) <= 2 * layout.num_tiles


class _Batch(NamedTuple):
  query: jax.Array
  layout: TileLayout


@flax.struct.dataclass
class _FlaxBatch:
  query: jax.Array
  layout: TileLayout


def test_J05_recompiles_for_equal_layouts(implementation):
  build = lambda: TileLayout([3, (np.int64(2), 2, 3)], [1, 2, 2])
  assert build() == build()
  assert hash(build()) == hash(build())
  assert build() != TileLayout([3, (2, 2, 3)], (1, 2, 3))
  x = normal(50, 1, 15, 1, 4)
  for make in (_Batch, _FlaxBatch, lambda query, layout: {"query": query, "layout": layout}):
    traces = []

    @jax.jit
    def attend(batch, traces=traces):
      traces.append(1)
      (query,) = jax.tree.leaves(batch)  # a layout is static
      layout = batch["layout"] if isinstance(batch, dict) else batch.layout
      return video_sparse_attention(*[query] * 3, layout, topk=1, implementation=implementation)

    first, second = attend(make(x, build())), attend(make(x, build()))
    np.testing.assert_array_equal(first, second)
    assert len(traces) == 1
  # As an ordinary argument of a jitted function, and as a static one.
  for options in ({}, {"static_argnums": 1}):
    traces = []

    def count(x, layout, traces=traces):
      traces.append(1)
      return x + layout.num_tiles

    count = jax.jit(count, **options)
    count(x, build())
    count(x, build())
    assert len(traces) == 1


def test_J07_compile_time_against_number_of_tiles():
  # 8, 156 and 1,440 tiles: the program does not grow with the pattern.
  sizes = []
  for grid, tiles in [((8, 8, 8), 8), ((12, 16, 52), 156), ((24, 48, 80), 1440)]:
    layout = TileLayout([grid], (4, 4, 4))
    assert layout.num_tiles == tiles
    program = jax.make_jaxpr(_both(layout, sparsity=0.9, implementation="xla"))
    sizes.append(sum(1 for _ in equations(program(*_shapes(layout, 2, 64)))))
  assert max(sizes) < 1.02 * min(sizes)
