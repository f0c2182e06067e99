"""tile_tokens, untile_tokens: permutation, adjoint, jaxpr, padding, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import equations, normal

from tests.strategies import layouts
from vsa_jax import TileLayout, tile_tokens, untile_tokens

RAGGED = TileLayout([7, (5, 3, 4), 3, (2, 2, 2)], (4, 2, 2))


@given(layouts(), st.integers(0, 2), st.sampled_from([(), (1,), (3, 2), (0,)]))
def test_slots_and_adjoints(layout, batch, trailing):
  """Tokens lie at their slots; each function is the other's adjoint."""
  x = normal(0, batch, layout.num_tokens, *trailing)
  y = normal(1, batch, layout.padded_length, *trailing)
  tiled = np.zeros(y.shape, np.float32)
  tiled[:, layout.slots] = x

  @jax.jit
  def run(x, y):
    xt, from_tiles = jax.vjp(lambda x: tile_tokens(x, layout), x)
    z, from_tokens = jax.vjp(lambda y: untile_tokens(y, layout), y)
    return xt, z, *from_tiles(y), *from_tokens(x)

  xt, z, adjoint_of_tile, adjoint_of_untile = run(x, y)
  for got in (xt, adjoint_of_untile):
    np.testing.assert_array_equal(got, tiled)
  for got in (z, adjoint_of_tile):
    np.testing.assert_array_equal(got, np.asarray(y)[:, layout.slots])


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float16", "float32", "complex64"])
def test_any_dtype(dtype):
  x = jnp.arange(2 * RAGGED.num_tokens).reshape(2, -1).astype(dtype)
  tiled = tile_tokens(x, RAGGED)
  assert tiled.dtype == x.dtype
  np.testing.assert_array_equal(untile_tokens(tiled, RAGGED), x)


def test_no_gather_or_scatter_in_any_direction():
  x = jnp.ones((2, RAGGED.num_tokens, 3))
  xt = jnp.ones((2, RAGGED.padded_length, 3))
  allowed = {
    "slice",
    "reshape",
    "transpose",
    "pad",
    "concatenate",
    "broadcast_in_dim",
    "add_any",
    "split",
    "jit",
  }
  primitives = lambda jaxpr: {equation.primitive.name for equation in equations(jaxpr)}
  for function, argument, cotangent in (
    (lambda x: tile_tokens(x, RAGGED), x, xt),
    (lambda xt: untile_tokens(xt, RAGGED), xt, x),
  ):
    forward = primitives(jax.make_jaxpr(function)(argument))
    assert {"slice", "reshape"} <= forward, forward
    assert not forward - allowed
    backward = jax.make_jaxpr(lambda c, f=function, a=argument: jax.vjp(f, a)[1](c))(cotangent)
    assert not primitives(backward) - allowed
    for word in ("gather", "scatter", "dynamic"):
      assert word not in jax.jit(function).lower(argument).as_text()


def test_forward_mode():
  x = jnp.arange(2.0 * RAGGED.num_tokens).reshape(2, -1)
  out, tangent = jax.jvp(lambda x: tile_tokens(x, RAGGED), (x,), (2 * x,))
  np.testing.assert_array_equal(tangent, 2 * out)


def test_nan_in_padding_stays_there():
  tiled = tile_tokens(jnp.ones((1, RAGGED.num_tokens)), RAGGED)
  padding = jnp.ones(RAGGED.padded_length, bool).at[RAGGED.slots].set(False)
  poisoned = jnp.where(padding, jnp.nan, tiled)
  assert (untile_tokens(poisoned, RAGGED) == 1).all()
  gradient = jax.grad(lambda x: (untile_tokens(x, RAGGED) ** 2).sum())(poisoned)
  np.testing.assert_array_equal(gradient[0], np.where(padding, 0, 2))


def test_layout_crosses_transforms():
  x = jnp.ones((3, 2, RAGGED.num_tokens))
  roundtrip = jax.checkpoint(lambda x, layout: untile_tokens(tile_tokens(x, layout), layout))
  np.testing.assert_array_equal(jax.vmap(roundtrip, in_axes=(0, None))(x, RAGGED), x)
  carry, _ = jax.lax.scan(lambda c, row: (c, roundtrip(row, c[0])), (RAGGED,), x)
  assert carry == (RAGGED,)


@pytest.mark.parametrize(
  ("function", "shape", "message"),
  [
    (tile_tokens, (2, 66), r"x: got shape \[2, 66\], want \[B, 78, ...\]"),
    (tile_tokens, (78,), "axis 1"),
    (tile_tokens, (), "axis 1"),
    (tile_tokens, (1, 176), "tiled already"),
    (untile_tokens, (1, 78), "tile_tokens first"),
    (untile_tokens, (1, 175), r"want \[B, 176, ...\]"),
  ],
)
def test_wrong_shapes(function, shape, message):
  with pytest.raises(ValueError, match=message):
    function(jnp.zeros(shape), RAGGED)


def test_bare_triple_is_explained():
  with pytest.raises(ValueError, match=r"one video is \[\(4, 4, 4\)\]"):
    tile_tokens(jnp.zeros((1, 64)), TileLayout((4, 4, 4), (2, 2, 2)))


def test_layout_is_needed():
  with pytest.raises(ValueError, match="want a TileLayout"):
    tile_tokens(jnp.zeros((1, 64)), (4, 4, 4))
