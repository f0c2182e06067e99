"""Launch limits, large indices, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import vsa
from running import equations, normal, qkv

from vsa_jax import TileLayout, video_sparse_attention


def _largest_array(layout, heads, dim, implementation, **options):
  """The most elements of any array in the program of output and gradients; nothing is computed."""
  x = jax.ShapeDtypeStruct((1, layout.num_tokens, heads, dim), jnp.bfloat16)

  def both(query, key, value, d_out):
    out, vjp = jax.vjp(
      lambda *x: video_sparse_attention(*x, layout, implementation=implementation, **options),
      query,
      key,
      value,
    )
    return out, vjp(d_out)

  program = jax.make_jaxpr(both)(x, x, x, x)
  return max(
    np.prod(variable.aval.shape, dtype=np.int64)
    for equation in equations(program)
    for variable in equation.outvars
    if hasattr(variable.aval, "shape")
  )


def test_I03_int32_overflow_of_a_square_table():
  # 46,341**2 is past int32: no table of that shape exists, and slots themselves are checked.
  layout = TileLayout([(46_341, 1, 1)], (1, 1, 1))
  assert layout.num_tiles == 46_341
  assert _largest_array(layout, 1, 8, "xla", topk=4) < 2**27
  with pytest.raises(ValueError, match="2147483648 slots"):
    TileLayout([(2**20, 2**11, 1)], (1, 1, 1))
  assert TileLayout([2**31 - 64], (4, 4, 4)).padded_length == 2**31 - 64


def test_I04_cuda_grid_limit(implementation):
  # 65,536 batch-heads, as in the report, of 4 tokens instead of 64.
  layout = TileLayout([(2, 1, 2)], (1, 1, 2))
  zero, value = jnp.zeros((2048, 4, 32, 2)), normal(40, 2048, 4, 32, 2)
  out = video_sparse_attention(zero, zero, value, layout, topk=2, implementation=implementation)
  want = np.broadcast_to(np.asarray(value, np.float64).mean(1, keepdims=True), out.shape)
  np.testing.assert_allclose(out, want, atol=1e-6)


def test_I05_very_long_sequence():
  # 4,194,304 tokens in 65,536 tiles: a table of all pairs would be 17 GB.
  layout = TileLayout([(256, 128, 128)], (4, 4, 4))
  assert (layout.num_tokens, layout.num_tiles) == (4_194_304, 65_536)
  largest = _largest_array(layout, 1, 16, "xla", topk=1, gate=jnp.zeros((), jnp.bfloat16))
  assert largest <= 2 * layout.num_tokens * 16  # nothing much larger than an operand
  assert 4 * largest <= 2**30


def test_I08_wrong_device(implementation):
  layout = TileLayout([3, (2, 2, 3)], (1, 2, 2))
  operands = qkv(80, 1, 15, 2, 8)
  want = vsa(*operands, layout.segments, layout.tile, 1).out
  attend = jax.jit(
    lambda *x: video_sparse_attention(*x, layout, topk=1, implementation=implementation)
  )
  results = [(d, attend(*jax.device_put(operands, d))) for d in jax.devices()[1::-1]]
  for device, out in results:
    assert out.devices() == {device}
    np.testing.assert_allclose(out, want, atol=2e-6)
