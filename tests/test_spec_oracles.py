"""The worked examples and numeric oracles of docs/rules.md (1.6, 1.8, 2.3, 2.6, 12).

Of section 12 one is left out: the 8.76e-5 of the exp2 emulation, which no kernel of this version uses.
"""

import fractions
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_oracle import attention, cut, pool, route, tile_scores, vsa, wide
from running import RUN_HERE, assert_same_bits, both, normal, qkv, tile, to_mask, untile

from vsa_jax import (
  TileLayout,
  TileSelection,
  block_sparse_attention,
  explain,
  pool_tiles,
  routing_scores,
  select_tiles,
  tile_budget,
  video_sparse_attention,
)

EACH = pytest.mark.parametrize("implementation", RUN_HERE)

# Text, reference video, image, audio, target video (1.6).
EXAMPLE = [130, (4, 8, 16), 60, 200, (8, 8, 16)]
# 1.6, the fixture of 369 tokens.
FIXTURE = [37, 9, (5, 4, 6), 11, (8, 4, 6)]
# A small sequence of all kinds, ragged everywhere: 3 prefix tiles and two regions.
MIXED, TILE = [5, (2, 3, 3), 3, (3, 2, 5)], (2, 2, 2)


# Geometry.


def test_worked_example():
  layout = TileLayout(EXAMPLE, (4, 4, 8))
  np.testing.assert_array_equal(layout.tile_sizes, [128, 2, 60, 128, 72] + [128] * 12)
  assert (layout.num_prefix_tiles, layout.num_tiles) == (5, 17)
  assert layout.video_spans == ((5, 9), (9, 17))
  assert (layout.num_tokens, layout.padded_length, layout.tile_size) == (1926, 2176, 128)
  rows = [0, 127, 128, 129, 130, 137, 138, 146, 641, 642, 701, 702, 829, 830, 901, 902, 1925]
  slots = [0, 127, 128, 129, 640, 647, 768, 648, 1151, 256, 315, 384, 511, 512, 583, 1152, 2175]
  np.testing.assert_array_equal(layout.slots[rows], slots)
  np.testing.assert_array_equal(layout.slots, cut(EXAMPLE, (4, 4, 8)).slots(128))


def test_worked_example_with_other_tiles():
  layout = TileLayout(EXAMPLE, (4, 4, 4))
  assert (layout.num_tiles, layout.num_prefix_tiles, layout.padded_length) == (32, 8, 2048)
  assert layout.video_spans == ((8, 16), (16, 32))
  np.testing.assert_array_equal(layout.tile_sizes[:8], [64, 64, 2, 60, 64, 64, 64, 8])
  layout = TileLayout(EXAMPLE, (4, 8, 8))
  assert (layout.num_tiles, layout.num_prefix_tiles, layout.padded_length) == (9, 3, 2304)
  assert layout.video_spans == ((3, 5), (5, 9))
  np.testing.assert_array_equal(layout.tile_sizes, [130, 60, 200] + [256] * 6)


@pytest.mark.parametrize(
  ("tile", "spans", "sizes"),
  [
    ((4, 4, 4), ((3, 7), (7, 11)), [64, 32, 16, 8, 64, 32, 64, 32]),
    ((4, 4, 8), ((3, 5), (5, 7)), [96, 24, 96, 96]),
  ],
)
def test_fixture_of_369_tokens(tile, spans, sizes):
  layout = TileLayout(FIXTURE, tile)
  assert (layout.num_tokens, layout.num_prefix_tiles) == (369, 3)
  assert layout.video_spans == spans
  np.testing.assert_array_equal(layout.tile_sizes, [37, 9, 11, *sizes])
  np.testing.assert_array_equal(layout.slots, cut(FIXTURE, tile).slots(math.prod(tile)))


def test_teaching_example():
  layout = TileLayout([(4, 4, 4)], (4, 2, 2))
  tiled = np.asarray(tile(jnp.arange(64)[None], layout))[0]
  first = {0, 1, 4, 5, 16, 17, 20, 21, 32, 33, 36, 37, 48, 49, 52, 53}
  assert set(tiled[:16].tolist()) == first
  assert tiled[2] == 4
  assert tiled[[16, 32, 48]].tolist() == [2, 8, 10]


def test_ragged_example():
  layout = TileLayout([(5, 3, 4)], (4, 2, 2))
  np.testing.assert_array_equal(layout.tile_sizes, [16, 16, 8, 8, 4, 4, 2, 2])
  np.testing.assert_array_equal(layout.slots, cut([(5, 3, 4)], (4, 2, 2)).slots(16))


@pytest.mark.parametrize(
  ("grid", "tokens", "tiles", "padded", "kept"),
  [
    ((16, 28, 52), 23_296, 364, 23_296, 37),
    ((20, 48, 80), 76_800, 1200, 76_800, 120),
    ((21, 30, 52), 32_760, 624, 39_936, 63),
    ((21, 45, 80), 75_600, 1440, 92_160, 144),
  ],
)
def test_real_sizes(grid, tokens, tiles, padded, kept):
  layout = TileLayout([grid], (4, 4, 4))
  assert (layout.num_tokens, layout.num_tiles, layout.padded_length) == (tokens, tiles, padded)
  assert tile_budget(0.9, tiles) == kept


def test_tiling_round_trip_and_adjoint():
  layout = TileLayout(MIXED, TILE)
  x, y = normal(1, 2, layout.num_tokens, 3), normal(2, 2, layout.padded_length, 3)
  tiled = tile(x, layout)
  want = np.zeros(y.shape)
  want[:, cut(MIXED, TILE).slots(8)] = x
  np.testing.assert_array_equal(tiled, want)
  np.testing.assert_array_equal(untile(tiled, layout), x)
  (adjoint,) = jax.vjp(lambda x: tile(x, layout), x)[1](y)
  chex.assert_trees_all_equal(adjoint, untile(y, layout))
  (adjoint,) = jax.vjp(lambda y: untile(y, layout), y)[1](x)
  chex.assert_trees_all_equal(adjoint, tiled)


# Routing.


def test_pooled_mean_and_score():
  # Means [1, 1] and [2, 1], head dim 2: the score is 3 / sqrt(2).
  layout = TileLayout([(1, 1, 2)], (1, 1, 2))
  query = pool_tiles(jnp.asarray([[[[0.0, 2.0]], [[2.0, 0.0]]]]), layout)
  key = pool_tiles(jnp.asarray([[[[3.0, 0.0]], [[1.0, 2.0]]]]), layout)
  np.testing.assert_array_equal(query.ravel(), [1, 1])
  np.testing.assert_array_equal(key.ravel(), [2, 1])
  np.testing.assert_allclose(routing_scores(query, key).ravel(), [3 / np.sqrt(2)], rtol=1e-7)
  # What pooling cannot see.
  np.testing.assert_array_equal(
    pool_tiles(jnp.asarray([[[[10.0]], [[-10.0]]]]), layout).ravel(), [0]
  )


def test_score_is_the_mean_of_token_scores():
  tiles = cut(MIXED, TILE)
  layout = TileLayout(MIXED, TILE)
  query, key, _ = qkv(10, 1, layout.num_tokens, 4, 8, kv_heads=2)
  pooled = [pool_tiles(tile(x, layout), layout) for x in (query, key)]
  for got, x in zip(pooled, (query, key), strict=True):
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, pool(x, tiles), atol=1e-6)
  logits = np.einsum("qnh,knh->nqk", np.asarray(query[0]), np.asarray(key[0]).repeat(2, 1)) / 8**0.5
  want = [[logits[:, i][:, :, j].mean((1, 2)) for j in tiles.members] for i in tiles.members]
  np.testing.assert_allclose(routing_scores(*pooled)[0], np.moveaxis(want, 2, 0), atol=2e-6)
  np.testing.assert_allclose(routing_scores(*pooled), tile_scores(query, key, tiles), atol=2e-6)


def test_routing_row():
  layout = TileLayout([(4, 1, 1)], (1, 1, 1))
  scores = jnp.zeros((1, 1, 4, 4)).at[0, 0, 0].set(jnp.asarray([0.2, 3.1, -0.5, 2.4]))
  table, counts = select_tiles(scores, layout, topk=2).to_q2k()
  np.testing.assert_array_equal(table[0, 0, 0], [1, 3, -1, -1])
  assert counts[0, 0, 0] == 2
  chex.assert_type((table, counts), jnp.int32)


def test_budgets():
  assert tile_budget(0.75, 256) == 64
  assert tile_budget(0.9, 630) == 63
  assert tile_budget(0.875, 256) == 32
  assert [tile_budget(s, 8) for s in (0, 0.0, 1, 1.0)] == [8, 8, 1, 1]
  for thousandths in range(1001):
    for number in (float, np.float32):
      kept = tile_budget(number(thousandths / 1000), 1440)
      assert kept == max(1, -((thousandths - 1000) * 1440 // 1000))


EXACT = {"0.5", "0.6", "0.75", "0.8", "0.875", "0.9"}  # so says plain float64 for all n (rules 2.3)
OVERSHOOT = {"0.7": 10, "0.85": 20, "0.95": 20}  # here it is one too many at multiples of these


@pytest.mark.parametrize(
  "sparsity", sorted(EXACT | OVERSHOOT.keys() | {"0.001", "0.3333", "0.912", "0.999"})
)
def test_budget_is_exact(sparsity):
  exact = fractions.Fraction(sparsity)
  counts = np.arange(1, 2001)
  want = [max(1, min(math.ceil((1 - exact) * n), n)) for n in counts.tolist()]
  for number in (float, np.float32, np.float64):
    assert [tile_budget(number(sparsity), n) for n in counts.tolist()] == want
  overshoot = counts[np.ceil((1 - float(sparsity)) * counts).clip(1, counts) != want]
  if sparsity in OVERSHOOT:
    step = OVERSHOOT[sparsity]
    np.testing.assert_array_equal(overshoot, np.arange(step, 2001, step))
  if sparsity in EXACT:
    assert not overshoot.size


def _example_selection(**options):
  layout = TileLayout(EXAMPLE, (4, 4, 8))
  scores = normal(20, 1, 2, 17, 17)
  return scores, select_tiles(scores, layout, **options)


def test_counts_of_the_worked_example():
  for options in ({"sparsity": 0.75}, {"sparsity": (0.75, 0.75)}, {"topk": (1, 2)}):
    scores, selection = _example_selection(**options)
    table, counts = selection.to_q2k()
    chex.assert_shape((table, counts), [(1, 2, 17, 17), (1, 2, 17)])
    np.testing.assert_array_equal(counts[0, 0], [17] * 5 + [8] * 12)
    assert int(counts[0, 0].sum()) == 181
    want = route(wide(scores), cut(EXAMPLE, (4, 4, 8)), (1, 2))
    np.testing.assert_array_equal(to_mask(selection), want)
    for row, (ids, count) in enumerate(zip(table[0, 1], counts[0, 1], strict=True)):
      np.testing.assert_array_equal(ids[:count], np.flatnonzero(want[0, 1, row]))
      np.testing.assert_array_equal(ids[count:], -1)
  # A kernel that walks rows in pairs, with a partner row of count 0, makes these rounds.
  rounds = np.append(np.asarray(counts[0, 0]), 0).reshape(-1, 2).max(1)
  np.testing.assert_array_equal(rounds, [17, 17, 17, 8, 8, 8, 8, 8, 8])
  assert 2 * rounds.sum() == 198
  x = jax.ShapeDtypeStruct((1, 1926, 2, 64), jnp.bfloat16)
  assert explain(x, x, x, TileLayout(EXAMPLE, (4, 4, 8)), sparsity=0.75).kept_pairs == 181


def test_compete_policy():
  layout = TileLayout([5, (2, 4, 8)], TILE)  # 1 prefix tile, 8 video tiles
  scores = normal(30, 1, 2, 9, 9)
  mask = np.asarray(select_tiles(scores, layout, topk=2, prefix="compete").to_mask())
  want = np.zeros_like(mask)
  np.put_along_axis(want, np.argsort(-scores, axis=-1)[..., :3], True, axis=-1)
  want[:, :, 0] = True
  np.testing.assert_array_equal(mask, want)
  with pytest.raises(ValueError, match="compete"):
    _example_selection(sparsity=0.75, prefix="compete")


def test_pair_counts():
  # 4 tiles of 16 tokens, 2 kept per row (rules 12).
  layout = TileLayout([(4, 4, 4)], (4, 2, 2))
  x = jax.ShapeDtypeStruct((1, 64, 1, 8), jnp.float32)
  assert layout.num_tokens**2 == 4096
  assert explain(x, x, x, layout, topk=4).kept_pairs == 16
  assert explain(x, x, x, layout, topk=2).kept_pairs * 16**2 == 2048


def test_pair_counts_of_fast_h3():
  layout = TileLayout([1024, (20, 36, 56)], (4, 4, 4))
  assert (layout.num_tiles, layout.num_prefix_tiles, layout.padded_length) == (646, 16, 41_344)
  x = jax.ShapeDtypeStruct((1, layout.num_tokens, 56, 128), jnp.bfloat16)
  explanation = explain(x, x, x, layout, sparsity=0.9)
  assert explanation.kept_pairs == 60_106
  assert explanation.kept_fraction == pytest.approx(60_106 / 417_316)


def test_inverse_lists():
  """2.6: k2q lists, here ascending and the same on every run."""
  rng = np.random.default_rng(40)
  mask = rng.random((1, 2, 5, 7)) < 0.4
  offsets, rows = TileSelection.from_mask(mask).transposed()
  for n in range(2):
    for j in range(7):
      got = rows[0, n, offsets[0, n, j] : offsets[0, n, j + 1]]
      np.testing.assert_array_equal(got, np.flatnonzero(mask[0, n, :, j]))


# Attention.


@EACH
@pytest.mark.parametrize("options", [{"sparsity": 0.0}, {"topk": 99, "budget": 99}])
def test_keeping_everything_is_dense_attention(implementation, options):
  layout = TileLayout(MIXED, TILE)
  query, key, value = qkv(50, 1, layout.num_tokens, 4, 8, kv_heads=2)
  d_out = normal(53, *query.shape)
  attend = lambda *x: video_sparse_attention(*x, layout, implementation=implementation, **options)
  out, gradients = both(attend)(d_out, query, key, value)
  dense = both(jax.nn.dot_product_attention)(d_out, query, key, value)
  chex.assert_trees_all_close((out, gradients), dense, atol=3e-6)
  want = attention(query, key, value, d_out=d_out)
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  for got, truth in zip(gradients, (want.d_query, want.d_key, want.d_value), strict=True):
    np.testing.assert_allclose(got, truth, atol=5e-6)


@EACH
def test_masked_dense_attention_in_packed_order(implementation):
  layout, tiles = TileLayout(MIXED, TILE), cut(MIXED, TILE)
  query, key, value = qkv(60, 2, layout.num_tokens, 4, 8, kv_heads=2)
  out, aux = video_sparse_attention(
    query, key, value, layout, topk=(1, 2), implementation=implementation, return_aux=True
  )
  want = vsa(query, key, value, MIXED, TILE, (1, 2))
  np.testing.assert_array_equal(to_mask(aux.selection), want.mask)
  assert 0.2 < want.mask.mean() < 0.8
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  np.testing.assert_allclose(aux.lse, want.lse, atol=2e-6)

  # The same in pieces, with any block mask.
  mask = np.random.default_rng(64).random((2, 4, layout.num_tiles, layout.num_tiles)) < 0.4
  mask[:, :, 2] = False
  tiled = [tile(x, layout) for x in (query, key, value)]
  out, lse = block_sparse_attention(
    *tiled,
    TileSelection.from_mask(mask),
    tile_sizes=layout.tile_sizes,
    implementation=implementation,
    return_lse=True,
  )
  want = vsa(query, key, value, MIXED, TILE, None, mask=mask)
  np.testing.assert_allclose(untile(out, layout), want.out, atol=2e-6)
  np.testing.assert_allclose(untile(lse, layout), want.lse, atol=2e-6)
  # Row 2 keeps nothing: exactly 0, and LSE -inf.
  empty = tiles.members[2]
  np.testing.assert_array_equal(np.asarray(untile(out, layout))[:, empty], 0.0)
  np.testing.assert_array_equal(np.asarray(untile(lse, layout))[:, empty], -np.inf)


@EACH
def test_edge_rows(implementation):
  """3.3: a row whose tiles are all empty, duplicate ids, lists out of order."""
  query, key, value = qkv(70, 1, 12, 1, 8)
  ids = np.array([[1, 0], [2, 2], [2, 0]], np.int32)[None, None]
  counts = np.array([[[1, 2, 2]]], np.int32)
  out, lse = block_sparse_attention(
    query,
    key,
    value,
    TileSelection(ids, counts),
    tile_sizes=np.array([4, 0, 3]),
    query_tile_sizes=np.array([4, 4, 4]),
    implementation=implementation,
    return_lse=True,
  )
  times = np.zeros((3, 3))
  times[1, 2], times[2, [0, 2]] = 2, 1
  keep = times.repeat(4, 0).repeat(4, 1) * np.array([1] * 4 + [0] * 4 + [1, 1, 1, 0])
  want = attention(query, key, value, keep)
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  np.testing.assert_allclose(lse, want.lse, atol=2e-6)
  np.testing.assert_array_equal(out[:, :4], 0.0)
  np.testing.assert_array_equal(lse[:, :4], -np.inf)


@EACH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_zero_gate_is_no_gate(implementation, dtype):
  layout = TileLayout(MIXED, TILE)
  query, key, value = qkv(80, 1, layout.num_tokens, 2, 8, dtype=dtype)
  attend = jax.jit(
    lambda gate: video_sparse_attention(
      query, key, value, layout, topk=1, gate=gate, implementation=implementation
    )
  )
  assert_same_bits(attend(jnp.zeros_like(query)), attend(None))


@EACH
def test_a_zero_gate_may_lose_the_sign_of_a_zero(implementation):
  """The one exception: what is kept rounds to -0.0, and -0.0 + 0.0 * coarse is 0.0."""
  layout = TileLayout([(2, 1, 2)], (1, 1, 2))
  query = jnp.ones((1, 4, 1, 1), jnp.float16)
  key, value = (
    jnp.asarray(x, jnp.float16).reshape(query.shape) for x in ([3, 0, 0, 0], [0, -6e-8, 1, 1])
  )
  attend = lambda gate: video_sparse_attention(
    query, key, value, layout, topk=1, gate=gate, implementation=implementation
  )
  assert_same_bits(attend(None), jnp.full_like(query, -0.0))
  np.testing.assert_array_equal(attend(jnp.zeros_like(query)), attend(None))


@EACH
def test_error_identity(implementation):
  """O_sparse - O_dense = (1 - c) (O_kept - O_drop), c the mass of what is kept (2.7)."""
  layout, tiles = TileLayout(MIXED, TILE), cut(MIXED, TILE)
  query, key, value = qkv(90, 1, layout.num_tokens, 2, 8)
  attend = lambda topk: video_sparse_attention(
    query, key, value, layout, topk=topk, implementation=implementation, return_aux=True
  )
  (sparse, aux), (dense, dense_aux) = attend(1), attend(99)
  tile_of = tiles.tile_of
  kept = np.asarray(to_mask(aux.selection))[:, :, tile_of][..., tile_of]
  dropped = attention(query, key, value, ~kept).out
  mass = np.exp(np.asarray(aux.lse, np.float64) - np.asarray(dense_aux.lse))[..., None]
  np.testing.assert_allclose(sparse - dense, (1 - mass) * (sparse - dropped), atol=3e-6)
  video = np.isin(tile_of, np.arange(*tiles.spans[0]))
  assert mass[:, video].max() < 0.99
  np.testing.assert_allclose(mass[:, tile_of < tiles.num_prefix], 1, atol=2e-6)


@EACH
def test_coarse_branch_and_its_gradients(implementation):
  """4.1 and 5.1, in float64 against finite differences of the oracle; GQA, all segments ragged."""
  layout = TileLayout(MIXED, TILE)
  with jax.enable_x64(True):
    operands = qkv(100, 1, layout.num_tokens, 4, 8, kv_heads=2, dtype=jnp.float64)
    gate, d_out = (normal(i, *operands[0].shape, dtype=jnp.float64) for i in (103, 104))
    run = both(
      lambda *x: video_sparse_attention(
        *x[:3], layout, topk=1, gate=x[3], implementation=implementation
      )
    )
    out, gradients = run(d_out, *operands, gate)
    _, no_gate = run(d_out, *operands, jnp.zeros_like(gate))
  d_out = wide(d_out)
  want = vsa(*operands, MIXED, TILE, 1, gate=gate, d_out=d_out)
  np.testing.assert_allclose(out, want.out, atol=1e-12)
  np.testing.assert_allclose(gradients[3], d_out * want.coarse, atol=1e-12)

  # At a zero gate the operands get the gradient of the sparse branch alone, and the gate its own.
  truths = want.fine.d_query, want.fine.d_key, want.fine.d_value, d_out * want.coarse
  for got, truth in zip(no_gate, truths, strict=True):
    np.testing.assert_allclose(got, truth, atol=1e-12)

  step = 1e-5
  for i in range(3):
    direction = np.random.default_rng(110 + i).standard_normal(operands[i].shape)

    def moved(h, i=i, direction=direction):
      x = [wide(o) for o in operands]
      x[i] = x[i] + h * direction
      return (vsa(*x, MIXED, TILE, 1, gate=gate, mask=want.mask).out * d_out).sum()

    slope = (moved(step) - moved(-step)) / (2 * step)
    np.testing.assert_allclose((np.asarray(gradients[i]) * direction).sum(), slope, rtol=1e-6)


@EACH
def test_coarse_branch_of_a_tile_without_tokens(implementation):
  """4.1: a tile of size 0 has no coarse weight, and ranks last."""
  layout = TileLayout([(3, 1, 2)], (1, 1, 2))
  sizes = np.array([2, 0, 1])
  valid = np.array([[True, True, False, False, True, False]])
  query, key, value = qkv(120, 1, 6, 2, 8)
  gate = normal(123, *query.shape)
  junk = jnp.where(valid[..., None, None], 0, jnp.nan)
  out, aux = video_sparse_attention(
    query,
    key + junk,
    value + junk,
    layout,
    topk=2,
    gate=gate,
    tile_sizes=sizes,
    implementation=implementation,
    return_aux=True,
  )
  want = vsa(query, key, value, [(3, 1, 2)], (1, 1, 2), 2, gate=gate, valid=valid)
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  np.testing.assert_array_equal(aux.selection.indices, np.broadcast_to([0, 2], (1, 2, 3, 2)))
