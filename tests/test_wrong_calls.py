"""Odd values that once gave wrong numbers, or an error that named nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from running import RUN_HERE

from vsa_jax import (
  TileLayout,
  TileSelection,
  block_sparse_attention,
  tile_tokens,
  video_sparse_attention,
)

LAYOUT = TileLayout([5, (3, 4, 2)], (2, 2, 2))
Q, K, V = jax.random.normal(jax.random.key(0), (3, 1, LAYOUT.num_tokens, 2, 4))
EACH = pytest.mark.parametrize("implementation", RUN_HERE)


@pytest.mark.parametrize("budget", [np.iinfo(np.int64).max, np.int64(2**40), np.uint64(2**63)])
def test_a_budget_of_64_bits_is_no_small_one(budget):
  got = video_sparse_attention(Q, K, V, LAYOUT, topk=2, budget=budget)
  np.testing.assert_array_equal(got, video_sparse_attention(Q, K, V, LAYOUT, topk=2))
  least = video_sparse_attention(Q, K, V, LAYOUT, topk=2, budget=np.int64(-(2**40)))
  np.testing.assert_allclose(least, video_sparse_attention(Q, K, V, LAYOUT, topk=1), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_narrow_tables_are_refused(dtype):
  narrow = TileSelection(
    np.zeros((1, 1, 1, 1), dtype), np.ones((1, 1, 1), np.int32), num_key_tiles=300
  )
  with pytest.raises(ValueError, match=r"selection.indices: got u?int\d+, want int32"):
    narrow.to_mask()


@pytest.mark.parametrize("number", [1.5, 1.0, True, "1", None])
def test_static_numbers_of_a_selection_are_ints(number):
  table = np.zeros((1, 2, 1, 1), np.int32), np.zeros((1, 2, 1), np.int32)
  selection = TileSelection(*table, number, num_dense_rows=0, num_key_tiles=4)
  with pytest.raises(ValueError, match=f"got num_prefix_tiles={number}, .* want ints"):
    block_sparse_attention(Q[:, :2], Q[:, :8], Q[:, :8], selection)


def test_sizes_beyond_the_layouts_own():
  with pytest.raises(ValueError, match=r"tile_sizes\[0\]: got 8, want 0..5"):
    video_sparse_attention(Q, K, V, LAYOUT, topk=1, tile_sizes=np.full(5, 8))
  run = jax.jit(lambda sizes: video_sparse_attention(Q, K, V, LAYOUT, topk=1, tile_sizes=sizes))
  want = video_sparse_attention(Q, K, V, LAYOUT, topk=1)
  np.testing.assert_allclose(run(np.full(5, 8)), want, atol=1e-6)


@EACH
def test_keys_of_logit_minus_infinity_alone_are_nan_as_in_dense_attention(implementation):
  q, k = jnp.ones((1, 4, 1, 1)).at[0, 1].set(-jnp.inf), jnp.full((1, 4, 1, 1), 100.0)
  layout = TileLayout([(1, 1, 4)], (1, 1, 2))
  got = video_sparse_attention(q, k, k, layout, topk=2, implementation=implementation)
  np.testing.assert_array_equal(jnp.isnan(got), jnp.isnan(jax.nn.dot_product_attention(q, k, k)))
  assert jnp.isnan(got).sum() == 1


@EACH
def test_strict_promotion(implementation):
  with jax.numpy_dtype_promotion("strict"):
    video_sparse_attention(Q, K, V, LAYOUT, topk=1, gate=Q, implementation=implementation)


@pytest.mark.parametrize("spec", [P("d", None, "m"), P(None, None, "m"), P("d")])
def test_a_mesh_of_explicit_and_auto_axes(spec):
  mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Auto))
  arrays = [jnp.concatenate([x, x]) for x in (Q, K, V)]
  want = video_sparse_attention(*arrays, LAYOUT, topk=1)
  got = video_sparse_attention(
    *(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays), LAYOUT, topk=1
  )
  np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("x", [[[1.0]], "tokens", np.array([["a"]]), None])
def test_what_is_no_array(x):
  with pytest.raises(ValueError, match=r"x: got .*, want an array of numbers"):
    tile_tokens(x, LAYOUT)
