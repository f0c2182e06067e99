"""The CUDA kernels, run by the simulator of xla_ffi/sim: the contract, and that no schedule changes a bit."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import needs_simulator

from vsa_jax import block_sparse_attention
from vsa_jax.testing import CASES, Case, ImplementationContract, make_inputs, run

pytestmark = needs_simulator

HOPPER, BLACKWELL = 9, 10


@contextlib.contextmanager
def simulated(major, seed=0, processors=4):
  """The simulator as it is set here."""
  import _vsa_jax_ffi

  _vsa_jax_ffi.set_simulator(seed=seed, processors=processors, major=major)
  try:
    yield
  finally:
    _vsa_jax_ffi.set_simulator(seed=0, processors=4)


@pytest.fixture
def hopper():
  with simulated(HOPPER):
    yield


@pytest.fixture
def blackwell():
  with simulated(BLACKWELL):
    yield


@pytest.mark.usefixtures("hopper")
class TestHopper(ImplementationContract):
  implementation = "cuda_sim"
  shapes = ((64, 64), (128, 128))
  dtypes = ("bfloat16",)


@pytest.mark.usefixtures("hopper")
class TestHopperOtherShapes(ImplementationContract):
  implementation = "cuda_sim"
  shapes = ((64, 128), (256, 64))
  dtypes = ("float16",)
  cases = (CASES[3], CASES[7])


@pytest.mark.usefixtures("blackwell")
class TestBlackwell(ImplementationContract):
  implementation = "cuda_sim"
  shapes = ((128, 128),)
  dtypes = ("bfloat16", "float16")


@pytest.mark.parametrize(
  ("major", "tile_size", "head_dim"),
  [(9, 64, 128), (9, 128, 128), (9, 256, 128), (9, 128, 64), (10, 128, 128)],
)
def test_no_schedule_changes_a_bit(major, tile_size, head_dim):
  """Any order of warps and units, any number of SMs: every sum has one order."""
  case = Case(
    "schedule", query_tiles=7, key_tiles=7, width=3, heads=2, kv_heads=1, prefix=1, dense=1
  )
  inputs = make_inputs(case, tile_size, head_dim, jnp.bfloat16)
  want = None
  for seed, processors in enumerate([2, 2, 3, 6]):
    with simulated(major, 1000 * seed, processors):
      got = jax.tree.map(np.asarray, run(inputs, "cuda_sim"))
    want = got if want is None else want
    for name, a, b in zip(got._fields, got, want, strict=True):
      assert a.tobytes() == b.tobytes(), (name, seed, processors)


@pytest.mark.parametrize("seed", range(50))
def test_blackwell_under_many_schedules(seed):
  """A random problem a seed: counts, ragged tiles, odd numbers of query tiles, prefix, GQA, empty rows."""
  rng = np.random.default_rng(seed)
  tiles, keys = (int(n) for n in rng.integers(1, 9, 2))
  prefix, groups = int(rng.integers(0, keys + 1)), int(rng.integers(1, 3))
  case = Case(
    f"random{seed}",
    query_tiles=tiles,
    key_tiles=keys,
    heads=groups,
    kv_heads=1,
    prefix=prefix,
    dense=int(rng.integers(0, tiles + 1)),
    width=int(rng.integers(0, keys - prefix + 1)),
    ragged=bool(rng.integers(2)),
  )
  inputs = make_inputs(case, 128, 128, jnp.bfloat16)
  arguments = (*inputs[:4],)
  options = {
    "tile_sizes": inputs.tile_sizes,
    "query_tile_sizes": inputs.query_tile_sizes,
    "return_lse": True,
  }
  with simulated(BLACKWELL, seed=100 * seed, processors=int(rng.integers(2, 6))):
    out, lse = block_sparse_attention(*arguments, implementation="cuda_sim", **options)
    out = np.asarray(out, np.float32)
  wide = (x.astype(jnp.float32) for x in inputs[:3])
  want, want_lse = block_sparse_attention(*wide, inputs.selection, implementation="xla", **options)
  np.testing.assert_allclose(out, want, rtol=0.02, atol=0.02)
  np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)
