"""Flax modules and checkpoints."""

import concurrent.futures

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_oracle import vsa, wide
from running import normal

import vsa_jax.linen
from vsa_jax import TileLayout, VSAAttention, checkpoints
from vsa_jax.block_sparse.choice import IMPLEMENTATIONS

SEGMENTS, TILE = [3, (2, 2, 3)], (1, 2, 2)
LAYOUT = TileLayout(SEGMENTS, TILE)


def _module(implementation=None, **options):
  options = {"tile": TILE, "topk": 1, "rngs": nnx.Rngs(0)} | options
  return VSAAttention(2, 16, implementation=implementation, **options)


def _params(module):
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _perturbed(module, seed=1):
  """The module with every parameter random, its gate too."""
  keys = iter(range(seed, seed + 100))
  fill = lambda x: 0.3 * normal(next(keys), *x.shape, dtype=x.dtype)
  nnx.update(module, jax.tree.map(fill, nnx.state(module, nnx.Param)))
  return module


def _oracle(params, x, *, gated):
  """The module in NumPy."""
  project = lambda name: (
    np.einsum("bld,dnh->blnh", wide(x), wide(params[name]["kernel"]))
    + (wide(params[name]["bias"]) if "bias" in params[name] else 0)
  )
  gate = project("gate") if gated else None
  out = vsa(project("query"), project("key"), project("value"), SEGMENTS, TILE, 1, gate=gate).out
  return np.einsum("blnh,nhd->bld", out, wide(params["out"]["kernel"])) + wide(
    params["out"]["bias"]
  )


def test_K01_missing_parameters(implementation, tmp_path):
  plain, gated = _perturbed(_module(implementation, use_gate=False)), _module(implementation)
  x = normal(10, 1, 15, 16)
  with pytest.raises(ValueError, match=r"missing \['gate/kernel'\].*zero_missing_gates"):
    checkpoints.load_params(gated, _params(plain))
  checkpoints.load_params(gated, _params(plain), zero_missing_gates=True)
  chex.assert_trees_all_equal(gated(x, LAYOUT), plain(x, LAYOUT))
  np.testing.assert_allclose(gated(x, LAYOUT), _oracle(_params(plain), x, gated=False), atol=1e-5)
  # The same through files, and in Linen.
  checkpoints.save(tmp_path / "plain", plain)
  with pytest.raises(ValueError, match="use_gate: saved with False, built with True"):
    checkpoints.restore(tmp_path / "plain", _module(implementation))
  restored = _module(implementation)
  checkpoints.restore(tmp_path / "plain", restored, zero_missing_gates=True)
  chex.assert_trees_all_equal(_params(restored), _params(gated))
  linen = vsa_jax.linen.VSAAttention(2, 16, tile=TILE, topk=1, implementation=implementation)
  with pytest.raises(ValueError, match=r"missing \['gate/kernel'\]"):
    linen.apply({"params": _params(plain)}, x, LAYOUT)


def test_K02_surplus_parameters(implementation):
  gated, plain = _perturbed(_module(implementation)), _module(implementation, use_gate=False)
  before = _params(plain)
  with pytest.raises(ValueError, match=r"surplus \['gate/kernel'\].*use_gate=True"):
    checkpoints.load_params(plain, _params(gated))
  chex.assert_trees_all_equal(_params(plain), before)
  linen = vsa_jax.linen.VSAAttention(
    2, 16, tile=TILE, topk=1, use_gate=False, implementation=implementation
  )
  x = normal(20, 1, 15, 16)
  with pytest.raises(ValueError, match=r"surplus \['gate/kernel'\]"):
    linen.apply({"params": _params(gated)}, x, LAYOUT)
  # Where they belong they count.
  other = _module(implementation, rngs=nnx.Rngs(9))
  checkpoints.load_params(other, _params(gated))
  want = _oracle(_params(gated), x, gated=True)
  np.testing.assert_allclose(other(x, LAYOUT), want, atol=1e-5)
  assert np.abs(want - _oracle(_params(gated), x, gated=False)).max() > 0.1


def test_K03_parameter_dtype(implementation):
  x = normal(30, 1, 15, 16)
  module = _module(implementation, dtype=jnp.bfloat16, normalize_qk=True)
  for parameter in jax.tree.leaves(_params(module)):
    chex.assert_type(parameter, jnp.float32)
  chex.assert_type(module(x, LAYOUT), jnp.bfloat16)
  module = _module(implementation, param_dtype=jnp.bfloat16, normalize_qk=True)
  for parameter in jax.tree.leaves(_params(module)):
    chex.assert_type(parameter, jnp.bfloat16)
  linen = vsa_jax.linen.VSAAttention(
    2, 16, tile=TILE, topk=1, dtype=jnp.bfloat16, implementation=implementation
  )
  y, variables = linen.init_with_output(jax.random.key(0), x, LAYOUT)
  chex.assert_type(y, jnp.bfloat16)
  for parameter in jax.tree.leaves(variables["params"]):
    chex.assert_type(parameter, jnp.float32)


def test_K04_tile_size_mismatch(tmp_path):
  trained = _module(tile=(4, 4, 4))
  assert trained.config["tile"] == [4, 4, 4]
  checkpoints.save(tmp_path / "trained", trained)
  with pytest.raises(ValueError, match=r"tile: saved with \[4, 4, 4\], built with \[4, 8, 4\]"):
    checkpoints.restore(tmp_path / "trained", _module(tile=(4, 8, 4)))
  # A layout of another tile is refused as well.
  layout = TileLayout([(4, 8, 4)], (4, 8, 4))
  with pytest.raises(ValueError, match=r"got tile \(4, 8, 4\), want \(4, 4, 4\)"):
    trained(jnp.zeros((1, 128, 16)), layout)


class _Recording:
  """An implementation under another name that keeps a record of its calls."""

  def __init__(self, inner, name):
    self.inner, self.name, self.calls = inner, name, 0
    self.backward = inner.backward

  def supports(self, problem):
    return self.inner.supports(problem)

  def forward(self, *operands, **options):
    self.calls += 1
    return self.inner.forward(*operands, **options)


def test_K06_global_state():
  recording = [
    _Recording(IMPLEMENTATIONS[name], f"recording {name}") for name in ("xla", "reference")
  ]
  modules = [_perturbed(_module(r)) for r in recording]
  want = _oracle(_params(modules[0]), normal(60, 1, 15, 16), gated=True)

  def call(i):
    # A new shape each time, so that each call is traced and must choose anew.
    x = jnp.tile(normal(60, 1, 15, 16), (i // 2 + 1, 1, 1))
    return np.asarray(modules[i % 2](x, LAYOUT))

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(call, range(4)))
  for y in results:
    np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), atol=1e-5)
  assert [r.calls for r in recording] == [2, 2]
  assert [m.implementation for m in modules] == recording
