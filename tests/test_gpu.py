"""What needs a CUDA device: the contract of `cuda`, and what only a GPU shows.

JAX_PLATFORMS=cuda,cpu python -m pytest tests/test_gpu.py -n 0
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import relative

from vsa_jax import TileLayout, TileSelection, block_sparse_attention, explain
from vsa_jax.block_sparse.ffi import cuda_devices
from vsa_jax.testing import CASES, ImplementationContract, make_inputs, run

if not cuda_devices():
  pytest.skip("no CUDA device", allow_module_level=True)


class TestCuda(ImplementationContract):
  implementation = "cuda"
  shapes = ((64, 64), (64, 128), (128, 64), (128, 128), (256, 64), (256, 128))
  dtypes = ("bfloat16", "float16")


TILES = [64, 128, 256]
attend = functools.partial(block_sparse_attention, implementation="cuda")


def random_problem(tile_size, *, tiles=24, heads=4, head_dim=128, width=5, batch=1, seed=0):
  """(query, key, value, d_out) in bfloat16, and lists drawn at random."""
  shape = (batch, tiles * tile_size, heads, head_dim)
  keys = jax.random.split(jax.random.key(seed), 4)
  rng = np.random.default_rng(seed)
  ids = rng.permuted(np.broadcast_to(np.arange(tiles), (batch, heads, tiles, tiles)), axis=-1)
  ids = np.sort(ids[..., :width], axis=-1)
  selection = TileSelection(
    jnp.asarray(ids, jnp.int32), jnp.full((batch, heads, tiles), width, jnp.int32)
  )
  return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys], selection


def gradients(implementation, selection, query, key, value, d_out):
  attend = functools.partial(block_sparse_attention, implementation=implementation)
  out, pull = jax.vjp(lambda *x: attend(*x, selection), query, key, value)
  return out, *pull(d_out)


def test_none_takes_it():
  layout = TileLayout([77, (8, 16, 16)], (4, 4, 4))
  x = jax.ShapeDtypeStruct((1, layout.num_tokens, 2, 128), jnp.bfloat16)
  assert explain(x, x, x, layout, sparsity=0.5).chosen == "cuda"
  float32 = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  assert explain(float32, float32, float32, layout, sparsity=0.5).chosen == "xla"


@pytest.mark.parametrize("tile_size", TILES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_repeats(tile_size, head_dim):
  operands, selection = random_problem(tile_size, head_dim=head_dim)
  compute = jax.jit(functools.partial(gradients, "cuda", selection))
  first = compute(*operands)

  @jax.jit
  def differ(a, b):
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16)
    return sum((bits(x) != bits(y)).sum() for x, y in zip(a, b, strict=True))

  assert sum(int(differ(first, compute(*operands))) for _ in range(1000)) == 0


@pytest.mark.parametrize("tile_size", TILES)
def test_mapped_scanned_and_remat(tile_size):
  operands, selection = random_problem(tile_size, batch=3)
  compute = functools.partial(gradients, "cuda")
  want = jax.jit(compute)(selection, *operands)
  one = jax.tree.map(lambda x: x[:, None], (selection, *operands))
  mapped = jax.jit(jax.vmap(compute))(*one)
  _, scanned = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, compute(*x)), 0, xs))(one)
  again = jax.jit(lambda s, *x: jax.checkpoint(functools.partial(compute, s))(*x))
  for a, b, c, d in zip(want, mapped, scanned, again(selection, *operands), strict=True):
    np.testing.assert_array_equal(np.asarray(b[:, 0], np.float32), np.asarray(a, np.float32))
    np.testing.assert_array_equal(np.asarray(c[:, 0], np.float32), np.asarray(a, np.float32))
    np.testing.assert_array_equal(np.asarray(d, np.float32), np.asarray(a, np.float32))


def test_any_backward_serves_any_forward():
  inputs = make_inputs(CASES[3], 64, 128, jnp.bfloat16)
  got, want = run(inputs, "cuda"), run(inputs, "xla")
  for a, b in zip(got, want, strict=True):
    assert (
      relative(np.nan_to_num(np.asarray(a, np.float32)), np.nan_to_num(np.asarray(b, np.float32)))
      < 1e-2
    )


@pytest.mark.parametrize("tile_size", TILES)
def test_I01_offsets_past_2_to_31(tile_size):
  """Heads and tokens whose elements lie past 2**31: the last query tiles, against the same of a short array."""
  heads, head_dim, width = 24, 128, 3
  tiles = (2**31 // (heads * head_dim) // tile_size) + 40
  far = np.arange(tiles - width, tiles)
  query, key, value, d_out = random_problem(tile_size, tiles=12, heads=heads, head_dim=head_dim)[0]
  long = lambda x: (
    jnp.zeros((1, tiles * tile_size, heads, head_dim), x.dtype).at[:, -x.shape[1] :].set(x)
  )
  lists = lambda rows, first: TileSelection(
    jnp.broadcast_to(jnp.asarray(first, jnp.int32), (1, heads, rows, width)),
    jnp.full((1, heads, rows), width, jnp.int32),
  )
  compute = jax.jit(functools.partial(gradients, "cuda"))
  want = compute(lists(12, far - tiles + 12), query, key, value, d_out)
  # Earlier rows list the same tiles with d_out 0: they add nothing to the gradients.
  got = compute(lists(tiles, far), *map(long, (query, key, value, d_out)))
  for name, a, b in zip(("out", "d_query", "d_key", "d_value"), got, want, strict=True):
    a = np.asarray(a[:, -b.shape[1] :], np.float32)
    assert relative(a, np.asarray(b, np.float32)) < 5e-3, name


def test_I06_command_buffers():
  """As part of a CUDA graph: launched again with other data, the results follow it."""
  code = """if True:
    import jax, jax.numpy as jnp, numpy as np, functools, sys
    sys.path.insert(0, "tests")
    from test_gpu import gradients, random_problem
    operands, selection = random_problem(128)
    step = lambda *x: [y * 2 for y in gradients("cuda", selection, *(z + 1 for z in x))]
    graph, plain = jax.jit(step), step
    for scale in (1, 2, 3, 4):
      x = [scale * y for y in operands]
      for a, b in zip(graph(*x), plain(*x)):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2)
    print("same")
  """
  flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
  done = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.strip().endswith("same")
