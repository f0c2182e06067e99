"""pool_tiles, routing_scores, tile_budget, select_tiles, against NumPy and plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from numpy_oracle import cut, route

from tests.strategies import layouts
from vsa_jax import TileLayout, pool_tiles, routing_scores, select_tiles, tile_budget, tile_tokens

LAYOUT = TileLayout([5, (4, 4, 4), 3, (3, 5, 4)], (2, 2, 2))  # 2 prefix tiles; 8 and 12 video tiles


@given(layouts())
def test_pooling(layout):
  x = np.random.default_rng(0).standard_normal((2, layout.num_tokens, 3, 2)).astype(np.float32)
  got = jax.jit(lambda x: pool_tiles(tile_tokens(x, layout), layout))(x)
  tile_of = layout.slots // layout.tile_size
  want = np.stack(
    [x[:, tile_of == j].mean(1, dtype=np.float64) for j in range(layout.num_tiles)], 1
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_pooling_dtypes_padding_and_empty_tiles():
  x = tile_tokens(jnp.ones((2, LAYOUT.num_tokens, 1, 2), jnp.bfloat16), LAYOUT)
  sizes = np.tile(LAYOUT.tile_sizes, (2, 1))
  sizes[1, 3] = 0
  padding = np.arange(8) >= sizes[..., None]
  x = jnp.where(padding.reshape(2, -1, 1, 1), jnp.nan, x)
  pooled = pool_tiles(x, LAYOUT, sizes)
  assert pooled.dtype == jnp.float32
  want = np.ones(pooled.shape)
  want[1, 3] = 0
  np.testing.assert_array_equal(pooled, want)
  gradient = jax.grad(lambda x: pool_tiles(x, LAYOUT, sizes).sum())(x)
  assert (np.asarray(gradient, np.float32)[padding.reshape(2, -1)] == 0).all()
  np.testing.assert_allclose(
    np.asarray(gradient, np.float32)[0, :, 0, 0].reshape(-1, 8).sum(1), 1, rtol=0.02
  )


def test_scores_with_gqa():
  rng = np.random.default_rng(0)
  q = rng.standard_normal((2, 5, 6, 4)).astype(np.float32)
  k = rng.standard_normal((2, 7, 3, 4)).astype(np.float32)
  want = np.einsum("bqnh,bknh->bnqk", q.astype(float), np.repeat(k, 2, axis=2)) / 2
  np.testing.assert_allclose(routing_scores(q, k), want, atol=1e-6)
  np.testing.assert_allclose(routing_scores(q, k, 3.0), 6 * want, atol=1e-5)
  sizes = np.array([1, 0, 2, 3, 1, 1, 0])
  masked = np.asarray(routing_scores(q, k, tile_sizes=sizes))
  assert (masked[..., sizes == 0] == -np.inf).all()
  np.testing.assert_array_equal(
    masked[..., sizes > 0], np.asarray(routing_scores(q, k))[..., sizes > 0]
  )


def test_scores_are_float32_at_highest_precision():
  jaxpr = jax.make_jaxpr(routing_scores)(*[jnp.ones((1, 3, 1, 4), jnp.bfloat16)] * 2)
  (dot,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
  assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
  assert dot.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, math.nan, math.inf, "0.9", None, True, [0.9], 1j])
def test_wrong_sparsity(sparsity):
  with pytest.raises(ValueError, match="sparsity: got"):
    tile_budget(sparsity, 10)


def test_traced_sparsity_names_budget():
  with pytest.raises(ValueError, match=r"traced value.*`budget`"):
    jax.jit(lambda s: tile_budget(s, 10))(0.9)


TILES = cut(LAYOUT.segments, LAYOUT.tile)


def check(selection, want):
  np.testing.assert_array_equal(selection.to_mask(), want)
  ids, counts = np.asarray(selection.indices), np.asarray(selection.counts)
  assert (np.diff(ids, axis=-1) >= 0).all(), "lists ascend"
  past = np.arange(ids.shape[-1]) >= counts[..., None]
  assert (ids[past] == selection.num_key_tiles).all()
  assert (ids[~past] < selection.num_key_tiles).all()


def random_scores(layout, levels):
  """Few distinct values: mostly ties."""
  values = [-np.inf, np.nan, -0.0, 0.0, 1.0, -1.0, 2.5][:levels]
  return (
    np.random.default_rng(levels)
    .choice(values, (2, 2, layout.num_tiles, layout.num_tiles))
    .astype(np.float32)
  )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 4, 7])
def test_ties_and_nan(levels, jit):
  scores = random_scores(LAYOUT, levels)
  select = lambda s: select_tiles(s, LAYOUT, topk=(3, 5))
  check((jax.jit(select) if jit else select)(scores), route(scores, TILES, (3, 5)))


@pytest.mark.parametrize(
  ("options", "ks"),
  [
    ({"sparsity": 0.75}, (2, 3)),
    ({"sparsity": (0.5, 0.9)}, (4, 2)),
    ({"topk": 4}, (4, 4)),
    ({"topk": [1, 99]}, (1, 12)),
    ({"topk": np.array([2, 3])}, (2, 3)),
    ({"topk": np.int64(2)}, (2, 2)),
    ({"sparsity": 1.0}, (1, 1)),
  ],
)
def test_per_region_topk(options, ks):
  scores = np.random.default_rng(1).standard_normal((2, 1, 22, 22)).astype(np.float32)
  selection = select_tiles(scores, LAYOUT, **options)
  assert selection.indices.shape == (2, 1, 20, sum(ks))
  check(selection, route(scores, TILES, ks))


@pytest.mark.parametrize(
  "shape", [(), (2,), (22, 1), (22, 2), (1, 22, 2), (2, 3, 1, 2), (2, 3, 22, 2)]
)
def test_budget_broadcasts_and_clips(shape):
  rng = np.random.default_rng(2)
  scores = rng.standard_normal((2, 3, 22, 22)).astype(np.float32)
  budget = rng.integers(-2, 8, shape)
  want = route(scores, TILES, np.clip(budget, 1, (4, 6)))
  check(select_tiles(scores, LAYOUT, topk=(4, 6), budget=budget), want)
  traced = jax.jit(lambda s, b: select_tiles(s, LAYOUT, topk=(4, 6), budget=b))
  check(traced(scores, budget), want)


def test_budget_changes_without_retracing():
  scores = np.random.default_rng(2).standard_normal((1, 1, 22, 22)).astype(np.float32)
  traces = []

  @jax.jit
  def select(scores, budget):
    traces.append(1)
    return select_tiles(scores, LAYOUT, sparsity=0.5, budget=budget)

  counts = {int(select(scores, jnp.asarray(k)).counts.sum()) for k in range(1, 5)}
  assert len(traces) == 1
  assert counts == {20 * 2 * k for k in range(1, 5)}


def test_keeping_everything_needs_no_lists():
  scores = jnp.zeros((2, 3, 22, 22))
  selection = select_tiles(scores, LAYOUT, sparsity=0.0)
  assert selection.num_prefix_tiles == 22
  assert selection.indices.size == 0
  assert np.asarray(selection.to_mask()).all()
  assert selection.to_mask().shape == (2, 3, 22, 22)
  assert select_tiles(scores, LAYOUT, topk=12).indices.size == 0
  assert select_tiles(scores, LAYOUT, topk=12, budget=2).counts.max() == 4


def test_without_video_everything_is_dense():
  layout = TileLayout([5, 3], (2, 2, 2))
  selection = select_tiles(jnp.zeros((1, 1, 2, 2)), layout, sparsity=0.9)
  assert np.asarray(selection.to_mask()).all()
  assert np.asarray(
    select_tiles(jnp.zeros((1, 1, 2, 2)), layout, topk=1, budget=jnp.zeros((0,), int)).to_mask()
  ).all()


def test_compete():
  layout = TileLayout([20, (4, 4, 4)], (2, 2, 2))  # 3 prefix tiles, 8 video tiles
  scores = np.random.default_rng(3).standard_normal((2, 2, 11, 11)).astype(np.float32)
  selection = select_tiles(scores, layout, topk=2, prefix="compete")
  assert selection.num_prefix_tiles == 0
  assert selection.num_dense_rows == 3
  tiles = cut(layout.segments, layout.tile)
  check(selection, route(scores, tiles, 3 + 2, compete=True))
  selection = select_tiles(scores, layout, topk=2, budget=1, prefix="compete")
  check(selection, route(scores, tiles, 3 + 1, compete=True))
  # Without a prefix there is nothing to compete with.
  bare = TileLayout([(4, 4, 4)], (2, 2, 2))
  a, b = (select_tiles(scores[..., :8, :8], bare, topk=2, prefix=p) for p in ("exempt", "compete"))
  np.testing.assert_array_equal(a.indices, b.indices)


SCORES = jnp.zeros((1, 1, 22, 22))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({}, "got neither, want exactly one"),
    ({"sparsity": 0.5, "topk": 2}, "want exactly one"),
    ({"topk": 0}, "topk: got 0, want at least 1"),
    ({"topk": -3}, "topk: got -3"),
    ({"topk": 0.5}, "topk: got 0.5, want an int.*sparsity takes the share"),
    ({"topk": 1.0}, "topk: got 1.0"),
    ({"topk": True}, "topk: got True"),
    ({"topk": "2"}, "topk: got '2'"),
    ({"sparsity": 2}, "sparsity: got 2, want the share"),
    ({"sparsity": (0.5,)}, "got 1 values .* one per video region"),
    ({"topk": (1, 2, 3)}, "got 3 values"),
    ({"sparsity": (0.5, "x")}, "sparsity: got 'x'"),
    ({"topk": 2, "prefix": "ignore"}, "prefix: got 'ignore'"),
    ({"topk": 2, "prefix": "compete"}, "2 video regions, want one"),
    ({"topk": 2, "budget": 1.5}, "budget: got float64"),
    (
      {"topk": 2, "budget": np.ones((3,), int)},
      r"want ints that broadcast to \[B, N, J, regions\]",
    ),
    ({"topk": 2, "budget": np.ones((1, 1, 1, 1, 1), int)}, "budget: got int64"),
    ({"topk": 2, "budget": True}, "budget: got bool"),
  ],
)
def test_wrong_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    select_tiles(SCORES, LAYOUT, **options)


def test_wrong_scores():
  with pytest.raises(
    ValueError, match=r"scores: got float32\[1, 1, 3, 3\], want floating \[B, N, 22, 22\]"
  ):
    select_tiles(jnp.zeros((1, 1, 3, 3)), LAYOUT, topk=1)


def test_selection_has_no_gradient():
  def loss(scores):
    selection = select_tiles(scores, LAYOUT, topk=2)
    return (scores[:, :, 2:] * selection.to_mask()[:, :, 2:]).sum()

  gradient = jax.grad(loss)(jnp.arange(22.0 * 22).reshape(1, 1, 22, 22))
  assert set(np.unique(gradient)) == {0.0, 1.0}
