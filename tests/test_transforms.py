"""The whole op and the block-sparse op under JAX's transforms; export; retracing; messages."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import vsa_jax
from vsa_jax import TileLayout, block_sparse_attention, video_sparse_attention
from vsa_jax.testing import Case, make_inputs

LAYOUT = TileLayout([3, (3, 3, 4)], (2, 2, 2))
NAMES = ("query", "key", "value", "gate")


def make(seed=0, batch=2, dtype=jnp.float32, layout=LAYOUT):
  rng = np.random.default_rng(seed)
  shape = (batch, layout.num_tokens, 2, 4)
  return {n: jnp.asarray(rng.standard_normal(shape), dtype) for n in (*NAMES, "weight")}


def attend(query, key, value, gate, layout=LAYOUT, **options):
  return video_sparse_attention(query, key, value, layout, topk=2, gate=gate, **options)


def loss(arrays, **options):
  out = attend(*(arrays[n] for n in NAMES), **options)
  return (out * arrays["weight"]).sum()


def test_vmap_over_everything():
  several = [make(seed) for seed in range(3)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *several)
  alone = jax.jit(jax.value_and_grad(loss))
  values, gradients = jax.jit(jax.vmap(jax.value_and_grad(loss)))(stacked)
  for i, s in enumerate(several):
    value, gradient = alone(s)
    np.testing.assert_allclose(values[i], value, rtol=1e-5)
    for n in gradient:
      np.testing.assert_allclose(gradients[n][i], gradient[n], atol=2e-6)


def test_vmap_over_budget_and_sizes():
  arrays = make()
  budgets = jnp.asarray([1, 2])
  sizes = jnp.stack(
    [jnp.asarray(LAYOUT.tile_sizes), jnp.maximum(jnp.asarray(LAYOUT.tile_sizes) - 1, 0)]
  )
  run = lambda budget, sizes: loss(arrays, budget=budget, tile_sizes=sizes)
  got = jax.vmap(run)(budgets, sizes)
  want = [run(b, s) for b, s in zip(budgets, sizes, strict=True)]
  np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scan_over_layers_under_remat(dtype):
  arrays = make(dtype=dtype)
  scales = jnp.asarray([0.5, 1.5], dtype)

  def layer(x, scale):
    return x + attend(x * scale, x, arrays["value"], arrays["gate"]), None

  def scanned(x):
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, scales)
    return (x * arrays["weight"]).sum()

  def looped(x):
    for scale in scales:
      x, _ = layer(x, scale)
    return (x * arrays["weight"]).sum()

  got, want = (jax.jit(jax.grad(f))(arrays["query"]) for f in (scanned, looped))
  assert got.dtype == dtype
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  ulps = 1 if dtype == jnp.bfloat16 else 2  # of the largest
  atol = ulps * float(jnp.finfo(dtype).eps) * np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_forward_mode_of_the_block_sparse_op_names_what_has_it():
  inputs = make_inputs(Case("plain"), 4, 8, jnp.float32)
  attend = lambda q: block_sparse_attention(q, inputs.key, inputs.value, inputs.selection)
  for function in (attend, jax.jit(attend)):
    with pytest.raises(TypeError, match="implementation='reference'"):
      jax.jvp(function, (inputs.query,), (inputs.query,))


def test_export_round_trip():
  arrays = make()

  def both(arrays, layout):
    return jax.value_and_grad(lambda a: loss(a, layout=layout))(arrays)

  exported = jax.export.export(jax.jit(both), disabled_checks=vsa_jax.EXPORT_CHECKS)(arrays, LAYOUT)
  loaded = jax.export.deserialize(exported.serialize())
  got = loaded.call(arrays, LAYOUT)
  for a, b in zip(
    jax.tree.leaves(got), jax.tree.leaves(jax.jit(both)(arrays, LAYOUT)), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_export_of_a_selection():
  inputs = make_inputs(Case("prefix", prefix=1, dense=1), 4, 8, jnp.float32)
  f = jax.jit(lambda q, k, v, s: block_sparse_attention(q, k, v, s))
  exported = jax.export.export(f, disabled_checks=vsa_jax.EXPORT_CHECKS)(*inputs[:4])
  got = jax.export.deserialize(exported.serialize()).call(*inputs[:4])
  np.testing.assert_array_equal(got, f(*inputs[:4]))


def test_export_for_several_platforms():
  arrays = make()
  exported = jax.export.export(
    jax.jit(jax.grad(loss)),
    platforms=["cpu", "cuda", "rocm", "tpu"],
    disabled_checks=vsa_jax.EXPORT_CHECKS,
  )(arrays)
  want = jax.jit(jax.grad(loss))(arrays)["query"]
  np.testing.assert_allclose(exported.call(arrays)["query"], want, atol=1e-6)


def test_no_memory_of_values():
  """Equal shapes, other values and equal layouts built anew: one trace, eager calls included."""
  traces = []

  class Counting(vsa_jax.block_sparse.xla.Xla):
    def forward(self, *args, **kwargs):
      traces.append(1)
      return super().forward(*args, **kwargs)

  counting = Counting()
  for seed in range(3):
    layout = TileLayout(list(LAYOUT.segments), list(LAYOUT.tile))
    attend(*(make(seed)[n] for n in NAMES), layout=layout, implementation=counting)
  assert len(traces) == 1


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_export_of_a_symbolic_batch(implementation):
  (batch,) = jax.export.symbolic_shape("batch")
  shape = jax.ShapeDtypeStruct((batch, LAYOUT.num_tokens, 2, 4), jnp.float32)
  run = jax.jit(functools.partial(attend, implementation=implementation, return_aux=True))
  export = jax.export.export(run, disabled_checks=vsa_jax.EXPORT_CHECKS)
  data = export(shape, shape, shape, shape).serialize()
  arrays = [make(batch=3)[n] for n in NAMES]
  got, aux = jax.export.deserialize(data).call(*arrays)
  assert isinstance(aux, vsa_jax.Aux)
  np.testing.assert_array_equal(got, run(*arrays)[0])
