"""The bridge to the compiled kernels: what its handlers refuse, its transforms, its choice, its bits."""

import dataclasses
import functools
import mmap
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from running import assert_same_bits, both, collectives, needs_kernels, normal, pretend_gpu

import vsa_jax
from vsa_jax import TileLayout, video_sparse_attention
from vsa_jax.block_sparse import ffi
from vsa_jax.block_sparse.base import Problem
from vsa_jax.block_sparse.choice import choose
from vsa_jax.testing import Case, Results, attend, make_inputs, run

pytestmark = needs_kernels

CASE = Case("bridge", query_tiles=4, key_tiles=5, heads=4, kv_heads=2, batch=2, prefix=1, dense=1)


def struct(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


# Handlers called as nobody should call them: B 2, Jq 4, Jk 5, M 4, N 4, K 2, H 8, R 3, W 3.


def good_call(backward):
  """(target, operands by name, results by name, attributes) of a right call."""
  inputs = make_inputs(CASE, 4, 8, jnp.float32)
  operands = {
    "query": inputs.query,
    "key": inputs.key,
    "value": inputs.value,
    "indices": inputs.selection.indices,
    "counts": inputs.selection.counts,
    "query_sizes": jnp.asarray(inputs.query_tile_sizes),
    "key_sizes": jnp.asarray(inputs.tile_sizes),
  }
  results = {"out": struct(2, 16, 4, 8), "lse": struct(2, 4, 16)}
  if backward:
    operands |= {
      "lse": jnp.zeros((2, 4, 16)),
      "d_out": inputs.d_out,
      "delta": jnp.zeros((2, 4, 16)),
    }
    results = {"d_query": struct(2, 16, 4, 8), "d_key": struct(2, 20, 2, 8)}
    results["d_value"] = results["d_key"]
  attributes = {
    "scale": np.float64(1),
    "num_prefix_tiles": np.int64(1),
    "num_dense_rows": np.int64(1),
  }
  return f"vsa_{'backward' if backward else 'forward'}_cpu", operands, results, attributes


def call(target, operands, results, attributes):
  vsa_jax.register_kernels()
  return jax.ffi.ffi_call(target, tuple(results.values()))(*operands.values(), **attributes)


@pytest.mark.parametrize("backward", [False, True])
def test_the_right_call(backward):
  made = call(*good_call(backward))
  assert all(np.isfinite(np.asarray(x)).all() for x in made)


WRONG = [
  ("query", lambda x: x[0], r"query: got shape \[16, 4, 8\], want \[B, Jq\*M, N, H\]"),
  ("query", lambda x: x.astype(jnp.int32), "query: got int32, want float16, bfloat16, float32 or"),
  ("query", lambda x: x[:, :15], "query: got 15 tokens, want a multiple of query_sizes' 4 tiles"),
  ("query", lambda x: x[:, :0], "query: got 0 tokens, want a multiple"),
  ("query", lambda x: x[..., :0], "query: got shape .*, want at least one head and one head dim"),
  ("query", lambda x: x[:, :, :3], "key: got 2 heads, want a divisor of query's 3"),
  ("query", lambda x: x[:1], r"key: got float32\[2, 20, 2, 8\], want float32\[1, 20, 2, 8\]"),
  ("key", lambda x: x[:, :, :0], "key: got 0 heads, want a divisor"),
  ("key", lambda x: x[:, :16], r"key: got float32\[2, 16, 2, 8\], want float32\[2, 20, 2, 8\]"),
  ("value", lambda x: x.astype(jnp.float16), r"value: got float16\[.*\], want float32\["),
  (
    "value",
    lambda x: x[..., :4],
    r"value: got float32\[2, 20, 2, 4\], want float32\[2, 20, 2, 8\]",
  ),
  ("indices", lambda x: x.astype(jnp.float32), r"indices: got float32\[.*\], want int32\["),
  ("indices", lambda x: x[:, :, :2], r"indices: got int32\[2, 4, 2, 3\], want int32\[2, 4, 3, 3\]"),
  ("indices", lambda x: x[0], r"indices: got shape \[4, 3, 3\], want \[B, N, R, W\]"),
  ("counts", lambda x: x[..., None], r"counts: got int32\[2, 4, 3, 1\], want int32\[2, 4, 3\]"),
  ("query_sizes", lambda x: x[0], r"query_sizes: got shape \[4\], want \[B, Jq\]"),
  ("query_sizes", lambda x: x[:, :0], "query: got 16 tokens, want a multiple of query_sizes' 0"),
  ("query_sizes", lambda x: x.astype(jnp.uint8), r"query_sizes: got uint8.*, want int32\[2, 4\]"),
  ("key_sizes", lambda x: x[:, :0], r"key_sizes: got 0 tiles, want 1 to"),
  ("key_sizes", lambda x: x[:1], r"key_sizes: got int32\[1, 5\], want int32\[2, 5\]"),
  ("lse", lambda x: x[..., :4], r"lse: got float32\[2, 4, 4\], want float32\[2, 4, 16\]"),
  ("d_out", lambda x: x[:, :4], r"d_out: got float32\[2, 4, 4, 8\], want float32\[2, 16, 4, 8\]"),
  ("delta", lambda x: x.astype(jnp.float16), r"delta: got float16\[.*\], want float32\["),
  ("scale", lambda x: np.float64("nan"), "scale: got nan, want a finite number > 0"),
  ("scale", lambda x: np.float64(0), "scale: got 0.0*, want a finite number > 0"),
  ("scale", lambda x: np.float32(0.75), "Failed to decode all FFI handler operands"),
  (
    "num_prefix_tiles",
    lambda x: np.int64(6),
    "num_prefix_tiles: got 6, want 0 to 5, the key tiles",
  ),
  ("num_prefix_tiles", lambda x: np.int64(-1), "num_prefix_tiles: got -1, want 0 to 5"),
  ("num_dense_rows", lambda x: np.int64(5), "num_dense_rows: got 5, want 0 to 4, the query tiles"),
  ("num_dense_rows", lambda x: np.int64(0), r"indices: got int32\[2, 4, 3, 3\], want .*4, 4, 3\]"),
]
WRONG_RESULTS = [
  ("out", struct(2, 16, 4, 9), r"out: got float32\[2, 16, 4, 9\], want float32\["),
  ("lse", struct(2, 16, 4), r"lse: got float32\[2, 16, 4\], want float32\[2, 4, 16\]"),
  ("d_query", struct(1), r"d_query: got float32\[1\], want float32\[2, 16, 4, 8\]"),
  ("d_key", struct(2, 20, 4, 8), r"d_key: got .*, want float32\[2, 20, 2, 8\]"),
  ("d_value", struct(2, 20, 2, 8, dtype=jnp.bfloat16), r"d_value: got bfloat16\["),
]
ids = lambda x: x if isinstance(x, str) and x.isidentifier() else ""


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=ids)
def test_a_wrong_argument_is_refused(name, change, message):
  seen = 0
  for backward in (False, True):
    target, operands, results, attributes = good_call(backward)
    for part in (operands, attributes):
      if name in part:
        part[name] = change(part[name])
        refused(message, target, operands, results, attributes)
        seen += 1
  assert seen


@pytest.mark.parametrize(("name", "wrong", "message"), WRONG_RESULTS, ids=ids)
def test_a_wrong_result_is_refused(name, wrong, message):
  target, operands, results, attributes = good_call(backward=name.startswith("d_"))
  refused(message, target, operands, results | {name: wrong}, attributes)


def refused(message, *arguments):
  with pytest.raises(jax.errors.JaxRuntimeError, match=message):
    jax.block_until_ready(call(*arguments))


def test_a_missing_operand_or_result_is_refused():
  target, operands, results, attributes = good_call(False)
  few = dict(list(operands.items())[:3])
  refused("operands: got 3, want 7", target, few, results, attributes)
  refused("results: got 1, want 2", target, operands, {"out": results["out"]}, attributes)


def test_an_empty_batch_is_nothing_to_do():
  for backward in (False, True):
    target, operands, results, attributes = good_call(backward)
    operands = {name: x[:0] for name, x in operands.items()}
    results = {name: struct(0, *x.shape[1:]) for name, x in results.items()}
    for made, want in zip(
      call(target, operands, results, attributes), results.values(), strict=True
    ):
      assert made.shape == want.shape


# Numbers.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_16_bit_number(dtype):
  """One key: the output is the value, through float32 and back; then rounding to nearest even."""
  numbers = jnp.arange(2**16, dtype=jnp.uint16).view(dtype)
  shape = (1, 1, 1, 2**16)
  layout = TileLayout([1], (1, 1, 1))
  zero = jnp.zeros(shape, dtype)
  run = jax.jit(
    functools.partial(video_sparse_attention, layout=layout, sparsity=0, implementation="cpu")
  )
  got = np.asarray(run(zero, zero, numbers.reshape(shape)), np.float32).ravel()
  want = np.array(numbers, np.float32)
  if dtype == jnp.bfloat16:  # which has float32's denormals, and those are flushed
    want[np.abs(want) < np.finfo(np.float32).tiny] *= 0
  np.testing.assert_array_equal(got, want)

  pair = jnp.stack([numbers, numbers[::-1] * jnp.asarray(0.37, dtype)])
  pair = jnp.where(jnp.isfinite(pair).all(0), pair, 1).reshape(1, 2, 1, -1)
  zero, two = jnp.zeros((1, 2, 1, 2**16), dtype), TileLayout([2], (1, 1, 2))
  got = video_sparse_attention(zero, zero, pair, two, sparsity=0, implementation="cpu")[0, 0, 0]
  mean = (pair[0, 0, 0].astype(jnp.float32) + pair[0, 1, 0].astype(jnp.float32)) * 0.5
  normal_numbers = np.abs(np.asarray(mean)) > float(np.finfo(np.float32).tiny)
  want = mean.astype(dtype)
  np.testing.assert_array_equal(np.asarray(got)[normal_numbers], np.asarray(want)[normal_numbers])


def test_logits_of_infinity():
  """As dense attention: all of a row -inf is NaN, some of it is no weight, +inf is NaN."""
  query = jnp.ones((1, 3, 1, 1))
  value = jnp.asarray([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
  layout = TileLayout([3], (1, 1, 1))
  attend = functools.partial(
    video_sparse_attention, layout=layout, sparsity=0, implementation="cpu", return_aux=True
  )
  for key, want in [([-np.inf] * 3, np.nan), ([-np.inf, 0, -np.inf], 2), ([0, np.inf, 0], np.nan)]:
    out, aux = attend(query, jnp.asarray(key, jnp.float32).reshape(1, 3, 1, 1), value)
    np.testing.assert_array_equal(np.asarray(out).ravel(), np.full(3, want))
    np.testing.assert_array_equal(np.isnan(aux.lse), np.full((1, 3, 1), np.isnan(want)))


def test_offsets_past_two_to_the_31():
  """The last tile of keys lies there; what is not read takes no memory."""
  tile, dim = 64, 128
  tiles = 2**31 // (tile * dim) + 2
  count = tiles * tile * dim
  memory = np.frombuffer(mmap.mmap(-1, 2 * count), np.float16).reshape(1, tiles * tile, 1, dim)
  memory[:, -tile:] = np.random.default_rng(0).standard_normal((tile, 1, dim))
  keys = jax.dlpack.from_dlpack(memory)
  query = normal(1, 1, tile, 1, dim, dtype=jnp.float16)
  selection = vsa_jax.TileSelection(
    jnp.full((1, 1, 1, 1), tiles - 1), jnp.ones((1, 1, 1), jnp.int32), num_key_tiles=tiles
  )
  sizes = ffi.Sizes(jnp.full((1, 1), tile), jnp.full((1, tiles), tile))
  got, _ = ffi.Cpu().forward(query, keys, keys, selection, sizes, scale=1 / 11, precision=None)
  last = jnp.asarray(memory[:, -tile:])
  want = jax.nn.dot_product_attention(
    *(x.astype(jnp.float32) for x in (query, last, last)), scale=1 / 11
  )
  np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-3)


CHILD = """
import os, sys
if sys.argv[2] == "one thread":
  os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax.numpy as jnp, numpy as np
sys.path.insert(0, "tests")
from test_ffi import BITS, numbers_of
np.savez(sys.argv[1], **numbers_of(BITS))
"""
BITS = Case("bits", query_tiles=6, key_tiles=6, heads=4, kv_heads=2, prefix=1, dense=1, ragged=True)


def numbers_of(case):
  """Outputs and gradients in three dtypes, as NumPy arrays of numbers."""
  return {
    f"{dtype} {name}": np.asarray(x, np.float32)
    for dtype in ("float32", "bfloat16")
    for name, x in zip(
      Results._fields, run(make_inputs(case, 72, 40, jnp.dtype(dtype)), "cpu"), strict=True
    )
  }


def test_same_bits_on_one_thread_and_alike_with_other_instructions(tmp_path):
  here = pathlib.Path(__file__).parents[1]
  children = {}
  for name in ("one thread", "avx2", "baseline"):
    command = [sys.executable, "-c", CHILD, str(tmp_path / f"{name}.npz"), name]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), *sys.path]))
    if name != "one thread":
      environment["VSA_JAX_CPU_INSTRUCTIONS"] = name
    children[name] = subprocess.Popen(command, cwd=here, env=environment)
  mine = numbers_of(BITS)
  for name, child in children.items():
    assert child.wait(timeout=300) == 0
    theirs = np.load(tmp_path / f"{name}.npz")
    for key, want in mine.items():
      if name == "one thread":
        assert_same_bits(theirs[key], want)
      else:
        ulp = 2e-6 if key.startswith("float32") else 2**-7
        largest = np.abs(want[np.isfinite(want)]).max()
        np.testing.assert_allclose(theirs[key], want, rtol=0, atol=ulp * largest, err_msg=key)


# Transforms, beside the contract's.


def test_any_nest_of_vmaps_is_one_call():
  inputs = make_inputs(CASE, 4, 8, jnp.float32)

  def gradients(query, key, d_out):
    (out, lse), vjp = jax.vjp(lambda q, k: attend(inputs, "cpu", q, k, inputs.value), query, key)
    return out, lse, vjp((d_out, jnp.zeros_like(lse)))

  queries = normal(1, 3, *inputs.query.shape)
  keys = normal(2, 2, *inputs.key.shape)
  mapped = jax.jit(jax.vmap(jax.vmap(gradients, (0, None, None)), (None, 0, None)))
  program = mapped.lower(queries, keys, inputs.d_out).as_text()
  for target in ("vsa_forward_cpu", "vsa_backward_cpu"):
    assert program.count(f"custom_call @{target}") == 1
  assert "while" not in program
  got = mapped(queries, keys, inputs.d_out)
  for i, j in np.ndindex(2, 3):
    want = jax.jit(gradients)(queries[j], keys[i], inputs.d_out)
    jax.tree.map(lambda a, b, at=(i, j): np.testing.assert_allclose(a[at], b, atol=1e-5), got, want)


@pytest.mark.parametrize("implementation", ["cpu", None])
def test_a_gradient_of_a_gradient(implementation):
  inputs = make_inputs(CASE, 4, 8, jnp.float32)

  def second(implementation):
    loss = lambda q: (attend(inputs, implementation, q, inputs.key, inputs.value)[0] ** 2).sum()
    return jax.jit(jax.grad(lambda q: (jax.grad(loss)(q) * inputs.d_out).sum()))(inputs.query)

  np.testing.assert_allclose(second(implementation), second("reference"), atol=2e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_the_kernel_runs_on_shards_without_collectives(kind):
  mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(kind,) * 2)
  sharding = NamedSharding(mesh, P("b", None, "h"))
  layout = TileLayout([3, (2, 2, 3)], (1, 2, 2))
  plain = [normal(i, 4, layout.num_tokens, 4, 8) for i in range(4)]
  attend = functools.partial(
    video_sparse_attention,
    layout=layout,
    topk=1,
    sharding=sharding if kind == AxisType.Auto else None,
  )
  run = both(lambda q, k, v: attend(q, k, v))
  compiled = run.lower(*(jax.device_put(x, sharding) for x in plain)).compile()
  assert collectives(compiled) == []
  text = compiled.as_text()
  for target in ("vsa_forward_cpu", "vsa_backward_cpu"):
    assert f'custom_call_target="{target}"' in text


LOADER = """
import sys
import jax, jax.export, numpy as np
import vsa_jax
vsa_jax.register_kernels()
arrays = np.load(sys.argv[1])
program = jax.export.deserialize(bytearray(open(sys.argv[2], "rb").read()))
np.save(sys.argv[3], program.call(arrays["query"], arrays["key"], arrays["value"]))
"""


def test_an_exported_kernel_runs_in_another_process(tmp_path):
  inputs = make_inputs(CASE, 4, 8, jnp.float32)
  gradient = jax.jit(jax.grad(lambda q, k, v: attend(inputs, "cpu", q, k, v)[0].sum()))
  with pytest.raises(ValueError, match="vsa_forward_cpu"):
    jax.export.export(gradient)(*inputs[:3])
  exported = jax.export.export(gradient, disabled_checks=vsa_jax.EXPORT_CHECKS)(*inputs[:3])
  arrays, program, result = (tmp_path / name for name in ("in.npz", "program", "out.npy"))
  np.savez(arrays, query=inputs.query, key=inputs.key, value=inputs.value)
  program.write_bytes(exported.serialize())
  environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
  command = [sys.executable, "-c", LOADER, str(arrays), str(program), str(result)]
  subprocess.run(command, check=True, env=environment, timeout=300)
  assert_same_bits(np.load(result), gradient(*inputs[:3]))


# Choice.

LAYOUT = TileLayout([64, (8, 8, 8)], (4, 4, 4))
PROBLEM = Problem(jnp.dtype("bfloat16"), 1, 4, 2, 64, 64, 9, 9, 3)


def test_none_is_the_kernel_on_a_cpu():
  x = struct(1, LAYOUT.num_tokens, 2, 16)
  run = jax.jit(lambda x: video_sparse_attention(x, x, x, LAYOUT, topk=1))
  assert "vsa_forward_cpu" in run.lower(x).as_text()
  assert "vsa_forward_cpu" not in run.trace(x).lower(lowering_platforms=("tpu",)).as_text()
  told = vsa_jax.explain(x, x, x, LAYOUT, topk=1)
  assert told.chosen == "cpu"
  assert told.elsewhere == {"": "xla"}
  assert "compiled for any other platform, it runs xla" in str(told)


def test_without_the_compiled_part_everything_else_works(monkeypatch):
  monkeypatch.setattr(ffi, "_compiled", None)
  ffi.register_kernels.cache_clear()
  x = normal(0, 1, LAYOUT.num_tokens, 2, 16)
  told = vsa_jax.explain(x, x, x, LAYOUT, topk=1)
  assert told.chosen == "xla"
  assert told.elsewhere == {}
  for name in ("cpu", "cuda"):
    assert "the compiled part is not installed" in told.reasons[name]
    assert "no C++17 compiler worked" in told.reasons[name]
    with pytest.raises(NotImplementedError, match="get GCC or Clang and install vsa_jax anew"):
      video_sparse_attention(x, x, x, LAYOUT, topk=1, implementation=name)
  assert "not installed" in ffi.build_summary()[0]
  with pytest.raises(NotImplementedError, match="register_kernels: the compiled part"):
    vsa_jax.register_kernels()
  run = jax.jit(lambda x: video_sparse_attention(x, x, x, LAYOUT, topk=1))
  want = video_sparse_attention(x, x, x, LAYOUT, topk=1, implementation="xla")
  np.testing.assert_array_equal(run(x), want)


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({}, None),
    ({"dtype": jnp.dtype("float32")}, "dtype float32; its kernels take bfloat16, float16"),
    ({"head_dim": 96}, "head_dim 96; its kernels take 64, 128"),
    ({"tile_size": 32}, "tile size 32; its kernels take 64, 128, 256"),
  ],
)
def test_what_cuda_takes(monkeypatch, change, reason):
  pretend_gpu(monkeypatch)
  got = ffi.Cuda().supports(dataclasses.replace(PROBLEM, **change))
  assert (got is None) if reason is None else re.search(reason, got)


def test_cuda_in_the_program_for_cuda_alone(monkeypatch):
  pretend_gpu(monkeypatch)
  chosen = choose(None, PROBLEM, partitioned=False)
  assert [chosen.on(p).name for p in ("cpu", "cuda", "tpu")] == ["cpu", "cuda", "xla"]
  x = struct(2, LAYOUT.num_tokens, 2, 64, dtype=jnp.bfloat16)

  def loss(x):
    return video_sparse_attention(x, x, x, LAYOUT, topk=1).astype(jnp.float32).sum()

  traced = jax.jit(jax.vmap(jax.grad(loss))).trace(struct(3, *x.shape, dtype=x.dtype))
  for platform, target in (("cuda", "vsa_{}_cuda"), ("cpu", "vsa_{}_cpu"), ("tpu", None)):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    for rule in ("forward", "backward"):
      assert text.count("custom_call @vsa_" + rule) == (target is not None)
      assert target is None or target.format(rule) in text
    # The workspace of the folded batch, 3 * 2.
    assert ("tensor<6000xui8>" in text) == (platform == "cuda")
