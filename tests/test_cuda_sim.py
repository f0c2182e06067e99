"""The CUDA kernels, run by the simulator of xla_ffi/sim: the contract, and that no schedule changes a bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import needs_simulator

from vsa_jax.testing import CASES, Case, ImplementationContract, make_inputs, run

pytestmark = needs_simulator


class TestCudaSim(ImplementationContract):
  implementation = "cuda_sim"
  shapes = ((64, 64), (128, 128))
  dtypes = ("bfloat16",)


class TestOtherShapes(ImplementationContract):
  implementation = "cuda_sim"
  shapes = ((64, 128), (256, 64))
  dtypes = ("float16",)
  cases = (CASES[3], CASES[7])


@pytest.mark.parametrize(("tile_size", "head_dim"), [(64, 128), (128, 128), (256, 128), (128, 64)])
def test_no_schedule_changes_a_bit(tile_size, head_dim):
  """Any order of warps and units, any number of SMs: every sum has one order."""
  import _vsa_jax_ffi

  case = Case(
    "schedule", query_tiles=7, key_tiles=7, width=3, heads=2, kv_heads=1, prefix=1, dense=1
  )
  inputs = make_inputs(case, tile_size, head_dim, jnp.bfloat16)
  want = None
  for seed, processors in enumerate([2, 2, 3, 6]):
    _vsa_jax_ffi.set_simulator(seed=1000 * seed, processors=processors)
    try:
      got = jax.tree.map(np.asarray, run(inputs, "cuda_sim"))
    finally:
      _vsa_jax_ffi.set_simulator(seed=0, processors=4)
    want = got if want is None else want
    for name, a, b in zip(got._fields, got, want, strict=True):
      assert a.tobytes() == b.tobytes(), (name, seed, processors)
