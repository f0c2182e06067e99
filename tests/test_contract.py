"""The contract of vsa_jax.testing, for every implementation of this version."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import needs_kernels

from vsa_jax import TileSelection, block_sparse_attention
from vsa_jax.testing import (
  CASES,
  Case,
  ImplementationContract,
  Results,
  assert_close,
  make_inputs,
  run,
  run_reference,
  run_twin,
)


class TestXla(ImplementationContract):
  implementation = "xla"
  shapes = ((4, 8), (1, 3))


@needs_kernels
class TestCpu(ImplementationContract):
  implementation = "cpu"
  shapes = ((4, 8), (1, 3), (64, 16), (80, 72))  # one query, and more than one block of 64


class TestReference(ImplementationContract):
  implementation = "reference"
  dtypes = ("float32",)
  # It multiplies by zero what the others never touch.
  test_unkept_tiles_never_matter = None


class TestXlaInBfloat16First(ImplementationContract):
  """As a kernel of 16 bits alone is tested."""

  implementation = "xla"
  dtypes = ("bfloat16",)
  cases = CASES[:2]


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


EXACT = ["xla", pytest.param("cpu", marks=needs_kernels)]


@pytest.mark.parametrize("implementation", EXACT)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(case, implementation):
  with jax.enable_x64(True):
    inputs = make_inputs(case, 4, 8, jnp.float64)
    got, want = run(inputs, implementation), run_reference(inputs)
    for name, a, b in zip(Results._fields, got, want, strict=True):
      assert a.dtype == jnp.float64
      np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12, atol=1e-12, err_msg=name)


# One shape, so one program: 4 lists of 3 entries over 5 key tiles, of which tile 0 is the prefix.
LISTS = make_inputs(Case("lists", prefix=1, dense=1), 4, 8, jnp.float32)._replace(
  tile_sizes=np.array([[3, 4, 1, 0, 2]]), query_tile_sizes=np.array([[4, 2, 4, 0, 3]])
)
ANY = [*range(-3, 9), 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("implementation", EXACT)
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_any_traced_table(implementation, seed, share):
  """Counts clip to [0, W], an id out of range keeps no key, a duplicate counts twice."""
  rng, shape = np.random.default_rng(seed), LISTS.selection.indices.shape
  legal = rng.random(shape) < share
  ids = np.where(legal, rng.integers(1, 5, shape), rng.choice(ANY, shape)).astype(np.int32)
  counts = rng.integers(-2, 7, shape[:3], dtype=np.int32)
  clean = np.full_like(ids, 5)
  kept = np.zeros_like(counts)
  for at in np.ndindex(counts.shape):
    row = [i for i in ids[at][: max(0, counts[at])] if 1 <= i < 5]
    kept[at] = len(row)
    clean[at][: len(row)] = row
  with_table = lambda ids, counts: LISTS._replace(
    selection=dataclasses.replace(
      LISTS.selection, indices=jnp.asarray(ids), counts=jnp.asarray(counts)
    )
  )
  cleaned = with_table(clean, kept)
  got = run(with_table(ids, counts), implementation)
  want, twin = run_reference(cleaned), run_twin(cleaned)
  for name, a, r, t in zip(Results._fields, got, want, twin, strict=True):
    assert_close(a, r, t, name=name)


def test_what_an_implementation_returns_is_checked():
  class Wrong(_Borrowed):
    name = "wrong"

    def forward(self, *args, **kwargs):
      out, lse = self.inner.forward(*args, **kwargs)
      return out, lse[..., None]

    def backward(self, *args, **kwargs):
      return self.inner.backward(*args, **kwargs)[:2]

  inputs = make_inputs(CASES[0], 4, 8, jnp.float32)
  with pytest.raises(
    ValueError, match=r"'wrong'.forward returned .*float32\[1, 2, 20, 1\]'\], want"
  ):
    run(inputs, Wrong())
  Wrong.forward = _Borrowed.forward
  with pytest.raises(ValueError, match=r"'wrong'.backward returned .*, want"):
    run(inputs, Wrong())
  with pytest.raises(ValueError, match=r"got the class Wrong, want an object: Wrong\(\)"):
    run(inputs, Wrong)


@pytest.mark.parametrize("implementation", EXACT)
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e8])
def test_gradients_at_large_logits(implementation, scale):
  """The backward makes its logits as the forward did: the LSE fits no others."""
  inputs = make_inputs(Case("plain", 3, 4, width=2, counts="full"), 16, 16, jnp.float32)
  got, want = run(inputs, implementation, scale=scale), run_reference(inputs, scale=scale)
  for name, a, b in zip(Results._fields, got, want, strict=True):
    assert np.abs(np.asarray(a) - b).max() <= 5e-5 * np.abs(b).max(), name


@pytest.mark.parametrize("implementation", ["reference", *EXACT])
@pytest.mark.parametrize(
  ("ids", "counts", "keeps"),
  [(2**32 + 1, 1, False), (1, 2**32, True), (1, 2**31, True), (1, -(2**32) + 1, False)],
)
def test_wide_traced_tables_do_not_wrap(implementation, ids, counts, keeps):
  with jax.enable_x64(True):
    x = jnp.ones((1, 8, 1, 4), jnp.float32)
    table = np.full((1, 1, 2, 1), ids, np.int64), np.full((1, 1, 2), counts, np.int64)

    @jax.jit
    def lse(ids, counts):
      return block_sparse_attention(
        x, x, x, TileSelection(ids, counts), implementation=implementation, return_lse=True
      )[1]

    assert (np.asarray(lse(*table)) > -np.inf).all() == keeps


@pytest.mark.parametrize("implementation", ["reference", *EXACT])
def test_narrow_traced_sizes(implementation):
  x = jnp.ones((1, 400, 1, 4), jnp.float32)
  selection = TileSelection(np.array([[[[0], [1]]]], np.int32), np.ones((1, 1, 2), np.int32))

  @jax.jit
  def lse(sizes):
    return block_sparse_attention(
      x, x, x, selection, tile_sizes=sizes, implementation=implementation, return_lse=True
    )[1]

  np.testing.assert_array_equal(
    lse(np.array([100, 50], np.int8)), lse(np.array([100, 50], np.int32))
  )


@pytest.mark.parametrize("implementation", ["reference", *EXACT])
def test_second_derivative_of_a_row_without_keys(implementation):
  x = jnp.ones((1, 4, 1, 2), jnp.float32)
  selection = TileSelection(np.zeros((1, 1, 2, 1), np.int32), np.array([[[1, 0]]], np.int32))
  attend = lambda q: block_sparse_attention(q, x, x, selection, implementation=implementation)
  first = jax.grad(lambda q: (attend(q) ** 2).sum())
  assert np.isfinite(jax.grad(lambda q: (first(q) ** 2).sum())(x)).all()
