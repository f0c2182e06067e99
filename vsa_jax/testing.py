"""What every implementation of block-sparse attention must do, as a pytest class to subclass.

    from vsa_jax.testing import ImplementationContract

    class TestMine(ImplementationContract):
      implementation = my_object          # as `implementation=` takes it
      shapes = ((64, 128),)               # (tile size, head dim) pairs to test with
      dtypes = ("bfloat16",)

The gate is relative: against a NumPy float64 reference, an implementation may err twice (forward) or three
times (backward) as much as plain dense attention of the same precision and block mask does, plus two
units in the last place of the largest result; sixteen in float32 and float64, where sums are no wider than
results and a small problem's dense attention may err by nearly nothing.  Float32 products are full float32
also on a GPU, whose default is TF32.  Inputs and the plain attention are made on the CPU where JAX has it
(`JAX_PLATFORMS=cuda,cpu`): it compiles faster.  The extra `test` brings what this module imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vsa_jax.arguments import valid_slots
from vsa_jax.block_sparse.api import block_sparse_attention
from vsa_jax.selection import TileSelection


@dataclasses.dataclass(frozen=True)
class Case:
  """A selection problem, but for tile size, head dim and dtype."""

  name: str
  query_tiles: int = 5
  key_tiles: int = 5
  heads: int = 2
  kv_heads: int = 2
  batch: int = 1
  prefix: int = 0
  dense: int = 0
  width: int = 3
  counts: str = "any"  # "any" of 0..width, "full", or "none"
  duplicates: bool = False
  ragged: bool = False  # tile sizes of 0..M per sample, else all full

  def __str__(self) -> str:
    return self.name


CASES = (
  Case("plain", counts="full"),
  Case("counts", query_tiles=7, key_tiles=7, width=4),
  Case("prefix", query_tiles=6, key_tiles=6, prefix=2, dense=2, batch=2),
  Case("gqa", heads=4, kv_heads=2, prefix=1, dense=1, ragged=True),
  Case("mqa", heads=3, kv_heads=1, width=2, ragged=True),
  Case("cross", query_tiles=3, key_tiles=8, width=5, ragged=True),
  Case("more_queries", query_tiles=9, key_tiles=2, width=2),
  Case("duplicates", width=6, duplicates=True, ragged=True),
  Case("no_keys", counts="none"),
  Case("no_lists", width=0, prefix=2, dense=1),
  Case("all_kept", width=0, prefix=5, dense=5, ragged=True),
  Case("all_kept_by_rows", width=0, prefix=5, dense=0, heads=4, kv_heads=2),
  Case("dense_rows_only", width=0, dense=5, heads=4, kv_heads=2, ragged=True),
  Case("one_tile", query_tiles=1, key_tiles=1, width=1, counts="full"),
  Case("ragged", query_tiles=6, key_tiles=6, batch=3, ragged=True),
)


class Inputs(NamedTuple):
  """Arguments of block_sparse_attention and cotangents of its two results."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  selection: TileSelection
  tile_sizes: np.ndarray
  query_tile_sizes: np.ndarray
  d_out: jax.Array
  d_lse: jax.Array


class Results(NamedTuple):
  """Outputs and gradients."""

  out: Any
  lse: Any
  d_query: Any
  d_key: Any
  d_value: Any


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
  try:
    return jax.default_device(jax.local_devices(backend="cpu")[0])
  except RuntimeError:
    return contextlib.nullcontext()


def make_inputs(case: Case, tile_size: int, head_dim: int, dtype: Any, *, seed: int = 0) -> Inputs:
  """Random inputs of a case; padding is zero."""
  with _on_cpu():
    return _make_inputs(case, tile_size, head_dim, dtype, seed)


def _make_inputs(case: Case, tile_size: int, head_dim: int, dtype: Any, seed: int) -> Inputs:
  rng = np.random.default_rng([seed, zlib.crc32(case.name.encode()), tile_size, head_dim])
  rows = case.query_tiles - case.dense
  lists = (case.batch, case.heads, rows)
  candidates = np.arange(case.prefix, case.key_tiles)
  if case.duplicates:
    ids = rng.choice(candidates, (*lists, case.width))
  else:
    ids = rng.permuted(np.broadcast_to(candidates, (*lists, candidates.size)), axis=-1)[
      ..., : case.width
    ]
  low, high = {"any": (0, case.width), "full": (case.width,) * 2, "none": (0, 0)}[case.counts]
  counts = rng.integers(low, high + 1, lists)
  ids = np.where(np.arange(case.width) < counts[..., None], ids, case.key_tiles)
  selection = TileSelection(
    jnp.asarray(ids, jnp.int32),
    jnp.asarray(counts, jnp.int32),
    case.prefix,
    num_dense_rows=case.dense,
    num_key_tiles=case.key_tiles,
  )

  def sizes(tiles: int) -> np.ndarray:
    low = 0 if case.ragged else tile_size
    return rng.integers(low, tile_size + 1, (case.batch, tiles)).astype(np.int32)

  query_sizes, key_sizes = sizes(case.query_tiles), sizes(case.key_tiles)

  def tokens(sizes: np.ndarray, *trailing: int) -> jax.Array:
    x = rng.standard_normal((case.batch, sizes.shape[1] * tile_size, *trailing))
    return padded(jnp.asarray(x, dtype), sizes, 0)

  query, d_out = (tokens(query_sizes, case.heads, head_dim) for _ in range(2))
  key, value = (tokens(key_sizes, case.kv_heads, head_dim) for _ in range(2))
  d_lse = tokens(query_sizes, case.heads).astype(jnp.promote_types(dtype, jnp.float32))
  return Inputs(query, key, value, selection, key_sizes, query_sizes, d_out, d_lse)


def padded(x: jax.Array, sizes: Any, fill: float) -> jax.Array:
  """x [B, J*M, ...] with `fill` in its padded slots."""
  sizes = jnp.asarray(sizes)
  valid = valid_slots(sizes, x.shape[1] // sizes.shape[1])
  return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, jnp.asarray(fill, x.dtype))


def run(inputs: Inputs, implementation: Any, **options: Any) -> Results:
  """One forward and backward, jitted."""
  return _run(implementation, tuple(options.items()), inputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(implementation: Any, options: tuple[tuple[str, Any], ...], inputs: Inputs) -> Results:
  function = functools.partial(attend, inputs, implementation, **dict(options))
  (out, lse), vjp = jax.vjp(function, *inputs[:3])
  return Results(out, lse, *vjp((inputs.d_out, inputs.d_lse)))


def attend(
  inputs: Inputs, implementation: Any, query: Any, key: Any, value: Any, **options: Any
) -> Any:
  """(out, lse) of other operands with the lists and sizes of `inputs`."""
  return block_sparse_attention(
    query,
    key,
    value,
    inputs.selection,
    tile_sizes=inputs.tile_sizes,
    query_tile_sizes=inputs.query_tile_sizes,
    implementation=implementation,
    return_lse=True,
    **options,
  )


def run_reference(inputs: Inputs, *, scale: float | None = None) -> Results:
  """The truth: NumPy in float64, from the definition, with hand-derived gradients."""
  times = _token_multiplicity(inputs)
  q, k, v, d_out, d_lse = (
    np.asarray(x, np.float64)
    for x in (inputs.query, inputs.key, inputs.value, inputs.d_out, inputs.d_lse)
  )
  batch, _, heads, dim = q.shape
  kv_heads = k.shape[2]
  scale = dim**-0.5 if scale is None else scale
  k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
  some: np.ndarray = np.any(times > 0, axis=-1)  # [B, N, Pq]
  logits = np.einsum("bqnh,bknh->bnqk", q, k) * scale
  top = np.where(times > 0, logits, -np.inf).max(-1, keepdims=True, initial=-np.inf)
  top = np.where(top == -np.inf, 0, top)
  weights = times * np.exp(np.where(times > 0, logits - top, 0))
  total = weights.sum(-1, keepdims=True)
  weights /= np.where(total == 0, 1, total)
  out = np.einsum("bnqk,bknh->bqnh", weights, v)
  lse = np.where(some, (top + np.log(np.where(total == 0, 1, total)))[..., 0], -np.inf)

  d_out = np.where(np.moveaxis(some, 1, 2)[..., None], d_out, 0)
  d_lse = np.where(some, np.moveaxis(d_lse, 1, 2), 0)
  d_weights = np.einsum("bqnh,bknh->bnqk", d_out, v)
  delta = (weights * d_weights).sum(-1) - d_lse
  d_logits = weights * (d_weights - delta[..., None]) * scale

  def to_kv_heads(x: np.ndarray) -> np.ndarray:
    return x.reshape(batch, -1, kv_heads, heads // kv_heads, dim).sum(3)

  return Results(
    out,
    np.moveaxis(lse, 1, 2),
    np.einsum("bnqk,bknh->bqnh", d_logits, k),
    to_kv_heads(np.einsum("bnqk,bqnh->bknh", d_logits, q)),
    to_kv_heads(np.einsum("bnqk,bqnh->bknh", weights, d_out)),
  )


def run_twin(inputs: Inputs, *, scale: float | None = None) -> Results:
  """Plain dense attention under the same block mask, in the inputs' own precision."""
  scale = inputs.query.shape[3] ** -0.5 if scale is None else scale
  with _on_cpu():
    return _twin(scale, jax.tree.map(np.asarray, inputs), _token_multiplicity(inputs))


@functools.partial(jax.jit, static_argnums=0)
def _twin(scale: float, inputs: Inputs, times: jax.Array) -> Results:
  some = (times > 0).any(-1)
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)

  def dense(query, key, value):
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("bqnh,bknh->bnqk", query, key, preferred_element_type=wide) * scale
    logits = jnp.where(times > 0, logits + jnp.log(jnp.maximum(times, 1)), -jnp.inf)
    logits = jnp.where(some[..., None], logits, 0)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - lse[..., None]).astype(query.dtype)
    out = jnp.einsum("bnqk,bknh->bqnh", weights, value, preferred_element_type=wide)
    return out.astype(query.dtype), jnp.moveaxis(lse, 1, 2)

  row = jnp.moveaxis(some, 1, 2)
  (out, lse), vjp = jax.vjp(dense, *inputs[:3])
  d_out = jnp.where(row[..., None], inputs.d_out, 0)
  d_lse = jnp.where(row, inputs.d_lse, 0)
  gradients = vjp((d_out, d_lse.astype(lse.dtype)))
  return Results(jnp.where(row[..., None], out, 0), jnp.where(row, lse, -jnp.inf), *gradients)


def _token_multiplicity(inputs: Inputs) -> np.ndarray:
  """int [B, N, Pq, Pk]: how often a query token sees a key token."""
  selection = inputs.selection
  ids, counts = np.asarray(selection.indices), np.asarray(selection.counts)
  batch, heads, rows, _ = ids.shape
  dense = selection.num_dense_rows
  times = np.zeros((batch, heads, selection.num_query_tiles, selection.num_key_tiles), np.int32)
  times[:, :, :dense] = 1
  times[..., : selection.num_prefix_tiles] = 1
  for b, n, r in np.ndindex(batch, heads, rows):
    np.add.at(times[b, n, dense + r], ids[b, n, r, : counts[b, n, r]], 1)
  size = inputs.query.shape[1] // selection.num_query_tiles
  slots = np.arange(size)

  def valid(sizes: Any) -> np.ndarray:
    return (slots < np.asarray(sizes)[..., None]).reshape(batch, -1)

  times = times.repeat(size, axis=2).repeat(size, axis=3)
  return (
    times
    * valid(inputs.query_tile_sizes)[:, None, :, None]
    * valid(inputs.tile_sizes)[:, None, None, :]
  )


def assert_close(actual: Any, reference: Any, twin: Any, *, name: str, ulps: float = 0) -> None:
  """The gate of the module's docstring; also dtype, NaN and inf positions, and direction.

  Args:
    actual: the result to judge.
    reference: the truth, float64.
    twin: the result of plain dense attention, in actual's dtype.
    name: of `Results`; gradients (d_...) may err three times as much as the twin, others twice.
    ulps: what it may err beyond that, in units in the last place of the largest result, if more
      than the module's docstring says.
  """
  assert actual.dtype == twin.dtype, f"{name}: got {actual.dtype}, want {twin.dtype}"
  assert actual.shape == reference.shape, f"{name}: got {actual.shape}, want {reference.shape}"
  ulp = float(jnp.finfo(actual.dtype).eps)
  ulps = max(ulps, 16 if actual.dtype.itemsize >= 4 else 2)
  actual, twin = (np.asarray(x, np.float64) for x in (actual, twin))
  np.testing.assert_array_equal(np.isnan(actual), np.isnan(reference), f"{name}: NaN positions")
  finite = np.isfinite(reference)
  np.testing.assert_array_equal(actual[~finite], reference[~finite], f"{name}: inf positions")
  a, r, t = actual[finite], reference[finite], twin[finite]
  if not a.size:
    return
  largest = np.abs(r).max()
  factor = 3 if name.startswith("d_") else 2
  error, allowed = np.abs(a - r).max(), factor * np.abs(t - r).max() + ulps * ulp * largest
  assert error <= allowed, f"{name}: largest error {error:.3g}, allowed {allowed:.3g}"
  norms = np.linalg.norm(a) * np.linalg.norm(r)
  if norms:
    assert 1 - a @ r / norms <= max(1e-9, 4 * ulp**2), f"{name}: direction differs"


def assert_close_at_large_logits(got: Results, want: Results, twin: Results) -> None:
  """All results close, where the LSE is far from 0: the backward makes its weights from it, rounded to float32."""
  rounding = 2 + 1.5 * np.abs(want.lse[np.isfinite(want.lse)]).max()
  for name, a, r, t in zip(Results._fields, got, want, twin, strict=True):
    ulps = rounding if a.dtype == jnp.float32 and name.startswith("d_") else 0
    assert_close(a, r, t, ulps=ulps, name=name)


def assert_alike(actual: Any, expected: Any, *, name: str = "") -> None:
  """Two results of one implementation, by two programs: apart by rounding at most.

  Args:
    actual, expected: arrays of one dtype; NaN and inf in the same places.
    name: of the result, for the message.
  """
  assert actual.dtype == expected.dtype, f"{name}: got {actual.dtype}, want {expected.dtype}"
  info = jnp.finfo(actual.dtype)
  ulps = 64 if info.bits >= 32 else 8
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
  tolerance = ulps * float(info.eps) * largest
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=name)


class ImplementationContract:
  """Subclass me; see the module."""

  implementation: Any = None
  shapes: tuple[tuple[int, int], ...] = ((4, 8),)
  dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
  cases: tuple[Case, ...] = CASES

  def pytest_generate_tests(self, metafunc: Any) -> None:
    """Parametrises by the class attributes."""
    if "case" in metafunc.fixturenames:
      metafunc.parametrize("case", self.cases, ids=str)
    if (
      "shape" in metafunc.fixturenames
    ):  # every shape in the first dtype, every dtype in the first shape
      pairs = [(shape, self.dtypes[0]) for shape in self.shapes]
      pairs += [(self.shapes[0], dtype) for dtype in self.dtypes[1:]]
      names = [f"{size}x{dim}-{dtype}" for (size, dim), dtype in pairs]
      metafunc.parametrize(("shape", "dtype"), pairs, ids=names)
    elif "dtype" in metafunc.fixturenames:
      metafunc.parametrize("dtype", self.dtypes)

  @pytest.fixture(autouse=True)
  def _full_float32(self) -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
      yield

  def inputs(self, name: str = "gqa", **options: Any) -> Inputs:
    """Inputs of a named case in the first shape and dtype."""
    case = next(c for c in CASES if c.name == name)
    return make_inputs(case, *self.shapes[0], jnp.dtype(self.dtypes[0]), **options)

  def attend(self, inputs: Inputs, *operands: Any) -> Any:
    """(out, lse) of the implementation under test."""
    return attend(inputs, self.implementation, *(operands or inputs[:3]))

  def run(self, inputs: Inputs, **options: Any) -> Results:
    """Forward and backward of the implementation under test."""
    return run(inputs, self.implementation, **options)

  def test_agrees_with_float64(self, case: Case, shape: tuple[int, int], dtype: str) -> None:
    """Outputs and gradients, random cotangents; the same bits again on repeat."""
    inputs = make_inputs(case, *shape, jnp.dtype(dtype))
    got, want, twin = self.run(inputs), run_reference(inputs), run_twin(inputs)
    for name, a, r, t in zip(Results._fields, got, want, twin, strict=True):
      assert_close(a, r, t, name=name)
    again = self.run(inputs)
    for name, a, b in zip(Results._fields, got, again, strict=True):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b), f"{name} on repeat")

  @pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
  def test_padding_never_matters(self, case: Case, poison: float) -> None:
    """What padded slots of operands and cotangents hold reaches no result; padded results are zero."""
    if not case.ragged:
      case = dataclasses.replace(case, ragged=True)
    inputs = make_inputs(case, *self.shapes[0], jnp.dtype(self.dtypes[0]))
    query_sizes, key_sizes = inputs.query_tile_sizes, inputs.tile_sizes
    bad = inputs._replace(
      query=padded(inputs.query, query_sizes, poison),
      key=padded(inputs.key, key_sizes, poison),
      value=padded(inputs.value, key_sizes, poison),
      d_out=padded(inputs.d_out, query_sizes, poison),
      d_lse=padded(inputs.d_lse, query_sizes, poison),
    )
    clean, dirty = self.run(inputs), self.run(bad)
    for name, a, b in zip(Results._fields, clean, dirty, strict=True):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b), name)
    sizes = (query_sizes,) * 3 + (key_sizes,) * 2
    for name, x, s in zip(Results._fields, dirty, sizes, strict=True):
      want = padded(x, s, -np.inf if name == "lse" else 0)
      np.testing.assert_array_equal(np.asarray(x), np.asarray(want), f"{name} in padding")

  def test_rows_without_keys(self) -> None:
    """out 0, lse -inf, no gradient from any cotangent, NaN included."""
    inputs = self.inputs("no_keys")
    got = self.run(inputs._replace(d_out=inputs.d_out * np.nan, d_lse=inputs.d_lse * np.nan))
    assert (np.asarray(got.lse) == -np.inf).all()
    for name in ("out", "d_query", "d_key", "d_value"):
      assert (np.asarray(getattr(got, name)) == 0).all(), name

  def test_unkept_tiles_never_matter(self) -> None:
    """NaN in tiles that no list keeps reaches nothing, and they get a zero gradient."""
    inputs = self.inputs("plain")
    keep = inputs.selection.indices.at[:].set(jnp.asarray([0, 2, 4]))
    inputs = inputs._replace(selection=dataclasses.replace(inputs.selection, indices=keep))
    size = self.shapes[0][0]
    unkept = np.repeat(np.isin(np.arange(5), [1, 3]), size)
    bad = inputs._replace(
      key=inputs.key.at[:, unkept].set(jnp.nan), value=inputs.value.at[:, unkept].set(jnp.nan)
    )
    clean, dirty = self.run(inputs), self.run(bad)
    for name, a, b in zip(Results._fields, clean, dirty, strict=True):
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b), name)
    assert (np.asarray(dirty.d_key)[:, unkept] == 0).all()
    assert (np.asarray(dirty.d_value)[:, unkept] == 0).all()

  def test_order_of_a_list_is_free(self) -> None:
    """Any order of ids is the same selection."""
    inputs = self.inputs("plain")
    turned = dataclasses.replace(inputs.selection, indices=inputs.selection.indices[..., ::-1])
    got, want = self.run(inputs._replace(selection=turned)), run_reference(inputs)
    for name, a, r, t in zip(Results._fields, got, want, run_twin(inputs), strict=True):
      assert_close(a, r, t, name=name)

  def test_entries_past_the_count_are_never_read(self) -> None:
    """Neither an id in range there, nor -1, nor a huge one."""
    inputs = self.inputs("counts")
    selection = inputs.selection
    past = np.arange(selection.width) >= np.asarray(selection.counts)[..., None]
    want = self.run(inputs)
    for junk in (0, -1, 2**31 - 1):
      ids = jnp.where(past, junk, selection.indices)
      got = self.run(inputs._replace(selection=dataclasses.replace(selection, indices=ids)))
      for name, a, b in zip(Results._fields, got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), f"{name} with {junk}")

  def test_traced_tables_out_of_range(self) -> None:
    """Under a trace an id out of range keeps no key, and counts clip to [0, W]."""
    inputs = self.inputs("plain")
    selection = inputs.selection
    ids = np.asarray(selection.indices).copy()
    for junk in (-1, 5, 2**31 - 1, -(2**31)):
      ids[..., 1] = junk
      got = self.run(
        inputs._replace(
          selection=dataclasses.replace(
            selection, indices=jnp.asarray(ids), counts=jnp.full_like(selection.counts, 99)
          )
        )
      )
      without = dataclasses.replace(
        selection, indices=selection.indices[..., ::2], counts=jnp.full_like(selection.counts, 2)
      )
      want = self.run(inputs._replace(selection=without))
      for name, a, b in zip(Results._fields, got, want, strict=True):
        assert_alike(a, b, name=f"{name} with {junk}")
    negative = dataclasses.replace(selection, counts=jnp.full_like(selection.counts, -3))
    assert (np.asarray(self.run(inputs._replace(selection=negative)).lse) == -np.inf).all()

  def test_lse_has_a_gradient(self) -> None:
    """A loss on the LSE alone."""
    inputs = self.inputs()
    inputs = inputs._replace(d_out=jnp.zeros_like(inputs.d_out))
    got, want, twin = self.run(inputs), run_reference(inputs), run_twin(inputs)
    assert np.abs(want.d_query).max() > 0.01
    for name in ("d_query", "d_key", "d_value"):
      assert_close(*(getattr(x, name) for x in (got, want, twin)), name=name)

  @pytest.mark.parametrize("scale", [1.0, 0.25])
  def test_scale(self, scale: float) -> None:
    """A given scale replaces the default."""
    inputs = self.inputs()
    got = self.run(inputs, scale=scale)
    want, twin = run_reference(inputs, scale=scale), run_twin(inputs, scale=scale)
    for name, a, r, t in zip(Results._fields, got, want, twin, strict=True):
      assert_close(a, r, t, name=name)

  @pytest.mark.parametrize("sign", [-1.0, 1.0])
  def test_extreme_logits(self, sign: float, dtype: str) -> None:
    """Logits far from 0 in both directions: nothing overflows, in the ragged backward too."""
    case = dataclasses.replace(next(c for c in CASES if c.name == "ragged"), batch=1)
    inputs = make_inputs(case, *self.shapes[0], jnp.dtype(dtype))
    # All logits near +-100; a large spread instead would leave gradients of nothing but rounding.
    shift = 100.0 / self.shapes[0][1] ** 0.5
    big = inputs._replace(
      query=padded(inputs.query + jnp.asarray(sign * shift, dtype), inputs.query_tile_sizes, 0),
      key=padded(inputs.key / jnp.asarray(shift, dtype) + 1, inputs.tile_sizes, 0),
    )
    got, want, twin = self.run(big), run_reference(big), run_twin(big)
    assert_close_at_large_logits(got, want, twin)

  @pytest.mark.parametrize("growth", [(0, 14, 15, 150, 40), (150, 40, 15, 14, 0)])
  def test_logits_that_grow_from_tile_to_tile(self, growth: tuple[int, ...]) -> None:
    """By a factor of e**14 or e**150 in the weights: what was summed before is rescaled, never lost or infinite."""
    inputs, size = self.inputs("plain"), self.shapes[0][0]
    inputs = inputs._replace(
      query=inputs.query.at[..., 0].set(8),
      key=inputs.key.at[..., 0].set(jnp.repeat(jnp.asarray(growth), size)[:, None]),
    )
    got = self.run(inputs, scale=0.125)
    want, twin = run_reference(inputs, scale=0.125), run_twin(inputs, scale=0.125)
    assert_close_at_large_logits(got, want, twin)

  def test_empty_batch(self) -> None:
    """B = 0: results of the right shapes, gradients too."""
    got = self.run(jax.tree.map(lambda x: x[:0], self.inputs()))
    for a, b in zip(got, self.run(self.inputs()), strict=True):
      assert a.shape == (0, *b.shape[1:])
      assert a.dtype == b.dtype

  @pytest.mark.parametrize(
    "mapped", ["query", "key value", "query key value", "selection", "tile_sizes"]
  )
  def test_vmap_over_a_subset(self, mapped: str) -> None:
    """vmap over any operands, forward and gradient, equals a loop."""
    names = mapped.split()
    several = [self.inputs(seed=seed) for seed in range(3)]
    base = several[0]
    parts = [tuple(getattr(i, n) for n in names) for i in several]

    def gradients(*part):
      here = base._replace(**dict(zip(names, part, strict=True)))
      (out, lse), vjp = jax.vjp(functools.partial(attend, here, self.implementation), *here[:3])
      return Results(out, lse, *vjp((here.d_out, here.d_lse)))

    got = jax.jit(jax.vmap(gradients))(*jax.tree.map(lambda *xs: jnp.stack(xs), *parts))
    alone = jax.jit(gradients)
    for i, part in enumerate(parts):
      want = alone(*part)
      for name, a, b in zip(Results._fields, got, want, strict=True):
        assert_alike(a[i], b, name=name)

  def test_vmap_of_grad(self) -> None:
    """A per-sample gradient."""
    inputs = self.inputs()

    def loss(query, weight):
      out, lse = self.attend(inputs, query, inputs.key, inputs.value)
      return (out * weight).sum() + jnp.where(lse == -jnp.inf, 0, lse).mean()

    queries = jnp.stack([inputs.query, 2 * inputs.query, -inputs.query])
    weights = jnp.stack([inputs.d_out, -inputs.d_out, inputs.d_out])
    got = jax.jit(jax.vmap(jax.grad(loss)))(queries, weights)
    alone = jax.jit(jax.grad(loss))
    for i in range(3):
      want = alone(queries[i], weights[i])
      assert_alike(got[i], want)

  def test_remat_and_scan(self) -> None:
    """Two layers in a scan under jax.checkpoint: the gradient of the plain loop."""
    inputs = self.inputs("plain")

    def layer(x, scale):
      return x + self.attend(inputs, x * scale, inputs.key, inputs.value)[0], None

    def looped(x):
      for scale in (0.5, 2.0):
        x, _ = layer(x, scale)
      return (x * inputs.d_out).sum()

    def scanned(x):
      x, _ = jax.lax.scan(jax.checkpoint(layer), x, jnp.asarray([0.5, 2.0], x.dtype))
      return (x * inputs.d_out).sum()

    assert_alike(jax.jit(jax.grad(scanned))(inputs.query), jax.jit(jax.grad(looped))(inputs.query))

  def test_x64_mode_changes_nothing(self) -> None:
    """Same dtypes and values with 64-bit types allowed."""
    inputs = self.inputs()
    want = self.run(inputs)
    with jax.enable_x64(True):
      got = self.run(inputs)
    for name, a, b in zip(Results._fields, got, want, strict=True):
      assert_alike(a, b, name=name)

  def test_new_tables_do_not_recompile(self) -> None:
    """Other lists, counts and sizes of the same shapes reuse the program."""
    traces = []

    @jax.jit
    def both(inputs):
      traces.append(1)
      return self.attend(inputs)

    for seed in range(3):
      both(self.inputs("counts", seed=seed))
    assert len(traces) == 1
