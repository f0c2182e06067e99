"""video_sparse_attention: against `reference`, dense attention and hand-made pieces; errors; explain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from numpy_oracle import vsa
from running import CPU_DEFAULT

import vsa_jax
from vsa_jax import TileLayout, video_sparse_attention
from vsa_jax import attention as attention_module

LAYOUT = TileLayout([5, (4, 3, 4), 3, (3, 5, 2)], (2, 2, 2))
RAW = ("query", "key", "value", "gate", "d_out")


def make(layout=LAYOUT, batch=2, heads=4, kv_heads=2, dim=8, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  shape = dict.fromkeys(RAW, (batch, layout.num_tokens, heads, dim))
  shape["key"] = shape["value"] = (batch, layout.num_tokens, kv_heads, dim)
  return {name: jnp.asarray(rng.standard_normal(s), dtype) for name, s in shape.items()}


def value_and_gradients(inputs, layout=LAYOUT, **options):
  @jax.jit
  def both(inputs):
    def f(query, key, value, gate):
      return video_sparse_attention(
        query, key, value, layout, gate=gate, return_aux=True, **options
      )

    (out, aux), vjp = jax.vjp(f, *(inputs[n] for n in RAW[:4]))
    zero = jax.tree.map(
      lambda x: np.zeros(x.shape, jax.dtypes.float0) if x.dtype.kind in "iu" else 0.1 * x, aux
    )
    return out, aux, vjp((inputs["d_out"], zero))

  return both(inputs)


OPTIONS = [
  {"sparsity": 0.5},
  {"topk": (1, 3)},
  {"sparsity": 0.0},
  {"topk": 3, "budget": np.array([1, 2])},
  {"sparsity": 0.5, "scale": 0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_agrees_with_the_reference(options):
  inputs = make()
  out, aux, gradients = value_and_gradients(inputs, **options)
  want, want_aux, want_gradients = value_and_gradients(
    inputs, implementation="reference", **options
  )
  np.testing.assert_array_equal(aux.selection.indices, want_aux.selection.indices)
  np.testing.assert_allclose(out, want, atol=2e-6)
  np.testing.assert_allclose(aux.lse, want_aux.lse, atol=2e-6)
  for a, b in zip(gradients, want_gradients, strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6)


def test_gradients_of_the_coarse_branch_by_finite_differences():
  layout = TileLayout([2, (2, 2, 4)], (2, 2, 2))
  with jax.enable_x64(True):
    inputs = make(layout, batch=1, heads=2, kv_heads=1, dim=2, dtype=jnp.float64)

    def loss(query, key, value, gate):
      out = video_sparse_attention(query, key, value, layout, gate=gate, topk=1)
      return (out * inputs["d_out"]).sum()

    check_grads(loss, [inputs[n] for n in RAW[:4]], order=1, modes=["rev"], rtol=1e-5, atol=1e-5)


def test_in_row_blocks(monkeypatch):
  inputs = {n: vsa_jax.tile_tokens(x, LAYOUT) for n, x in make().items()}
  options = {"budget": np.arange(2 * LAYOUT.num_tiles).reshape(-1, 2) % 4, "tiled": True}
  whole = value_and_gradients(inputs, topk=3, **options)
  monkeypatch.setattr(attention_module, "MAX_SCORE_BYTES", 2 * 4 * LAYOUT.num_tiles * 4 * 5)
  blocks = value_and_gradients(inputs, topk=3, **options)
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(blocks), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)


def test_row_blocks_bound_the_scores(monkeypatch):
  layout = TileLayout([(4, 16, 16)], (2, 2, 2))
  x = jax.ShapeDtypeStruct((1, layout.num_tokens, 1, 4), jnp.float32)
  text = lambda topk: (
    jax.jit(lambda q, k, v, g: video_sparse_attention(q, k, v, layout, gate=g, topk=topk))
    .lower(x, x, x, x)
    .as_text()
  )
  table = "tensor<1x1x128x128xf32>"
  assert table in text(2)
  monkeypatch.setattr(attention_module, "MAX_SCORE_BYTES", 4 * 128 * 16)
  blocks = text(2)
  assert table not in blocks
  assert "tensor<1x1x16x128xf32>" in blocks


def test_tiled_equals_untiled():
  inputs = make()
  out, aux, gradients = value_and_gradients(inputs, sparsity=0.5)
  tiled = {n: vsa_jax.tile_tokens(x, LAYOUT) for n, x in inputs.items()}
  padding = np.ones(LAYOUT.padded_length, bool)
  padding[LAYOUT.slots] = False
  for fill in (0, jnp.nan):
    poisoned = {n: jnp.where(padding[:, None, None], fill, x) for n, x in tiled.items()}
    out_t, aux_t, gradients_t = value_and_gradients(poisoned, sparsity=0.5, tiled=True)
    assert (np.asarray(out_t)[:, padding] == 0).all()
    assert (np.asarray(aux_t.lse)[:, padding] == -np.inf).all()
    np.testing.assert_array_equal(vsa_jax.untile_tokens(out_t, LAYOUT), out)
    np.testing.assert_array_equal(vsa_jax.untile_tokens(aux_t.lse, LAYOUT), aux.lse)
    for a, b in zip(gradients_t, gradients, strict=True):
      assert (np.asarray(a)[:, padding] == 0).all()
      np.testing.assert_allclose(vsa_jax.untile_tokens(a, LAYOUT), b, atol=1e-6)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
  "shape", [(), (8,), (1, 8), (4, 1), (1, 1, 4, 8), (2, 1, 1, 1), "length", "full"]
)
def test_gate_broadcasts(shape, tiled):
  inputs = make()
  length = LAYOUT.padded_length if tiled else LAYOUT.num_tokens
  shape = {"length": (length, 1, 1), "full": (2, length, 4, 8)}.get(shape, shape)
  gate = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
  q, k, v = (vsa_jax.tile_tokens(inputs[n], LAYOUT) if tiled else inputs[n] for n in RAW[:3])
  got = video_sparse_attention(q, k, v, LAYOUT, topk=2, gate=gate, tiled=tiled)
  want = video_sparse_attention(
    q, k, v, LAYOUT, topk=2, gate=jnp.broadcast_to(gate, q.shape), tiled=tiled
  )
  np.testing.assert_array_equal(got, want)


def test_lengths_per_sample():
  layout = TileLayout([6, (4, 3, 4)], (2, 2, 2))
  lengths = np.array([[6, 48], [2, 24], [0, 48]])
  inputs = make(layout, batch=3)
  sizes = layout.tile_sizes_for(lengths)
  position = np.arange(layout.num_tokens)
  valid = np.where(position < 6, position < lengths[:, :1], position - 6 < lengths[:, 1:])
  poisoned = {n: jnp.where(valid[..., None, None], x, jnp.nan) for n, x in inputs.items()}
  out, aux, gradients = value_and_gradients(poisoned, layout, topk=2, tile_sizes=sizes)
  want = vsa(
    *(inputs[n] for n in RAW[:3]), layout.segments, layout.tile, 2, gate=inputs["gate"], valid=valid
  )
  np.testing.assert_allclose(out, want.out, atol=2e-6)
  np.testing.assert_allclose(aux.lse, want.lse, atol=2e-6)
  np.testing.assert_allclose(gradients[3], inputs["d_out"] * want.coarse, atol=5e-6)
  for x in (out, *gradients):
    assert (np.asarray(x)[~valid] == 0).all()
  # One sample is as a sequence of its own.
  alone = TileLayout([2, (2, 3, 4)], (2, 2, 2))
  part = {n: x[1:2, valid[1]] for n, x in inputs.items()}
  want, want_aux, want_gradients = value_and_gradients(part, alone, topk=2)
  for a, w in zip((out, aux.lse, *gradients), (want, want_aux.lse, *want_gradients), strict=True):
    np.testing.assert_allclose(a[1, valid[1]], w[0], atol=5e-6)


def test_an_empty_sample():
  inputs = make()
  sizes = np.stack([LAYOUT.tile_sizes, 0 * LAYOUT.tile_sizes])
  out, aux, gradients = value_and_gradients(inputs, topk=2, tile_sizes=sizes)
  assert (np.asarray(out)[1] == 0).all()
  assert (np.asarray(aux.lse)[1] == -np.inf).all()
  for g in gradients:
    assert np.isfinite(g).all()
    assert (np.asarray(g)[1] == 0).all()


def test_mixed_gate_dtype():
  inputs = {**make(dtype=jnp.bfloat16), "gate": make()["gate"]}
  out, _, gradients = value_and_gradients(inputs, topk=2)
  assert out.dtype == jnp.bfloat16
  assert [g.dtype for g in gradients] == [inputs[n].dtype for n in RAW[:4]]


def test_budget_and_layouts_do_not_retrace():
  inputs = make()
  q, k, v = (inputs[n] for n in RAW[:3])
  traces = []

  @jax.jit
  def attend(q, k, v, layout, budget):
    traces.append(1)
    return video_sparse_attention(q, k, v, layout, topk=3, budget=budget)

  outs = [
    attend(q, k, v, TileLayout(LAYOUT.segments, LAYOUT.tile), jnp.asarray(n)) for n in (1, 2, 3)
  ]
  assert len(traces) == 1
  for n, out in zip((1, 2, 3), outs, strict=True):
    np.testing.assert_allclose(out, video_sparse_attention(q, k, v, LAYOUT, topk=n), atol=2e-6)


INPUTS = make()
Q, K, V = (INPUTS[n] for n in RAW[:3])


@pytest.mark.parametrize(
  ("arguments", "options", "message"),
  [
    ((Q, K, V), {}, "got neither"),
    ((Q[:, :-1], K, V), {"topk": 1}, r"query: got shape \[2, 85, 4, 8\], want \[B, 86, ...\]"),
    ((Q, K[:, :-1], V[:, :-1]), {"topk": 1}, "key: got shape"),
    (
      (Q[..., 0], K, V),
      {"topk": 1},
      r"query: got float32\[2, 86, 4\], want a floating \[B, L, N, H\]",
    ),
    ((Q.swapaxes(1, 2), K.swapaxes(1, 2), V.swapaxes(1, 2)), {"topk": 1}, "query: got shape"),
    (
      (Q, K[:, :, [0, 1, 1]], V[:, :, [0, 1, 1]]),
      {"topk": 1},
      "key: got 3 heads for 4 query heads",
    ),
    ((Q, K, V[:, :, :1]), {"topk": 1}, "value: got shape"),
    ((Q, K.astype(jnp.bfloat16), V), {"topk": 1}, "key: got bfloat16, want query's dtype float32"),
    ((Q.astype(int), K, V), {"topk": 1}, "query: got int32"),
    ((Q, K[:1], V[:1]), {"topk": 1}, "key: got shape"),
    (("q", K, V), {"topk": 1}, "query: got str"),
    ((Q, K, V), {"topk": 1, "gate": jnp.ones((2, 85, 4, 8))}, r"gate: got float32\[2, 85, 4, 8\]"),
    ((Q, K, V), {"topk": 1, "gate": jnp.ones((86, 4, 8), int)}, "gate: got int32"),
    ((Q, K, V), {"topk": 1, "gate": "on"}, "gate: got"),
    ((Q, K, V), {"topk": 1, "scale": 0}, "scale: got 0, want a finite real > 0"),
    ((Q, K, V), {"topk": 1, "scale": -1.0}, "scale: got -1.0"),
    ((Q, K, V), {"topk": 1, "scale": jnp.nan}, "scale: got nan"),
    ((Q, K, V), {"topk": 1, "scale": "1"}, "scale: got '1'"),
    ((Q, K, V), {"topk": 1, "precision": "best"}, "precision: got 'best'"),
    ((Q, K, V), {"topk": 1, "implementation": "fast"}, "implementation: got 'fast', want one of"),
    ((Q, K, V), {"topk": 1, "implementation": 3}, "implementation: got 3 without"),
    ((Q, K, V), {"topk": 1, "implementation": ()}, "empty sequence"),
    ((Q, K, V), {"topk": 1, "tile_sizes": np.ones(3, int)}, r"tile_sizes: got int64\[3\]"),
    ((Q, K, V), {"topk": 1, "tile_sizes": LAYOUT.tile_sizes + 8}, r"tile_sizes\[0\]: got"),
    ((Q, K, V), {"topk": 1, "tile_sizes": LAYOUT.tile_sizes * 1.0}, "tile_sizes: got float64"),
    ((Q, K, V), {"topk": 1, "sharding": "batch"}, "sharding: got str, want the NamedSharding"),
    ((Q, K, V), {"topk": 1, "tiled": True}, "tile_tokens first"),
  ],
)
def test_wrong_calls_are_named(arguments, options, message):
  with pytest.raises(ValueError, match=message):
    video_sparse_attention(*arguments, LAYOUT, **options)


@pytest.mark.parametrize("name", ["cuda", "pallas", "cuda_sim"])
def test_a_named_implementation_never_falls_back(name):
  with pytest.raises(
    NotImplementedError,
    match=rf"'{name}' cannot run this call: .* These can: \['xla', 'reference'.*\]",
  ):
    video_sparse_attention(Q, K, V, LAYOUT, topk=1, implementation=name)


def test_a_sequence_is_tried_in_order():
  got = video_sparse_attention(Q, K, V, LAYOUT, topk=1, implementation=("cuda", "reference", "xla"))
  want = video_sparse_attention(Q, K, V, LAYOUT, topk=1, implementation="reference")
  np.testing.assert_array_equal(got, want)


def test_traced_scale_is_named():
  with pytest.raises(ValueError, match=r"scale: got a traced value.*multiply query"):
    jax.jit(lambda s: video_sparse_attention(Q, K, V, LAYOUT, topk=1, scale=s))(1.0)


def test_explain():
  shape = jax.ShapeDtypeStruct((1, 75600, 12, 128), jnp.bfloat16)
  layout = TileLayout([(21, 45, 80)], (4, 4, 4))
  told = vsa_jax.explain(shape, shape, shape, layout, sparsity=0.9)
  assert told.chosen == CPU_DEFAULT
  assert told.kept_pairs == 1440 * 144
  assert told.reasons["xla"] is None
  assert "not in this version" in told.reasons["pallas"]
  text = str(told)
  for word in (
    "75600 tokens",
    "1440 tiles of 64",
    "10.0%",
    f"{CPU_DEFAULT:<10} chosen",
    "cuda       no:",
    jax.__version__,
    f"{jax.device_count()} x {jax.devices()[0].device_kind}",
  ):
    assert word in text
  assert (
    vsa_jax.explain(shape, shape, shape, layout, sparsity=0.9, implementation="cuda").chosen is None
  )
  with pytest.raises(ValueError, match="want exactly one"):
    vsa_jax.explain(shape, shape, shape, layout)


def test_explain_counts_what_a_call_keeps():
  _, aux = video_sparse_attention(Q, K, V, LAYOUT, topk=(1, 2), return_aux=True)
  told = vsa_jax.explain(Q, K, V, LAYOUT, topk=(1, 2))
  assert told.kept_pairs == int(np.asarray(aux.selection.to_mask())[0, 0].sum())


def test_explain_names_an_object_and_takes_shapes_alone():
  class Mine:
    name, forward, backward = "mine", None, None

    def supports(self, problem):
      return "it runs float64 only"

  x = jax.ShapeDtypeStruct((1, LAYOUT.num_tokens, 2, 8), jnp.float32)
  budget = jax.ShapeDtypeStruct((), jnp.int32)
  text = str(
    vsa_jax.explain(x, x, x, LAYOUT, topk=2, gate=x, budget=budget, implementation=(Mine(), "xla"))
  )
  assert "mine       no: it runs float64 only" in text
  assert "xla        chosen" in text


@pytest.mark.parametrize("sparsity", [jnp.float32(0.5), np.array(0.5), np.float16(0.5)])
def test_a_sparsity_of_any_real_type(sparsity):
  inputs = make(LAYOUT)
  operands = [inputs[n] for n in ("query", "key", "value")]
  got, want = (video_sparse_attention(*operands, LAYOUT, sparsity=s) for s in (sparsity, 0.5))
  np.testing.assert_array_equal(got, want)
