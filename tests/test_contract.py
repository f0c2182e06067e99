"""The contract of vsa_jax.testing, for every implementation of this version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vsa_jax.testing import CASES, ImplementationContract, Results, make_inputs, run, run_reference


class TestXla(ImplementationContract):
  implementation = "xla"
  shapes = ((4, 8), (1, 3))


class TestReference(ImplementationContract):
  implementation = "reference"
  dtypes = ("float32",)
  # It multiplies by zero what the others never touch.
  test_unkept_tiles_never_matter = None


class _Borrowed:
  """A user's own implementation: the xla one under another name, its calls counted."""

  name = "borrowed"

  def __init__(self):
    from vsa_jax.block_sparse.xla import Xla

    self.inner, self.calls = Xla(), 0

  def supports(self, problem):
    return (
      None if problem.head_dim % 8 == 0 else f"head_dim {problem.head_dim} is not a multiple of 8"
    )

  def forward(self, *args, **kwargs):
    self.calls += 1
    return self.inner.forward(*args, **kwargs)

  def backward(self, *args, **kwargs):
    return self.inner.backward(*args, **kwargs)


class TestOwnObject(ImplementationContract):
  implementation = _Borrowed()
  dtypes = ("float32",)
  cases = CASES[:4]

  def test_it_runs_what_it_was_given(self):
    mine = _Borrowed()
    run(self.inputs(), mine)
    assert mine.calls

  def test_a_refusal_says_why(self):
    inputs = make_inputs(CASES[0], 4, 12, jnp.float32)
    with pytest.raises(NotImplementedError, match=r"head_dim 12 is not a multiple of 8.*'xla'"):
      run(inputs, _Borrowed())
    assert run(inputs, ("cuda", _Borrowed(), "xla")).out.shape == inputs.query.shape


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_float64(case):
  with jax.enable_x64(True):
    inputs = make_inputs(case, 4, 8, jnp.float64)
    got, want = run(inputs, "xla"), run_reference(inputs)
    for name, a, b in zip(Results._fields, got, want, strict=True):
      assert a.dtype == jnp.float64
      np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12, atol=1e-12, err_msg=name)
