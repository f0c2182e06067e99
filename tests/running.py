"""How the tests make inputs, run things and look at programs."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vsa_jax import TileSelection, tile_tokens, untile_tokens
from vsa_jax.block_sparse import ffi
from vsa_jax.block_sparse.base import Problem
from vsa_jax.block_sparse.choice import IMPLEMENTATIONS

# Without a compiler there are no kernels, and what is about them alone cannot run.
IS_BUILT = ffi.is_built()
needs_kernels = pytest.mark.skipif(not IS_BUILT, reason="the compiled part is not installed")
needs_simulator = pytest.mark.skipif(
  not (IS_BUILT and ffi._compiled.build_facts()["has_simulator"]),
  reason="built without the simulator",
)
# What implementation=None takes on a CPU.
CPU_DEFAULT = "cpu" if IS_BUILT else "xla"

# Those that run small float32 problems here: all but the kernels of GPUs, and what was not built.
RUN_HERE = [
  name
  for name, i in IMPLEMENTATIONS.items()
  if i.supports(Problem(jnp.dtype("float32"), 1, 1, 1, 8, 4, 4, 4, 1)) is None
  and (name != "cpu" or jax.default_backend() == "cpu")
]

# One program each, where op by op would compile a dozen.
tile = jax.jit(tile_tokens)
untile = jax.jit(untile_tokens)
to_mask = jax.jit(TileSelection.to_mask)


def normal(seed, *shape, dtype=jnp.float32):
  """Random numbers, the same on every run."""
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(seed, batch, tokens, heads, dim, *, kv_heads=None, dtype=jnp.float32):
  """Random query, key and value."""
  shape = (batch, tokens, heads if kv_heads is None else kv_heads, dim)
  return (
    normal(seed, batch, tokens, heads, dim, dtype=dtype),
    normal(seed + 1, *shape, dtype=dtype),
    normal(seed + 2, *shape, dtype=dtype),
  )


def column(*values, heads=1, dtype=jnp.float32):
  """One token per value: [1, L, heads, 1]."""
  x = jnp.asarray(values, dtype)[None, :, None, None]
  return jnp.broadcast_to(x, (1, len(values), heads, 1))


def both(attend):
  """(results, gradients) as one jitted function of cotangent and operands."""

  def run(cotangent, *operands):
    results, vjp = jax.vjp(attend, *operands)
    return results, vjp(cotangent)

  return jax.jit(run)


def with_gradients(attend, cotangent, *operands):
  """(results, gradients) of attend(*operands)."""
  return both(attend)(cotangent, *operands)


def relative(got, want):
  """|got - want| / |want|, in the 2-norm."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def assert_same_bits(got, want):
  """Equal, and -0.0 is not 0.0."""
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def pretend_gpu(monkeypatch, capability="9.0", **facts):
  """As if CUDA kernels had been built, and a GPU were here; calls can be lowered, not run."""
  facts = {"has_cuda": True, "has_simulator": True, "cuda": "sm_90a", "jaxlib": "0.10.2", **facts}
  compiled = types.SimpleNamespace(
    build_facts=lambda: facts,
    cuda_workspaces=lambda dtype, batch, *_: (4, 1000 * batch),
    registrations=dict,
  )
  device = types.SimpleNamespace(device_kind="NVIDIA X", compute_capability=capability)
  monkeypatch.setattr(ffi, "_compiled", compiled)
  monkeypatch.setattr(ffi, "cuda_devices", lambda: [device])


def collectives(compiled):
  """The collectives of a compiled program."""
  names = r"all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter"
  return re.findall(rf"\b({names})(?:-start)?\(", compiled.as_text())


def equations(jaxpr):
  """All equations of a jaxpr, those inside others included."""
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  for equation in jaxpr.eqns:
    yield equation
    for parameter in jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_jaxpr):
      if _is_jaxpr(parameter):
        yield from equations(parameter)


def _is_jaxpr(x):
  return hasattr(getattr(x, "jaxpr", x), "eqns")
