"""tile_tokens, untile_tokens: permutation, adjoint, jaxpr, padding, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import layouts
from vsa_jax import TileLayout, tile_tokens, untile_tokens

RAGGED = TileLayout([7, (5, 3, 4), 3, (2, 2, 2)], (4, 2, 2))


@given(layouts(), st.integers(0, 2), st.sampled_from([(), (1,), (3, 2), (0,)]))
def test_places_tokens_at_their_slots(layout, batch, trailing):
  x = np.arange(1.0, 1 + batch * layout.num_tokens * int(np.prod(trailing)))
  x = x.reshape(batch, layout.num_tokens, *trailing)
  want = np.zeros((batch, layout.padded_length, *trailing))
  want[:, layout.slots] = x
  tiled = tile_tokens(jnp.asarray(x), layout)
  np.testing.assert_array_equal(tiled, want)
  np.testing.assert_array_equal(untile_tokens(tiled, layout), x)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float16", "float32", "complex64"])
def test_any_dtype(dtype):
  x = jnp.arange(2 * RAGGED.num_tokens).reshape(2, -1).astype(dtype)
  tiled = tile_tokens(x, RAGGED)
  assert tiled.dtype == x.dtype
  np.testing.assert_array_equal(untile_tokens(tiled, RAGGED), x)


def primitives(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name
    for value in eqn.params.values():
      inner = getattr(value, "jaxpr", None)
      if inner is not None:
        yield from primitives(getattr(inner, "jaxpr", inner))


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
  for function, argument, cotangent in (
    (lambda x: tile_tokens(x, RAGGED), x, xt),
    (lambda xt: untile_tokens(xt, RAGGED), xt, x),
  ):
    forward = set(primitives(jax.make_jaxpr(function)(argument).jaxpr))
    assert {"slice", "reshape"} <= forward, forward
    assert not forward - allowed
    backward = jax.make_jaxpr(lambda c, f=function, a=argument: jax.vjp(f, a)[1](c))(cotangent)
    assert not set(primitives(backward.jaxpr)) - allowed
    for word in ("gather", "scatter", "dynamic"):
      assert word not in jax.jit(function).lower(argument).as_text()


@given(layouts())
def test_each_is_the_others_adjoint(layout):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((1, layout.num_tokens)), jnp.float32)
  y = jnp.asarray(rng.standard_normal((1, layout.padded_length)), jnp.float32)

  @jax.jit
  def both(x, y):
    (from_tiles,) = jax.vjp(lambda x: tile_tokens(x, layout), x)[1](y)
    (from_tokens,) = jax.vjp(lambda y: untile_tokens(y, layout), y)[1](x)
    return (from_tiles, untile_tokens(y, layout)), (from_tokens, tile_tokens(x, layout))

  for got, want in both(x, y):
    np.testing.assert_array_equal(got, want)


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
