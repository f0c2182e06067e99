"""Dispatch, messages, install, docs."""

import importlib.metadata
import pathlib
import re
import tomllib

import jax
import jax.export
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from numpy_oracle import vsa
from running import normal, pretend_gpu, qkv, untile, with_gradients

import vsa_jax
from vsa_jax import TileLayout, tile_tokens, video_sparse_attention

ROOT = pathlib.Path(__file__).parents[2]
SEGMENTS, TILE = [3, (2, 2, 3)], (1, 2, 2)
LAYOUT = TileLayout(SEGMENTS, TILE)


def _refused(name, message):
  layout = TileLayout([(8, 8, 8)], (4, 4, 4))
  x = jax.ShapeDtypeStruct((1, layout.num_tokens, 2, 64), jnp.bfloat16)
  attend = lambda x: video_sparse_attention(x, x, x, layout, topk=1, implementation=name)
  with pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(attend, x)
  assert vsa_jax.explain(x, x, x, layout, topk=1).chosen != name


def test_L01_install_without_nvcc(monkeypatch):
  pretend_gpu(monkeypatch, has_cuda=False, cuda="no working nvcc was found")
  _refused("cuda", r"no working nvcc was found; put nvcc of CUDA 12.5 or newer on PATH and install")


def test_L03_handlers_newer_than_the_runtime(monkeypatch):
  pretend_gpu(monkeypatch, jaxlib="9999.0")
  for name in ("cpu", "cuda"):
    _refused(name, rf"jaxlib 9999.0, newer than jaxlib {jaxlib.__version__} here; install vsa_jax")
  with pytest.raises(NotImplementedError, match="newer than jaxlib"):  # and nothing is registered
    vsa_jax.register_kernels.__wrapped__()


def test_L09_an_old_gpu(monkeypatch):
  pretend_gpu(monkeypatch, capability="7.5")
  _refused("cuda", r"NVIDIA X has compute capability 7.5; its kernels run on 9.0 \(H100, H200")


@pytest.mark.parametrize("name", ["cuda", "pallas"])
def test_L06_unclear_error(name):
  x = jax.ShapeDtypeStruct((1, 15, 2, 8), jnp.float32)
  attend = lambda *x: video_sparse_attention(*x, LAYOUT, topk=1, implementation=name)
  with pytest.raises(NotImplementedError) as caught:
    jax.eval_shape(attend, x, x, x)
  message = str(caught.value)
  assert re.search(f"'{name}' cannot run this call: .{{20,}}", message)  # the cause
  assert "These can: ['xla'" in message  # and the remedy
  assert "None takes the best" in message
  explanation = vsa_jax.explain(x, x, x, LAYOUT, topk=1, implementation=name)
  assert explanation.chosen is None
  assert explanation.reasons[name]
  assert explanation.reasons[name] in str(explanation)
  with pytest.raises(ValueError, match="got 'triton', want one of"):
    jax.eval_shape(
      lambda *x: video_sparse_attention(*x, LAYOUT, topk=1, implementation="triton"), x, x, x
    )


def test_L07_dispatch_by_platform():
  operands = qkv(70, 1, 15, 2, 8)
  want = vsa(*operands, SEGMENTS, TILE, 1).out
  attend = lambda *x: video_sparse_attention(*x, LAYOUT, topk=1)
  committed = jax.device_put(operands, jax.devices("cpu")[0])
  step = lambda query, _: (attend(query, *committed[1:]), None)
  np.testing.assert_allclose(jax.jit(attend)(*committed), want, atol=2e-6)
  out, _ = jax.jit(lambda query: jax.lax.scan(step, query, None, length=1))(committed[0])
  np.testing.assert_allclose(out, want, atol=2e-6)
  # One program for several platforms runs on this one, and holds no kernel for the others.
  exported = jax.export.export(
    jax.jit(attend), platforms=("cpu", "cuda", "tpu"), disabled_checks=vsa_jax.EXPORT_CHECKS
  )(*operands)
  np.testing.assert_allclose(exported.call(*operands), want, atol=2e-6)
  assert not re.search(r"mosaic|triton|tpu_custom_call|vsa_forward_cuda", exported.mlir_module())


@pytest.mark.parametrize("grid", [(18, 48, 80), (18, 45, 80)], ids=str)
def test_L11_unclear_limits(implementation, grid):
  tile = (6, 8, 8)
  layout = TileLayout([grid], tile)
  assert layout.num_tiles == 180
  x = jnp.arange(layout.num_tokens)[None]
  np.testing.assert_array_equal(untile(jax.jit(tile_tokens)(x, layout), layout), x)
  shape = jax.ShapeDtypeStruct((1, layout.num_tokens, 2, 64), jnp.bfloat16)
  attend = lambda *x: video_sparse_attention(
    *x, layout, sparsity=0.9, gate=jnp.zeros(()), implementation=implementation
  )
  out = jax.eval_shape(attend, shape, shape, shape)
  assert (out.shape, out.dtype) == (shape.shape, shape.dtype)


def test_L11_the_tile_of_the_report(implementation):
  grid, tile = (6, 11, 8), (6, 8, 8)
  operands, d_out = qkv(110, 1, 528, 1, 8), normal(113, 1, 528, 1, 8)
  layout = TileLayout([grid], tile)
  out, gradients = with_gradients(
    lambda *x: video_sparse_attention(*x, layout, topk=1, implementation=implementation),
    d_out,
    *operands,
  )
  want = vsa(*operands, [grid], tile, 1, d_out=d_out)
  np.testing.assert_allclose(out, want.out, atol=5e-6)
  truths = want.fine.d_query, want.fine.d_key, want.fine.d_value
  for got, truth in zip(gradients, truths, strict=True):
    np.testing.assert_allclose(got, truth, atol=1e-5)


def test_L12_dependency_pin():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  pins = {re.match(r"[\w-]+", line)[0]: line for line in project["dependencies"]}
  assert {"jax", "flax", "numpy"} <= pins.keys()
  for line in pins.values():
    assert not re.search(r"<|==|~=", line), f"{line}: an upper bound blocks installs"
  for name in ("jax", "flax", "numpy"):
    lowest = re.search(r">=([\d.]+)", pins[name])[1]
    number = lambda version: [int(n) for n in re.findall(r"\d+", version)[:3]]
    assert number(importlib.metadata.version(name)) >= number(lowest)


def test_L13_first_use():
  blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
  snippet = blocks[0]
  assert 0 < len(snippet.splitlines()) <= 15
  assert "vsa_jax" in snippet
  exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})


def test_L15_interpret_mode(implementation):
  # Three blocks and more, a ragged tail, NaN in the padding, whatever mode this implementation runs in.
  segments, tile = [5, (3, 4, 7)], (2, 2, 4)
  layout = TileLayout(segments, tile)
  assert layout.num_tiles == 9
  operands, d_out = qkv(150, 1, layout.num_tokens, 2, 16), normal(153, 1, layout.num_tokens, 2, 16)
  padding = (np.arange(16) >= layout.tile_sizes[:, None]).reshape(1, -1, 1, 1)
  tiled = [jnp.where(padding, jnp.nan, jax.jit(tile_tokens)(x, layout)) for x in (d_out, *operands)]
  out, gradients = with_gradients(
    lambda *x: video_sparse_attention(
      *x, layout, topk=3, tiled=True, implementation=implementation
    ),
    *tiled,
  )
  want = vsa(*operands, segments, tile, 3, d_out=d_out)
  truths = want.out, want.fine.d_query, want.fine.d_key, want.fine.d_value
  for got, truth in zip((out, *gradients), truths, strict=True):
    np.testing.assert_allclose(untile(got, layout), truth, atol=5e-6)
    np.testing.assert_array_equal(jnp.where(padding, got, 0), 0.0)
