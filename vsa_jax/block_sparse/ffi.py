"""`cpu`, `cuda` and `cuda_sim`: the compiled kernels of xla_ffi/, called through XLA's foreign function interface.

The only file that knows jax.ffi.  The compiled part is the module `_vsa_jax_ffi`, which is there when a C++
compiler was at installation; it has the CUDA kernels when nvcc was.  Every operand and result leads with the
batch, so a vmapped axis is folded into it: one call, whatever is mapped.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import jaxlib
import numpy as np

from vsa_jax.arguments import accumulator
from vsa_jax.block_sparse.base import Problem, Residual, Sizes
from vsa_jax.block_sparse.xla import Xla
from vsa_jax.selection import TileSelection
from vsa_jax.sharding import vary_over, varying_axes

_import_error = ""
try:
  import _vsa_jax_ffi as _compiled

  _compiled.build_facts  # noqa: B018 - a folder of that name would be a module without it
except (ImportError, AttributeError) as error:
  _compiled = None
  _import_error = f" ({error})"

_XLA = Xla()

_TARGETS = tuple(
  f"vsa_{direction}_{name}"
  for name in ("cpu", "cuda", "cuda_sim")
  for direction in ("forward", "backward")
)

EXPORT_CHECKS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, _TARGETS))
"""For `jax.export.export(..., disabled_checks=vsa_jax.EXPORT_CHECKS)`.

JAX promises that an exported program runs for months to come, and cannot promise it for kernels of others: it
refuses them until told.  Such a program runs where this version of vsa_jax is; a process that only loads it
calls `register_kernels` first.
"""


class FfiKernels:
  """Forward and backward of one platform; see `Implementation`."""

  name: str

  def supports(self, problem: Problem) -> str | None:
    """Whether the kernels were built, and run this problem here."""
    return _why_not_built() or self._why_not(problem)

  def _why_not(self, problem: Problem) -> str | None:
    raise NotImplementedError

  def _workspaces(self, problem: Problem, prefix_and_dense: tuple[int, int]) -> tuple[int, int]:
    """Bytes of scratch that forward and backward take as a last result."""
    raise NotImplementedError

  def forward(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    selection: TileSelection,
    sizes: Sizes,
    *,
    scale: float,
    precision: Any,
  ) -> tuple[jax.Array, jax.Array]:
    """out and base-2 LSE; see `Implementation.forward`."""

    scratch = self._scratch_of(0, query, key, selection)

    def types(query, *_):
      batch, length, heads, _ = query.shape
      lse = _struct((batch, heads, length), accumulator(query.dtype))
      return _like(query), lse, *scratch(batch)

    target, attributes = f"vsa_forward_{self.name}", _attributes(selection, scale)

    def kernel(query, key, value, selection, sizes):
      operands = (query, key, value, *_tables(selection, sizes))
      return _call(target, attributes, types, 2, operands)

    alike = functools.partial(_XLA.forward, scale=scale, precision=precision)
    return _with_derivative_of(alike, kernel)(query, key, value, selection, sizes)

  def backward(
    self, residual: Residual, d_out: jax.Array, delta: jax.Array, *, scale: float, precision: Any
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_query, d_key, d_value); see `Implementation.backward`."""
    selection = residual.selection
    scratch = self._scratch_of(1, residual.query, residual.key, selection)

    def types(query, key, value, *_):
      return *map(_like, (query, key, value)), *scratch(query.shape[0])

    target, attributes = f"vsa_backward_{self.name}", _attributes(selection, scale)

    def kernel(residual, d_out, delta):
      tables = _tables(residual.selection, residual.sizes)
      operands = (*residual[:3], *tables, residual.lse, d_out, delta)
      return _call(target, attributes, types, 3, operands)

    alike = functools.partial(_XLA.backward, scale=scale, precision=precision)
    return _with_derivative_of(alike, kernel)(residual, d_out, delta)

  def _scratch_of(
    self, rule: int, query: jax.Array, key: jax.Array, selection: TileSelection
  ) -> Callable[[int], tuple[jax.ShapeDtypeStruct, ...]]:
    """From a batch to the types of the scratch, if any, of forward (rule 0) or backward (1)."""
    problem = Problem.of(query, key, selection)
    prefix_and_dense = (selection.num_prefix_tiles, selection.num_dense_rows)

    def types(batch):
      here = dataclasses.replace(problem, batch=batch)
      size = self._workspaces(here, prefix_and_dense)[rule]
      return (_struct((size,), jnp.uint8),) if size else ()

    return types


class Cpu(FfiKernels):
  """C++ kernels on XLA's own threads, of any floating dtype, head dim and tile size; sums in float32 or 64."""

  name = "cpu"

  def _why_not(self, problem: Problem) -> str | None:
    del problem
    return None

  def _workspaces(self, problem: Problem, prefix_and_dense: tuple[int, int]) -> tuple[int, int]:
    del problem, prefix_and_dense
    return 0, 0


class _CudaSources(FfiKernels):
  """What `cuda` and its simulation have in common."""

  dtypes = ("bfloat16", "float16")
  head_dims = (64, 128)
  tile_sizes = (64, 128, 256)

  def _why_not_shapes(self, problem: Problem) -> str | None:
    for name, got, able in (
      ("dtype", jnp.dtype(problem.dtype).name, self.dtypes),
      ("head_dim", problem.head_dim, self.head_dims),
      ("tile size", problem.tile_size, self.tile_sizes),
    ):
      if got not in able:
        return f"{name} {got}; its kernels take {', '.join(map(str, able))}"
    if not isinstance(problem.batch, int):
      return f"batch {problem.batch}: the size of its workspace must be known when it is exported"
    return None

  def _workspaces(self, problem: Problem, prefix_and_dense: tuple[int, int]) -> tuple[int, int]:
    return getattr(_compiled, f"{self.name}_workspaces")(
      jnp.dtype(problem.dtype).name,
      problem.batch,
      problem.heads,
      problem.kv_heads,
      problem.head_dim,
      problem.tile_size,
      problem.query_tiles,
      problem.key_tiles,
      problem.width,
      *prefix_and_dense,
    )


class CudaSim(_CudaSources):
  """The CUDA kernels, run on the CPU by a simulator of a GPU: to test them, slowly. By name only.

  What a kernel does wrong (deadlock, lanes apart, misused barriers) is an error that names the place.
  """

  name = "cuda_sim"

  def _why_not(self, problem: Problem) -> str | None:
    if not _compiled.build_facts()["has_simulator"]:
      return "this build has no simulator"
    return self._why_not_shapes(problem)


class Cuda(_CudaSources):
  """CUDA C++ kernels for Hopper."""

  name = "cuda"

  compute_capability = "9.0"

  def _why_not(self, problem: Problem) -> str | None:
    facts = _compiled.build_facts()
    if not facts["has_cuda"]:
      return f"{facts['cuda']}; put nvcc of CUDA 12.5 or newer on PATH and install vsa_jax anew"
    reason = self._why_not_shapes(problem)
    if reason:
      return reason
    devices = cuda_devices()
    if not devices:
      return "there is no CUDA device here"
    for device in devices:
      found = getattr(device, "compute_capability", "unknown")
      if found != self.compute_capability:
        return (
          f"{device.device_kind} has compute capability {found}; its kernels run on"
          f" {self.compute_capability} (H100, H200, H20, GH200)"
        )
    return None


def is_built() -> bool:
  """Whether the compiled part is installed, and fits the jaxlib here."""
  return _why_not_built() is None


def cuda_devices() -> list[jax.Device]:
  """The CUDA devices of this process."""
  try:
    return jax.local_devices(backend="cuda")
  except RuntimeError:  # JAX has no such backend
    return []


def platform_of(device: jax.Device) -> str:
  """JAX's name of the platform that a device's programs are compiled for."""
  return "cuda" if device.platform == "gpu" and device in cuda_devices() else device.platform


def build_summary() -> list[str]:
  """What was compiled, for people."""
  missing = _why_not_built()
  if missing:
    return [f"kernels: {missing}"]
  facts = _compiled.build_facts()
  return [
    f"cpu kernels: {facts['cpu_instructions']}, by {facts['compiler']}, FFI headers of jaxlib {facts['jaxlib']}",
    f"cuda kernels: {facts['cuda']}",
    f"cuda_sim: {'the cuda kernels on a simulated GPU' if facts['has_simulator'] else 'not in this build'}",
  ]


@functools.cache
def register_kernels() -> None:
  """Makes the kernels known to XLA.

  A call that runs one does it by itself; a process that only loads an exported program has to.

  Raises:
    NotImplementedError: the compiled part is not installed.
  """
  missing = _why_not_built()
  if missing:
    raise NotImplementedError(f"register_kernels: {missing}")
  for platform, handlers in _compiled.registrations().items():
    for target, handler in handlers.items():
      jax.ffi.register_ffi_target(target, handler, platform=platform)


def _why_not_built() -> str | None:
  if _compiled is None:
    return (
      f"the compiled part is not installed{_import_error}: no C++17 compiler worked at installation; get GCC or"
      " Clang and install vsa_jax anew (pip -v shows what the compiler says)"
    )
  built, here = _compiled.build_facts()["jaxlib"], jaxlib.__version__
  if _numbers(built) > _numbers(here):  # registering its handlers would take the whole backend down
    return (
      f"the compiled part was built with the XLA headers of jaxlib {built}, newer than jaxlib {here} here;"
      " install vsa_jax anew"
    )
  return None


def _numbers(version: str) -> list[int]:
  return [int(n) for n in re.findall(r"\d+", version)[:3]]


def _tables(selection: TileSelection, sizes: Sizes) -> tuple[jax.Array, ...]:
  ids, counts = selection.indices, selection.counts
  if ids.dtype != jnp.int32:  # what is out of range must not wrap into it
    ids = jnp.where(selection.keeps(), ids, selection.num_key_tiles)
  if counts.dtype != jnp.int32:
    counts = jnp.clip(counts, 0, selection.width)
  return tuple(x.astype(jnp.int32) for x in (ids, counts, sizes.query, sizes.key))


def _attributes(selection: TileSelection, scale: float) -> dict[str, Any]:
  return {
    "scale": np.float64(scale),
    "num_prefix_tiles": np.int64(selection.num_prefix_tiles),
    "num_dense_rows": np.int64(selection.num_dense_rows),
  }


def _with_derivative_of(
  alike: Callable[..., Any], kernel: Callable[..., Any]
) -> Callable[..., Any]:
  """kernel, with the derivative of a function of JAX's own: what a gradient of a gradient needs."""
  call = jax.custom_jvp(kernel)
  call.defjvp(lambda primals, tangents: (call(*primals), jax.jvp(alike, primals, tangents)[1]))
  return call


_struct = jax.ShapeDtypeStruct


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
  return _struct(x.shape, x.dtype)


def _call(
  target: str,
  attributes: dict[str, Any],
  types: Callable[..., tuple[jax.ShapeDtypeStruct, ...]],
  kept: int,
  operands: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
  """One foreign call.

  Args:
    target: the handler.
    attributes: its static arguments.
    types: from the operands to the types of all results.
    kept: how many of them to return; what follows is scratch.
    operands: arrays that all lead with the batch, as what is kept does.
  """
  register_kernels()

  @jax.custom_batching.custom_vmap
  def call(*operands):
    made = jax.ffi.ffi_call(target, types(*operands))(*operands, **attributes)
    axes = varying_axes(*operands)
    return tuple(vary_over(x, axes) for x in made[:kept])

  @call.def_vmap
  def _(size, is_mapped, *operands):
    stacked = [
      x if mapped else jnp.broadcast_to(x, (size, *x.shape))
      for x, mapped in zip(operands, is_mapped, strict=True)
    ]
    made = call(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in stacked))
    batch = stacked[0].shape[1]
    return tuple(x.reshape(size, batch, *x.shape[1:]) for x in made), (True,) * kept

  return call(*operands)
