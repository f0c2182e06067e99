"""LSE, scale, dtype, precision."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import attention, vsa
from running import assert_same_bits, column, normal, qkv, relative, with_gradients

from vsa_jax import TileLayout, TileSelection, block_sparse_attention, video_sparse_attention

RAGGED = TileLayout([(1, 1, 5)], (1, 1, 4))
# Query, key, value of F13.
F13 = ([1, 1, 1, 1, 2], [0, 0, 0, 0, np.log(3)], [0, 0, 0, 0, 4])


def test_F01_lse_base(implementation):
  zero, one = jnp.zeros((1, 8, 1, 1)), jnp.ones((1, 8, 1, 1))
  selection = TileSelection.from_mask(np.ones((1, 1, 2, 2), bool))
  _, lse = block_sparse_attention(
    zero,
    zero,
    one,
    selection,
    tile_sizes=np.array([4, 1]),
    implementation=implementation,
    return_lse=True,
  )
  np.testing.assert_allclose(lse[0, :5].ravel(), [1.609438] * 5, atol=1e-6)
  np.testing.assert_array_equal(lse[0, 5:], -np.inf)


@pytest.mark.parametrize(("scale", "want"), [(None, 0.804430), (1.0, 0.880797), (0.25, 0.622459)])
def test_F03_scale_ignored(implementation, scale, want):
  layout = TileLayout([(1, 1, 2)], (1, 1, 2))
  query = jnp.asarray([[2.0, 0.0]] * 2)[None, :, None]
  key = jnp.asarray([[1.0, 0.0], [0.0, 0.0]])[None, :, None]
  value = jnp.asarray([[1.0, 1.0], [0.0, 0.0]])[None, :, None]
  options = {"scale": scale, "implementation": implementation}
  out = video_sparse_attention(query, key, value, layout, topk=1, **options)
  np.testing.assert_allclose(out.ravel(), [want] * 4, atol=1e-6)
  selection = TileSelection.from_mask(np.ones((1, 1, 1, 1), bool))
  out = block_sparse_attention(query, key, value, selection, **options)
  np.testing.assert_allclose(out.ravel(), [want] * 4, atol=1e-6)


def test_F03_scale_of_routing_and_coarse_branch(implementation):
  query, key, value = (column(*x) for x in F13)
  attend = lambda query, scale: video_sparse_attention(
    query,
    key,
    value,
    RAGGED,
    topk=1,
    gate=jnp.ones_like(query),
    scale=scale,
    implementation=implementation,
  )
  np.testing.assert_allclose(attend(query, 0.25), attend(query * 0.25, 1.0), rtol=1e-6)


@pytest.mark.parametrize("topk", [1, 2])  # 2: all tiles
def test_F05_half_precision_mask_constant(implementation, topk):
  query, key, value = qkv(50, 1, 5, 2, 8, dtype=jnp.float16)
  d_out = normal(53, 1, 5, 2, 8, dtype=jnp.float16)
  out, gradients = with_gradients(
    lambda *x: video_sparse_attention(*x, RAGGED, topk=topk, implementation=implementation),
    d_out,
    query,
    key,
    value,
  )
  want = vsa(query, key, value, [(1, 1, 5)], (1, 1, 4), topk, d_out=d_out)
  chex.assert_tree_all_finite((out, gradients))
  truths = (want.out, want.fine.d_query, want.fine.d_key, want.fine.d_value)
  for got, truth in zip((out, *gradients), truths, strict=True):
    chex.assert_type(got, jnp.float16)
    np.testing.assert_allclose(got.astype(jnp.float32), truth, atol=2**-9 * np.abs(truth).max())


def test_F06_half_precision_overflow(implementation):
  layout = TileLayout([(2, 1, 4)], (1, 1, 4))
  big = jnp.full((1, 8, 1, 128), 300.0, jnp.float16)
  assert 128 * 300**2 * 128**-0.5 > 65504
  value = normal(60, *big.shape, dtype=jnp.float16)
  out, gradients = with_gradients(
    lambda *x: video_sparse_attention(
      *x, layout, topk=2, gate=jnp.zeros(()), implementation=implementation
    ),
    jnp.ones_like(big),
    big,
    big,
    value,
  )
  mean = np.asarray(value, np.float64).mean(1, keepdims=True)
  np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=2**-10)
  chex.assert_tree_all_finite(gradients)


def test_F08_dtype_promotion(implementation):
  query, key, value = qkv(80, 1, 5, 1, 64, dtype=jnp.bfloat16)
  attend = lambda scale: video_sparse_attention(
    query, key, value, RAGGED, topk=1, scale=scale, implementation=implementation
  )
  for scale in (1 / np.sqrt(64), np.float64(0.125), np.float32(0.125), np.array(0.125)):
    out = attend(scale)
    chex.assert_type(out, jnp.bfloat16)
    chex.assert_trees_all_equal(out, attend(0.125))
  out = video_sparse_attention(
    query,
    key,
    value,
    RAGGED,
    sparsity=np.float64(0.5),
    gate=np.ones((1, 5, 1, 1), np.float64),
    implementation=implementation,
  )
  chex.assert_type(out, jnp.bfloat16)


def test_F09_x64_mode(implementation):
  layout = TileLayout([3, (1, 3, 6)], (1, 2, 4))
  operands = qkv(90, 1, 21, 2, 8)
  gate, d_out = normal(93, *operands[0].shape), normal(94, *operands[0].shape)

  def run():
    def attend(query, key, value, gate):
      out, aux = video_sparse_attention(
        query,
        key,
        value,
        layout,
        topk=2,
        gate=gate,
        implementation=implementation,
        return_aux=True,
      )
      return out, (aux.lse, aux.selection.indices, aux.selection.counts)

    def both(*operands):
      out, vjp, aux = jax.vjp(attend, *operands, has_aux=True)
      return out, aux, vjp(d_out), block_table(*aux[1:])

    out, (lse, indices, counts), gradients, others = jax.jit(both)(*operands, gate)
    return (out, lse, *gradients), (indices, counts, *others)

  def block_table(indices, counts):
    selection = TileSelection(indices, counts, 1, num_key_tiles=layout.num_tiles)
    return (*selection.transposed(), *selection.to_q2k())

  floats, tables = run()
  with jax.enable_x64(True):
    floats_x64, tables_x64 = run()
  for x in floats_x64:
    chex.assert_type(x, jnp.float32)
  for x in (*tables, *tables_x64):
    chex.assert_type(x, jnp.int32)
  chex.assert_trees_all_close(floats_x64, floats, atol=2e-6)
  chex.assert_trees_all_equal(tables_x64, tables)


def test_F09_x64_arrays(implementation):
  """With float64 operands everything is float64 and right to 13 digits."""
  layout = TileLayout([3, (1, 3, 6)], (1, 2, 4))
  with jax.enable_x64(True):
    operands = qkv(90, 1, 21, 2, 8, dtype=jnp.float64)
    d_out = normal(94, 1, 21, 2, 8, dtype=jnp.float64)
    out, gradients = with_gradients(
      lambda *x: video_sparse_attention(*x, layout, topk=2, implementation=implementation),
      d_out,
      *operands,
    )
  want = vsa(*operands, [3, (1, 3, 6)], (1, 2, 4), 2, d_out=d_out)
  truths = (want.out, want.fine.d_query, want.fine.d_key, want.fine.d_value)
  for got, truth in zip((out, *gradients), truths, strict=True):
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, truth, atol=1e-13)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST, None])
def test_F10_tf32(implementation, precision):
  layout = TileLayout([(4, 8, 8)], (4, 4, 4))
  query, key, value = qkv(100, 1, 256, 1, 64)
  with jax.default_matmul_precision("default"):  # conftest.py raises it on a GPU
    out = video_sparse_attention(
      query, key, value, layout, topk=2, precision=precision, implementation=implementation
    )
  want = vsa(query, key, value, [(4, 8, 8)], (4, 4, 4), 2).out
  # TF32 has 10 bits of fraction.  A CPU has no TF32, and `reference` never uses it.
  tf32 = precision is None and implementation != "reference" and jax.default_backend() == "gpu"
  assert np.abs(out - want).max() < (2**-10 * np.abs(want).max() if tf32 else 2e-6)
  assert "TF32" in block_sparse_attention.__doc__


@pytest.mark.parametrize(
  ("dtype", "gate_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)]
)
def test_F11_mixed_dtypes(implementation, dtype, gate_dtype):
  operands = qkv(110, 1, 5, 2, 8, dtype=dtype)
  gate = normal(113, 1, 5, 2, 8, dtype=gate_dtype)
  d_out = normal(114, 1, 5, 2, 8, dtype=dtype)

  def attend(query, key, value, gate):
    return video_sparse_attention(
      query, key, value, RAGGED, topk=1, gate=gate, implementation=implementation
    )

  out, gradients = with_gradients(attend, d_out, *operands, gate)
  chex.assert_type(out, dtype)
  for gradient, operand in zip(gradients, (*operands, gate), strict=True):
    chex.assert_type(gradient, operand.dtype)
    chex.assert_tree_all_finite(gradient)
  want = vsa(*operands, [(1, 1, 5)], (1, 1, 4), 1, gate=gate)
  assert relative(out, want.out) < (5e-3 if dtype == jnp.bfloat16 else 1e-6)
  d_gate = np.asarray(d_out, np.float64) * want.coarse
  assert relative(gradients[3], d_gate) < (5e-3 if gate_dtype == jnp.bfloat16 else 1e-6)
  with pytest.raises(ValueError, match="key: got float16"):
    attend(operands[0], operands[1].astype(jnp.float16), operands[2], gate)


def test_F12_gradient_dtype(implementation):
  query, key, value = qkv(120, 1, 5, 1, 8, dtype=jnp.bfloat16)
  d_out = normal(123, 1, 5, 1, 8, dtype=jnp.bfloat16)

  def layers(query, key, value, gains):
    def layer(x, gain):
      out = video_sparse_attention(x, key, value, RAGGED, topk=1, implementation=implementation)
      return x + out * gain, None

    return jax.lax.scan(layer, query, gains)[0]

  _, gradients = with_gradients(layers, d_out, query, key, value, jnp.ones((2, 1), jnp.bfloat16))
  for gradient in gradients:
    chex.assert_type(gradient, jnp.bfloat16)
    assert np.asarray(gradient, np.float32).any()


def test_F13_coarse_branch_and_gate(implementation):
  query, key, value = (column(*x) for x in F13)
  attend = jax.jit(
    lambda gate: video_sparse_attention(
      query, key, value, RAGGED, topk=2, scale=1.0, gate=gate, implementation=implementation
    )
  )
  fine, half, one = [1.714286] * 4 + [2.769231], [3.214286] * 4 + [4.569231], [3, 3, 3, 3, 3.6]
  np.testing.assert_allclose(attend(None).ravel(), fine, rtol=3e-7)
  np.testing.assert_allclose(attend(None), attention(query, key, value, scale=1.0).out, rtol=3e-7)
  assert_same_bits(attend(jnp.zeros_like(query)), attend(None))
  np.testing.assert_allclose(attend(jnp.full_like(query, 0.5)).ravel(), half, rtol=3e-7)
  coarse = attend(jnp.ones_like(query)) - attend(None)
  np.testing.assert_allclose(coarse.ravel(), one, rtol=5e-7)
