"""JAX transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import attention, vsa
from running import equations, normal, qkv

from vsa_jax import TileLayout, TileSelection, block_sparse_attention, video_sparse_attention
from vsa_jax.block_sparse.choice import IMPLEMENTATIONS

SEGMENTS, TILE = [3, (2, 2, 3)], (1, 2, 2)  # 15 tokens in 5 tiles
LAYOUT = TileLayout(SEGMENTS, TILE)


def _attend(implementation, *, topk=1, **options):
  return lambda query, key, value, gate=None: video_sparse_attention(
    query, key, value, LAYOUT, topk=topk, gate=gate, implementation=implementation, **options
  )


@pytest.mark.parametrize("mapped", ["q", "kv", "qkv"])
def test_G01_vmap_with_partial_in_axes(implementation, mapped):
  operands = dict(zip("qkv", qkv(10, 1, 15, 2, 8), strict=True))
  for name in mapped:
    operands[name] = jnp.stack([operands[name], operands[name][:, ::-1] * 0.5])
  axes = tuple(0 if name in mapped else None for name in "qkv")
  d_out = normal(14, 1, 15, 2, 8)

  def gradients(*operands):
    out, vjp = jax.vjp(_attend(implementation), *operands)
    return out, vjp(d_out)

  out, got = jax.jit(jax.vmap(gradients, axes))(*operands.values())
  for i in range(2):
    one = [x[i] if name in mapped else x for name, x in operands.items()]
    want = vsa(*one, SEGMENTS, TILE, 1, d_out=d_out)
    np.testing.assert_allclose(out[i], want.out, atol=2e-6)
    truths = want.fine.d_query, want.fine.d_key, want.fine.d_value
    for gradient, truth in zip(got, truths, strict=True):
      np.testing.assert_allclose(gradient[i], truth, atol=5e-6)


def test_G03_leaked_tracer(implementation):
  # Lists and sizes are traced, scanned over and closed over; gradients go to floats alone.
  query, key, value = qkv(30, 1, 16, 1, 8)
  masks = np.asarray(np.random.default_rng(33).random((2, 1, 1, 4, 4)) < 0.6)
  masks[..., 0] = True
  tables = [jax.jit(TileSelection.from_mask)(m) for m in masks]  # equally wide
  selections = jax.tree.map(lambda *x: jnp.stack(x), *tables)
  sizes = jnp.asarray([[4, 3, 1, 4], [2, 4, 4, 1]])
  d_out = normal(34, *query.shape)

  @jax.jit
  def run(query, key, value, selections, sizes):
    def loss(query, key, value):
      def layer(x, row):
        selection, size = row
        out = block_sparse_attention(
          x, key, value, selection, tile_sizes=size, implementation=implementation
        )
        return out, None

      return (jax.lax.scan(layer, query, (selections, sizes))[0] * d_out).sum()

    with jax.checking_leaks():
      return jax.value_and_grad(loss, argnums=(0, 1, 2))(query, key, value)

  got, gradients = run(query, key, value, selections, sizes)
  x, keeps = query, []
  for mask, size in zip(masks, np.asarray(sizes), strict=True):
    valid = (np.arange(4) < size[:, None]).ravel()
    keeps.append(mask.repeat(4, 2).repeat(4, 3) & valid & valid[:, None])
  first = attention(x, key, value, keeps[0])
  second = attention(first.out, key, value, keeps[1], d_out=d_out)
  np.testing.assert_allclose(got, (second.out * np.asarray(d_out)).sum(), rtol=1e-5)
  back = attention(x, key, value, keeps[0], d_out=second.d_query)
  want = (back.d_query, back.d_key + second.d_key, back.d_value + second.d_value)
  for gradient, truth in zip(gradients, want, strict=True):
    np.testing.assert_allclose(gradient, truth, atol=5e-6)

  # Integer inputs get no gradient: float0, not a wrong number.
  selection = jax.tree.map(lambda x: x[0], selections)
  _, vjp = jax.vjp(
    lambda q, s, z: block_sparse_attention(
      q, key, value, s, tile_sizes=z, implementation=implementation
    ),
    query,
    selection,
    sizes[0],
  )
  for gradient in jax.tree.leaves(vjp(d_out)[1:]):
    assert gradient.dtype == jax.dtypes.float0


@pytest.mark.parametrize("jitted", [False, True])
def test_G05_forward_mode(implementation, jitted):
  query, key, value = qkv(50, 1, 15, 2, 8)
  tangent = normal(53, *query.shape)
  attend = _attend(implementation)
  attend = jax.jit(attend) if jitted else attend

  def tangent_out():
    return jax.jvp(lambda query: attend(query, key, value), (query,), (tangent,))[1]

  def hessian():
    loss = lambda s: (attend(query * s, key, value) ** 2).sum()
    return jax.hessian(loss)(jnp.float32(1.0))

  if IMPLEMENTATIONS[implementation].backward is None:
    step = 1e-5
    shift = lambda h: np.asarray(query, np.float64) + h * np.asarray(tangent, np.float64)
    ahead, behind = (vsa(shift(h), key, value, SEGMENTS, TILE, 1).out for h in (step, -step))
    np.testing.assert_allclose(tangent_out(), (ahead - behind) / (2 * step), atol=5e-6)
    scaled = lambda s: (
      vsa(np.asarray(query, np.float64) * s, key, value, SEGMENTS, TILE, 1).out ** 2
    )
    step = 1e-3
    second = (scaled(1 + step) - 2 * scaled(1) + scaled(1 - step)).sum() / step**2
    np.testing.assert_allclose(hessian(), second, rtol=1e-3)
  else:
    for run in (tangent_out, hessian):
      with pytest.raises(TypeError, match="implementation='reference'"):
        run()


def test_G06_custom_vjp_structure(implementation):
  query, key, value = qkv(60, 1, 15, 2, 8)
  weights = normal(63, *query.shape)

  def loss(query, with_lse):
    out = video_sparse_attention(
      query, key, value, LAYOUT, topk=1, implementation=implementation, return_aux=with_lse
    )
    out, aux = out if with_lse else (out, None)
    return (out * weights).sum(), (out, aux)

  def nested(query, with_lse):
    # A scan over checkpointed calls; the step must have the structure of its carry.
    inner = jax.checkpoint(loss, static_argnums=1)
    step = lambda total, scale: ((total + inner(query * scale, with_lse)[0]), None)
    return jax.lax.scan(step, 0.0, jnp.ones(1))[0], loss(query, with_lse)[1]

  want = vsa(query, key, value, SEGMENTS, TILE, 1, d_out=weights)
  for function, with_lse in [(loss, True), (nested, False), (nested, True)]:
    run = jax.jit(jax.value_and_grad(function, has_aux=True), static_argnums=1)
    (total, (out, aux)), gradient = run(query, with_lse)
    np.testing.assert_allclose(total, (want.out * np.asarray(weights)).sum(), rtol=1e-5)
    np.testing.assert_allclose(out, want.out, atol=2e-6)
    np.testing.assert_allclose(gradient, want.fine.d_query, atol=5e-6)
    if with_lse:
      np.testing.assert_allclose(aux.lse, want.lse, atol=2e-6)


class _Marked:
  """An implementation whose forward leaves a mark in the program."""

  def __init__(self, inner):
    self.inner, self.name = inner, f"marked {inner.name}"

  def supports(self, problem):
    return self.inner.supports(problem)

  def forward(self, query, *operands, **options):
    query = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(query.shape, query.dtype), query)
    return self.inner.forward(query, *operands, **options)

  def backward(self, *operands, **options):
    return self.inner.backward(*operands, **options)


def test_G07_rematerialisation(implementation):
  inner = IMPLEMENTATIONS[implementation]
  query, key, value = qkv(70, 1, 15, 2, 8)
  weights = normal(73, *query.shape)
  out = vsa(query, key, value, SEGMENTS, TILE, 1).out
  want = vsa(query, key, value, SEGMENTS, TILE, 1, d_out=np.asarray(weights) * np.cos(out)).fine
  names = jax.checkpoint_policies.save_only_these_names("vsa_out", "vsa_lse")

  def gradient_of(implementation, options):
    # The sine makes the backward need the output of the attention again.
    attend = _attend(implementation)
    layer = jax.checkpoint(lambda query: jnp.sin(attend(query, key, value)), **options)
    return jax.grad(lambda query: (layer(query) * weights).sum())

  for options, runs in [({}, 2), ({"policy": names}, 1)]:
    gradient = jax.jit(gradient_of(implementation, options))(query)
    np.testing.assert_allclose(gradient, want.d_query, atol=5e-6)
    if (
      inner.backward is not None
    ):  # what JAX differentiates itself has no rule that could name things
      program = jax.make_jaxpr(gradient_of(_Marked(inner), options))(query)
      marks = [e for e in equations(program) if e.primitive.name == "pure_callback"]
      assert len(marks) == runs


def test_G08_closure_over_a_mapped_value(implementation):
  query, key, value = qkv(80, 1, 15, 2, 8)
  gates = normal(83, 3, 1, 15, 2, 8)
  attend = _attend(implementation)
  d_out = normal(84, *query.shape)

  def gradient(gate):
    out, vjp = jax.vjp(lambda gate: attend(query, key, value, gate), gate)
    return out, vjp(d_out)[0]

  for gate, out, d_gate in zip(gates, *jax.jit(jax.vmap(gradient))(gates), strict=True):
    want = vsa(query, key, value, SEGMENTS, TILE, 1, gate=gate)
    np.testing.assert_allclose(out, want.out, atol=2e-6)
    np.testing.assert_allclose(d_gate, np.asarray(d_out) * want.coarse, atol=2e-6)
  scales = jnp.asarray([0.5, 1.0])
  with pytest.raises(ValueError, match="scale: got a traced value, want a static real"):
    jax.vmap(lambda scale: _attend(implementation, scale=scale)(query, key, value))(scales)
  assert "static real > 0" in video_sparse_attention.__doc__


def test_G09_index_padding(implementation):
  query, key, value = qkv(90, 1, 8, 1, 4)
  selections = [
    TileSelection(np.array([[[[0, -1], [0, -1]]]], np.int32), np.ones((1, 1, 2), np.int32)),
    TileSelection(np.array([[[[0, 9], [0, 1]]]], np.int32), np.ones((1, 1, 2), np.int32)),
  ]
  keep = np.repeat([True, False], 4)
  d_out = normal(93, 1, 8, 1, 4)
  want = attention(query, key, value, keep, d_out=d_out)
  operands = query, key.at[:, 4:].set(1e6), value.at[:, 4:].set(1e6)

  @jax.jit
  def both(selection, *operands):
    attend = lambda *x: block_sparse_attention(*x, selection, implementation=implementation)
    out, vjp = jax.vjp(attend, *operands)
    return out, vjp(d_out)

  for selection in selections:
    out, (d_query, d_key, d_value) = both(selection, *operands)
    np.testing.assert_allclose(out, want.out, atol=2e-6)
    np.testing.assert_allclose(d_query, want.d_query, atol=2e-6)
    np.testing.assert_allclose(d_value[:, :4], want.d_value[:, :4], atol=2e-6)
    np.testing.assert_array_equal(d_key[:, 4:], 0.0)
    np.testing.assert_array_equal(d_value[:, 4:], 0.0)
  # Known values are checked, and these are legal: what lies past a count is never read.
  out = block_sparse_attention(*operands, selections[0], implementation=implementation)
  np.testing.assert_allclose(out, want.out, atol=2e-6)
