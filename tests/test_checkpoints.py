"""Saving and restoring: what is on disk, what a model takes, what is refused."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vsa_jax import VSAAttention, checkpoints


def build(seed=0, **options):
  options = {"tile": (2, 2, 2), "sparsity": 0.5, "use_bias": False} | options
  return VSAAttention(4, 8, **options, rngs=nnx.Rngs(seed))


def params(model):
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
  "budget",
  [
    {"sparsity": np.float32(0.9)},
    {"sparsity": None, "topk": np.int64(2)},
    {"sparsity": np.array([0.5, 0.25])},
  ],
)
def test_budgets_of_numpy_types_are_saved_as_numbers(tmp_path, budget):
  model = build(**budget)
  checkpoints.save(tmp_path / "c", model)
  config = json.loads((tmp_path / "c" / "vsa_config.json").read_text())["config"][""]
  assert config == model.config
  other = build(1, **budget)
  checkpoints.restore(tmp_path / "c", other)
  chex.assert_trees_all_equal(params(other), params(model))


def test_a_sharded_model_is_restored_on_one_device_and_back(tmp_path):
  mesh = jax.make_mesh((4,), ("h",), axis_types=(jax.sharding.AxisType.Auto,))
  sharded, alone = build(0), build(1)
  for name in ("query", "key", "value", "gate"):
    kernel = getattr(sharded, name).kernel
    kernel[...] = jax.device_put(kernel[...], NamedSharding(mesh, P(None, "h")))
  checkpoints.save(tmp_path / "sharded", sharded)
  checkpoints.restore(tmp_path / "sharded", alone)
  chex.assert_trees_all_equal(params(alone), params(sharded))
  assert len(alone.query.kernel[...].sharding.device_set) == 1
  alone.query.kernel[...] = alone.query.kernel[...] + 1
  checkpoints.save(tmp_path / "alone", alone)
  checkpoints.restore(tmp_path / "alone", sharded)
  chex.assert_trees_all_equal(params(sharded), params(alone))
  assert sharded.query.kernel[...].sharding.spec == P(None, "h")


def test_missing_gates_are_zero_but_not_a_layer_called_gate(tmp_path):
  class Model(nnx.Module):
    def __init__(self, use_gate, own_gate, rngs):
      self.attention = VSAAttention(2, 4, tile=(2, 2, 2), use_gate=use_gate, rngs=rngs)
      self.gate = nnx.Linear(4, 4, rngs=rngs) if own_gate else None

  old = Model(use_gate=False, own_gate=True, rngs=nnx.Rngs(0))
  checkpoints.save(tmp_path / "old", old)
  new = Model(use_gate=True, own_gate=True, rngs=nnx.Rngs(1))
  new.attention.gate.kernel[...] = jnp.ones_like(new.attention.gate.kernel[...])
  checkpoints.restore(tmp_path / "old", new, zero_missing_gates=True)
  assert not new.attention.gate.kernel[...].any()
  chex.assert_trees_all_equal(params(new.gate), params(old.gate))

  checkpoints.save(tmp_path / "none", Model(use_gate=False, own_gate=False, rngs=nnx.Rngs(0)))
  with pytest.raises(ValueError, match=r"missing \['gate/bias', 'gate/kernel'\]; want"):
    checkpoints.restore(tmp_path / "none", new, zero_missing_gates=True)


def test_what_is_no_checkpoint(tmp_path):
  with pytest.raises(
    ValueError, match=r"path: got .* want a directory that vsa_jax.checkpoints.save wrote"
  ):
    checkpoints.restore(tmp_path / "nothing", build())
  checkpoints.save(tmp_path / "c", build())
  with pytest.raises(ValueError, match="which holds a checkpoint; want a new directory"):
    checkpoints.save(tmp_path / "c", build())
  (tmp_path / "c" / "vsa_config.json").write_text("{")
  with pytest.raises(ValueError, match=r"no whole vsa_config.json there"):
    checkpoints.restore(tmp_path / "c", build())


def test_the_models_dtype_stays(tmp_path):
  checkpoints.save(tmp_path / "c", build(param_dtype=jnp.bfloat16))
  model = build(1)
  checkpoints.restore(tmp_path / "c", model)
  assert {x.dtype for x in jax.tree.leaves(params(model))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("thing", [{"a": 1}, nnx.Dropout(0.1)])
def test_what_is_no_model(tmp_path, thing):
  with pytest.raises(ValueError, match=r"model: got .*, want a Flax NNX module with parameters"):
    checkpoints.save(tmp_path / "c", thing)
