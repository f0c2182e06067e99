"""Backward."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import attention, cut, vsa, wide
from running import assert_same_bits, both, column, normal, qkv, relative, tile, with_gradients

from vsa_jax import (
  TileLayout,
  TileSelection,
  block_sparse_attention,
  video_sparse_attention,
)


def _fine_gradients(attention):
  return attention.d_query, attention.d_key, attention.d_value


@pytest.mark.parametrize("valid", [1, 5, 32])
def test_E01_padding_in_the_backward(implementation, valid):
  # All real logits are -30: a padded key that slipped through the mask would weigh exp(0 - lse).
  layout = TileLayout([(3, 1, valid)], (1, 1, 64))
  tokens = layout.num_tokens
  query, key = jnp.zeros((1, tokens, 1, 16)), jnp.zeros((1, tokens, 1, 16))
  query, key = query.at[..., 0].set(10.0), key.at[..., 0].set(-12.0)
  value, d_out = normal(10, 1, tokens, 1, 16), normal(11, 1, tokens, 1, 16)
  out, gradients = with_gradients(
    lambda *x: video_sparse_attention(*x, layout, topk=2, implementation=implementation),
    d_out,
    query,
    key,
    value,
  )
  want = vsa(query, key, value, [(3, 1, valid)], (1, 1, 64), 2, d_out=d_out)
  np.testing.assert_allclose(want.lse, np.log(2 * valid) - 30, rtol=1e-12)
  np.testing.assert_allclose(out, want.out, atol=5e-6)
  for got, truth in zip(gradients, _fine_gradients(want.fine), strict=True):
    np.testing.assert_allclose(got, truth, atol=2e-5 * max(1, np.abs(truth).max()))


@pytest.mark.parametrize(
  ("grid", "tile", "tiles"),
  [((4, 4, 20), (4, 4, 4), 5), ((5, 7, 26), (1, 1, 2), 455)],  # 455: as of (20, 28, 52)
  ids=["5", "455"],
)
def test_E03_zero_gradient_for_odd_tile_counts(implementation, grid, tile, tiles):
  layout = TileLayout([grid], tile)
  assert layout.num_tiles == tiles
  query, key, value = qkv(30, 1, layout.num_tokens, 1, 8)
  d_out = normal(33, *query.shape)
  (_, mask), gradients = with_gradients(
    lambda *x: _out_and_mask(x, layout, 2, implementation),
    (d_out, np.zeros((1, 1, tiles, tiles), jax.dtypes.float0)),
    query,
    key,
    value,
  )
  want = vsa(query, key, value, [grid], tile, 2, d_out=d_out)
  np.testing.assert_array_equal(mask, want.mask)
  for got, truth in zip(gradients, _fine_gradients(want.fine), strict=True):
    assert relative(got, truth) < 2e-6
    assert np.linalg.norm(got) / np.linalg.norm(truth) == pytest.approx(1, abs=1e-5)
  selected = want.mask[0, 0].any(0)
  for members, some in zip(cut([grid], tile).members, selected, strict=True):
    for gradient in gradients[1:]:
      assert np.asarray(gradient)[0, members].any() == some


def _out_and_mask(operands, layout, topk, implementation):
  out, aux = video_sparse_attention(
    *operands, layout, topk=topk, implementation=implementation, return_aux=True
  )
  return out, aux.selection.to_mask()


_RAGGED = TileLayout([3, (1, 3, 6)], (1, 2, 4))


def _padded(query_fill, d_out_fill):
  """Tiled cotangent, query, key and value of _RAGGED, with other things in the padding of two."""
  query, key, value = qkv(40, 1, _RAGGED.num_tokens, 2, 8)
  d_out = normal(43, *query.shape)
  query, key, value, d_out = (tile(x, _RAGGED) for x in (query, key, value, d_out))
  padding = (np.arange(8) >= _RAGGED.tile_sizes[:, None]).reshape(1, -1, 1, 1)
  query, d_out = jnp.where(padding, query_fill, query), jnp.where(padding, d_out_fill, d_out)
  return d_out, query, key, value


def test_E04_non_zero_padding_in_query_and_cotangent(implementation):
  gradients = both(
    lambda *x: video_sparse_attention(
      *x, _RAGGED, topk=1, tiled=True, implementation=implementation
    )
  )
  run = lambda query_fill, d_out_fill: gradients(*_padded(query_fill, d_out_fill))
  want = run(0, 0)
  chex.assert_trees_all_equal(run(1e3, 1.0), want)
  chex.assert_trees_all_equal(run(jnp.nan, jnp.nan), want)
  query, key, value = qkv(40, 1, _RAGGED.num_tokens, 2, 8)
  truth = vsa(
    query, key, value, _RAGGED.segments, _RAGGED.tile, 1, d_out=normal(43, *query.shape)
  ).fine
  for got, exact in zip(want[1], _fine_gradients(truth), strict=True):
    np.testing.assert_allclose(np.asarray(got)[:, _RAGGED.slots], exact, atol=5e-6)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_E05_backward_wrong_for_one_head_size(implementation, dim):
  segments, tile = [5, (2, 5, 8)], (2, 2, 4)
  layout = TileLayout(segments, tile)
  query, key, value = qkv(50, 1, layout.num_tokens, 1, dim, dtype=jnp.bfloat16)
  d_out = normal(53, *query.shape, dtype=jnp.bfloat16)
  out, gradients = with_gradients(
    lambda *x: video_sparse_attention(*x, layout, topk=2, implementation=implementation),
    d_out,
    query,
    key,
    value,
  )
  want = vsa(query, key, value, segments, tile, 2, d_out=d_out)
  for got, truth in zip((out, *gradients), (want.out, *_fine_gradients(want.fine)), strict=True):
    chex.assert_type(got, jnp.bfloat16)
    assert relative(got, truth) < 1e-2


def test_E06_non_contiguous_cotangent(implementation):
  query, key, value = normal(60, 1, 16, 2, 8), normal(61, 1, 40, 2, 8), normal(62, 1, 40, 2, 8)
  selection = TileSelection.from_mask(np.ones((1, 2, 2, 4), bool))
  weights = normal(63, 1, 2, 16, 8)

  @jax.jit
  def gradients(query, key, value):
    def loss(query, key, value):
      out = block_sparse_attention(
        query, key[:, :-8], value[:, :-8], selection, implementation=implementation
      )
      return (jnp.swapaxes(out, 1, 2) * weights).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

  d_query, d_key, d_value = gradients(query, key, value)
  want = attention(query, key[:, :-8], value[:, :-8], d_out=jnp.swapaxes(weights, 1, 2))
  np.testing.assert_allclose(d_query, want.d_query, atol=2e-6)
  np.testing.assert_allclose(d_key[:, :-8], want.d_key, atol=2e-6)
  np.testing.assert_allclose(d_value[:, :-8], want.d_value, atol=2e-6)
  np.testing.assert_array_equal(d_key[:, -8:], 0.0)
  np.testing.assert_array_equal(d_value[:, -8:], 0.0)


def test_E08_gradient_through_lse(implementation):
  layout = TileLayout([(1, 1, 2)], (1, 1, 2))
  query, key, value = column(1, 1), column(0, np.log(3)), column(5, 7)

  def lse(query, key, value):
    _, aux = video_sparse_attention(
      query, key, value, layout, topk=1, scale=1.0, implementation=implementation, return_aux=True
    )
    return aux.lse[0, 0, 0]  # of the first query

  result, (d_query, d_key, d_value) = with_gradients(lse, 1.0, query, key, value)
  assert result == pytest.approx(1.386294, abs=1e-6)
  np.testing.assert_allclose(d_query.ravel(), [0.823959, 0], atol=1e-6)
  np.testing.assert_allclose(d_key.ravel(), [0.25, 0.75], atol=1e-6)
  np.testing.assert_array_equal(d_value.ravel(), [0, 0])


def test_E10_gradient_of_a_zero_gate(implementation):
  layout = TileLayout([(1, 1, 5)], (1, 1, 4))
  query, key, value = (
    column(1, 1, 1, 1, 2),
    column(0, 0, 0, 0, np.log(3)),
    column(0, 0, 0, 0, 4),
  )
  out, (d_gate,) = with_gradients(
    lambda gate: video_sparse_attention(
      query, key, value, layout, topk=2, scale=1.0, gate=gate, implementation=implementation
    ),
    jnp.ones_like(query),
    jnp.zeros_like(query),
  )
  np.testing.assert_allclose(out.ravel(), [1.714286] * 4 + [2.769231], rtol=3e-7)
  np.testing.assert_allclose(d_gate.ravel(), [3, 3, 3, 3, 3.6], rtol=3e-7)


def test_E11_non_deterministic_backward(implementation):
  segments, tile = [5, (2, 5, 8)], (2, 2, 4)
  layout = TileLayout(segments, tile)
  operands = qkv(110, 2, layout.num_tokens, 4, 8, kv_heads=2)
  gate, d_out = normal(113, *operands[0].shape), normal(114, *operands[0].shape)
  run = both(
    lambda query, key, value, gate: video_sparse_attention(
      query, key, value, layout, topk=2, gate=gate, implementation=implementation
    )
  )
  first = run(d_out, *operands, gate)
  for _ in range(10):
    assert_same_bits(run(d_out, *operands, gate), first)


@pytest.mark.parametrize("tile", [(4, 4, 8), (4, 8, 8)], ids=str)
def test_E13_forward_only_configuration(implementation, tile):
  grid = (4, 10, 8)
  layout = TileLayout([grid], tile)
  query, key, value = qkv(130, 1, layout.num_tokens, 1, 16)
  d_out = normal(133, *query.shape)
  out, gradients = with_gradients(
    lambda *x: video_sparse_attention(*x, layout, topk=1, implementation=implementation),
    d_out,
    query,
    key,
    value,
  )
  want = vsa(query, key, value, [grid], tile, 1, d_out=d_out)
  np.testing.assert_allclose(out, want.out, atol=5e-6)
  for got, truth in zip(gradients, _fine_gradients(want.fine), strict=True):
    assert relative(got, truth) < 2e-6


@pytest.mark.parametrize(("dtype", "ulps"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_E15_compiled_against_uncompiled(implementation, dtype, ulps):
  layout = TileLayout([(1, 1, 5)], (1, 1, 4))
  padding = jnp.asarray([0, 0, 0, 0, 0, 1, 1, 1], bool)[:, None, None]

  def run(operands, cotangents):
    def attend(query, key, value, gate):
      out, aux = video_sparse_attention(
        query,
        key,
        value,
        layout,
        topk=1,
        gate=gate,
        scale=1.0,
        tiled=True,
        implementation=implementation,
        return_aux=True,
      )
      return out, aux.lse

    results, vjp = jax.vjp(attend, *operands)
    return results, vjp(cotangents)

  a05 = column(*[1.0] * 5), column(3, 3, 3, 3, 8), column(0, 0, 0, 0, 1)
  e04 = qkv(150, 1, 5, 1, 1)
  for operands in (a05, e04):
    query, *others, d_out = (
      tile(x, layout).astype(dtype)
      for x in (*operands, normal(153, 1, 5, 1, 1), normal(154, 1, 5, 1, 1))
    )
    query, d_out = jnp.where(padding, 1e3, query), jnp.where(padding, 1, d_out)
    cotangents = d_out, normal(155, 1, 8, 1)
    compiled = jax.jit(run)((query, *others), cotangents)
    with jax.disable_jit():
      plain = run((query, *others), cotangents)
    chex.assert_tree_all_finite(compiled[1])
    for got, want in zip(jax.tree.leaves(compiled), jax.tree.leaves(plain), strict=True):
      eps = float(jnp.finfo(got.dtype).eps)
      got, want = wide(got), wide(want)
      largest = np.abs(want[np.isfinite(want)]).max()
      np.testing.assert_allclose(got, want, rtol=0, atol=ulps * eps * largest)
