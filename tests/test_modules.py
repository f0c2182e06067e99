"""VSAAttention for NNX and Linen, and its checkpoints."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from running import assert_same_bits, collectives

import vsa_jax
import vsa_jax.linen
from vsa_jax import TileLayout, VSAAttention, checkpoints, video_sparse_attention

LAYOUT = TileLayout([7, (5, 3, 4)], (2, 2, 2))
TILE = (2, 2, 2)
X = jax.random.normal(jax.random.key(0), (2, LAYOUT.num_tokens, 16))


def make(seed=0, **options):
  options = {"tile": TILE, "sparsity": 0.5, **options}
  return VSAAttention(4, 16, rngs=nnx.Rngs(seed), **options)


def with_gate(attn, seed=1):
  shape = attn.gate.kernel[...].shape
  attn.gate.kernel[...] = jax.random.normal(jax.random.key(seed), shape)
  return attn


def rotate(x):
  """Depends on position: what position_fn is for."""
  angle = jnp.arange(x.shape[1])[:, None, None] / 10
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
  )


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
  "options", [{}, {"normalize_qk": True, "use_bias": False, "gate_use_bias": True}], ids=str
)
def test_it_is_projections_around_the_op(kv_heads, options):
  attn = with_gate(make(num_kv_heads=kv_heads, **options))
  project = lambda layer: (
    jnp.einsum("blf,fnh->blnh", X, layer.kernel[...])
    + (layer.bias[...] if layer.bias is not None else 0)
  )
  q, k, v, gate = (project(layer) for layer in (attn.query, attn.key, attn.value, attn.gate))
  if attn.normalize_qk:
    q, k = (x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) for x in (q, k))
  out = video_sparse_attention(rotate(q), rotate(k), v, LAYOUT, sparsity=0.5, gate=gate)
  want = jnp.einsum("blnh,nhf->blf", out, attn.out.kernel[...])
  np.testing.assert_allclose(attn(X, LAYOUT, position_fn=rotate), want, atol=2e-5)


def test_full_attention_equals_flax():
  """Keeping everything, without gate: nnx.MultiHeadAttention with the same weights."""
  attn = make(sparsity=0.0, use_gate=False)
  dense = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(1))
  for name in ("query", "key", "value", "out"):
    getattr(dense, name).kernel[...] = getattr(attn, name).kernel[...]
  np.testing.assert_allclose(attn(X, LAYOUT), dense(X), atol=2e-6)


def test_a_new_gate_changes_nothing_and_learns():
  attn = make()
  plain = make(use_gate=False)
  assert_same_bits(attn(X, LAYOUT), plain(X, LAYOUT))
  gradient = nnx.grad(lambda a: (a(X, LAYOUT) ** 2).sum())(attn)
  assert np.abs(gradient["gate"]["kernel"][...]).max() > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(dtype, param_dtype):
  attn = make(dtype=dtype, param_dtype=param_dtype, normalize_qk=True)
  assert {p.dtype for p in jax.tree.leaves(nnx.state(attn, nnx.Param))} == {jnp.dtype(param_dtype)}
  assert attn(X, LAYOUT, position_fn=lambda x: x.astype(jnp.float32)).dtype == dtype


def test_tiled_hidden_states():
  attn = with_gate(make())
  tiled = vsa_jax.tile_tokens(X, LAYOUT)
  padding = np.ones(LAYOUT.padded_length, bool)
  padding[LAYOUT.slots] = False

  def rotate_tiled(x):
    return vsa_jax.tile_tokens(rotate(vsa_jax.untile_tokens(x, LAYOUT)), LAYOUT)

  def loss(attn, x, fn, **options):
    y = attn(x, LAYOUT, position_fn=fn, **options)
    return (y**2).sum(), y

  (_, want), want_gradient = nnx.value_and_grad(loss, has_aux=True)(attn, X, rotate)
  for fill in (0.0, jnp.nan):
    x = jnp.where(padding[:, None], fill, tiled)
    (_, got), gradient = nnx.value_and_grad(functools.partial(loss, tiled=True), has_aux=True)(
      attn, x, rotate_tiled
    )
    assert (np.asarray(got)[:, padding] == 0).all()
    np.testing.assert_allclose(vsa_jax.untile_tokens(got, LAYOUT), want, atol=2e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_lengths_per_sample_with_nan_beyond():
  attn = with_gate(make(topk=2, sparsity=None))
  lengths = np.array([[7, 60], [3, 24]])
  position = np.arange(LAYOUT.num_tokens)
  valid = np.where(position < 7, position < lengths[:, :1], position - 7 < lengths[:, 1:])
  x = jnp.where(valid[..., None], X, jnp.nan)

  def loss(attn):
    y = attn(x, LAYOUT, tile_sizes=LAYOUT.tile_sizes_for(lengths))
    return (y**2).sum(), y

  (_, y), gradient = nnx.value_and_grad(loss, has_aux=True)(attn)
  for g in jax.tree.leaves(gradient):
    assert np.isfinite(g).all()
  assert (np.asarray(y)[~valid] == 0).all()
  alone = TileLayout([3, (2, 3, 4)], TILE)
  np.testing.assert_allclose(y[1, valid[1]], attn(X[1:, valid[1]], alone)[0], atol=2e-6)


def test_budget_and_sparsity_per_call():
  attn = make(topk=4, sparsity=None)
  traces = []

  @nnx.jit
  def run(attn, x, budget):
    traces.append(1)
    return attn(x, LAYOUT, budget=budget)

  for k in (1, 2, 4):
    np.testing.assert_allclose(
      run(attn, X, jnp.asarray(k)), make(topk=k, sparsity=None)(X, LAYOUT), atol=2e-6
    )
  assert len(traces) == 1
  np.testing.assert_array_equal(attn(X, LAYOUT, sparsity=0.5), make()(X, LAYOUT))
  y, aux = attn(X, LAYOUT, return_aux=True)
  assert aux.selection.width == 4
  assert aux.lse.shape == (*y.shape[:2], 4)


def test_scan_over_layers_with_remat():
  @nnx.split_rngs(splits=3)
  @nnx.vmap
  def build(rngs):
    return VSAAttention(4, 16, tile=TILE, sparsity=0.5, rngs=rngs)

  stacked = build(nnx.Rngs(0))
  assert stacked.query.kernel[...].shape == (3, 16, 4, 4)

  @nnx.scan(in_axes=(0, nnx.Carry, None, None), out_axes=nnx.Carry)
  @nnx.remat
  def forward(layer, x, layout, position_fn):
    return x + layer(x, layout, position_fn=position_fn)

  fn = jax.tree_util.Partial(rotate)
  loss = lambda layers: (forward(layers, X, LAYOUT, fn) ** 2).mean()
  value, gradient = nnx.jit(nnx.value_and_grad(loss))(stacked)

  graph, state = nnx.split(stacked)

  def looped(state):
    x = X
    for i in range(3):
      x = x + nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], state))(
        x, LAYOUT, position_fn=rotate
      )
    return (x**2).mean()

  want, want_gradient = jax.value_and_grad(looped)(state)
  np.testing.assert_allclose(value, want, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_vmap_over_inputs():
  attn = make()
  xs = jnp.stack([X, 2 * X])
  got = nnx.vmap(lambda attn, x, layout: attn(x, layout), in_axes=(None, 0, None))(attn, xs, LAYOUT)
  for x, y in zip(xs, got, strict=True):
    np.testing.assert_allclose(y, attn(x, LAYOUT), atol=2e-6)


@pytest.mark.parametrize(
  ("build", "message"),
  [
    (
      lambda: VSAAttention(3, 16, tile=TILE, rngs=nnx.Rngs(0)),
      "got 16, want a multiple of num_heads=3",
    ),
    (lambda: VSAAttention(0, 16, tile=TILE, rngs=nnx.Rngs(0)), "num_heads: got 0"),
    (lambda: make(num_kv_heads=3), "num_kv_heads: got 3, want a divisor"),
    (lambda: make(tile=64), "tile: got 64"),
    (lambda: make(topk=2), "want at most one"),
    (lambda: make(sparsity=1.5)(X, LAYOUT), "sparsity: got 1.5"),
    (lambda: make(sparsity=None)(X, LAYOUT), "got neither"),
    (
      lambda: make()(X, TileLayout([7, (5, 3, 4)], (2, 2, 4))),
      r"layout: got tile \(2, 2, 4\), want \(2, 2, 2\)",
    ),
    (
      lambda: make()(X, TileLayout([7, (5, 4, 4)], TILE)),
      r"x: got shape \[2, 67, 16\], want \[B, 87, ...\]",
    ),
    (lambda: make()(X[..., :8], LAYOUT), r"want \[B, 67, 16\] \(in_features\)"),
    (lambda: make()(X[..., None], LAYOUT), r"want \[B, 67, 16\] \(in_features\)"),
    (lambda: make()(X, LAYOUT, position_fn=lambda x: x[:, :3]), "position_fn: got shape"),
    (lambda: make()(X, (5, 3, 4)), "want a TileLayout"),
  ],
)
def test_wrong_calls_are_named(build, message):
  with pytest.raises(ValueError, match=message):
    build()


# Linen.


def test_linen_equals_nnx():
  attn = vsa_jax.linen.VSAAttention(4, 16, tile=TILE, sparsity=0.5, normalize_qk=True)
  variables = attn.init(jax.random.key(0), X, LAYOUT)
  twin = make(normalize_qk=True)
  checkpoints.load_params(twin, nn.unbox(variables)["params"])
  got = jax.jit(attn.apply)(variables, X, LAYOUT)
  np.testing.assert_allclose(got, twin(X, LAYOUT), atol=2e-6)
  gradient = jax.grad(lambda v: (attn.apply(v, X, LAYOUT) ** 2).sum())(variables)
  assert np.abs(gradient["params"]["gate"]["kernel"]).max() > 1e-3


def test_linen_submodule_remat_and_scan():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, layout):
      return x + vsa_jax.linen.VSAAttention(4, 16, tile=TILE, sparsity=0.5, name="attn")(
        x, layout
      ), None

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x, layout):
      layers = nn.scan(
        nn.remat(Block),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=2,
      )
      return layers(name="layers")(x, layout)[0]

  params = nn.unbox(Model().init(jax.random.key(0), X, LAYOUT))["params"]
  assert {p.shape[0] for p in jax.tree.leaves(params)} == {2}

  def scanned(params):
    return (Model().apply({"params": params}, X, LAYOUT) ** 2).mean()

  def looped(params):
    x = X
    for i in range(2):
      layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
      x, _ = Block().apply({"params": layer}, x, LAYOUT)
    return (x**2).mean()

  value, gradient = jax.jit(jax.value_and_grad(scanned))(params)
  want, want_gradient = jax.jit(jax.value_and_grad(looped))(params)
  np.testing.assert_allclose(value, want, rtol=1e-6)
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(want_gradient))
  chex.assert_trees_all_close(gradient, want_gradient, rtol=1e-4, atol=1e-7)


# Checkpoints.


class Pair(nnx.Module):
  """Two modules in a list, and something else."""

  def __init__(self, **options):
    self.layers = nnx.List([make(seed, **options) for seed in range(2)])
    self.head = nnx.Linear(16, 3, rngs=nnx.Rngs(5))

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x, LAYOUT)
    return self.head(x)


def test_save_and_restore(tmp_path):
  model = Pair()
  with_gate(model.layers[0])
  checkpoints.save(tmp_path / "a", model)
  other = Pair()
  other.layers[1].query.kernel[...] = 0 * other.layers[1].query.kernel[...]
  sparser = Pair(sparsity=0.9)  # which is not a matter of weights
  for restored in (other, sparser):
    checkpoints.restore(tmp_path / "a", restored)
    chex.assert_trees_all_equal(nnx.state(restored, nnx.Param), nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"use_gate": False}, "layers/0.use_gate: saved with True, built with False"),
    ({"num_kv_heads": 2}, "num_kv_heads"),
  ],
)
def test_restore_into_another_model(tmp_path, options, message):
  checkpoints.save(tmp_path / "a", Pair())
  with pytest.raises(ValueError, match=message):
    checkpoints.restore(tmp_path / "a", Pair(**options))


def test_weights_without_gates(tmp_path):
  plain = Pair(use_gate=False)
  checkpoints.save(tmp_path / "a", plain)
  gated = Pair()
  with_gate(gated.layers[0])
  with pytest.raises(ValueError, match="use_gate: saved with False, built with True"):
    checkpoints.restore(tmp_path / "a", gated)
  checkpoints.restore(tmp_path / "a", gated, zero_missing_gates=True)
  np.testing.assert_array_equal(gated(X), plain(X))


def test_load_params_lists_what_is_wrong():
  gated = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
  small = nnx.to_pure_dict(nnx.state(make(num_kv_heads=2), nnx.Param))
  with pytest.raises(ValueError, match=r"key/kernel: got \[16, 2, 4\], want \[16, 4, 4\]"):
    checkpoints.load_params(make(), small)
  del gated["query"]
  with pytest.raises(
    ValueError, match=r"'query/bias', 'query/kernel'|'query/kernel', 'query/bias'"
  ):
    checkpoints.load_params(make(), gated)


# Sharded parameters.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_tensor_parallel(kind):
  """Batch and heads sharded, parameters too; one all-reduce, of the output projection."""
  mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(kind,) * 2)
  sharding = NamedSharding(mesh, P("b", None, "h")) if kind == AxisType.Auto else None
  attn = make(sharding=sharding)
  want = attn(X, LAYOUT)
  graph, state = nnx.split(attn)

  specs = {"kernel": P(None, "h"), "bias": P("h")}

  def place(path, p):
    layer, leaf = (k.key for k in path[:2])
    spec = {"kernel": P("h"), "bias": P()}[leaf] if layer == "out" else specs[leaf]
    return jax.device_put(p, NamedSharding(mesh, spec))

  state = jax.tree_util.tree_map_with_path(place, state)
  x = jax.device_put(X, NamedSharding(mesh, P("b")))
  with jax.set_mesh(mesh):
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x, LAYOUT))
    compiled = run.lower(state, x).compile()
    got = compiled(state, x)
  np.testing.assert_allclose(np.asarray(got), want, atol=2e-6)
  assert collectives(compiled) == ["all-reduce"]
  assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("b")), 3)
