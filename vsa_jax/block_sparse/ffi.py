"""`cpu` and `cuda`: the compiled kernels of xla_ffi/, called through XLA's foreign function interface.

The only file that knows jax.ffi.  The compiled part is the module `_vsa_jax_ffi`, which is there when a C++
compiler was at installation; it has the CUDA kernels when nvcc was.  Every operand and result leads with the
batch, so a vmapped axis is folded into it: one call, whatever is mapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from vsa_jax.arguments import accumulator
from vsa_jax.block_sparse.base import Problem, Residual, Sizes
from vsa_jax.selection import TileSelection
from vsa_jax.sharding import vary_over, varying_axes

try:
  import _vsa_jax_ffi as _compiled
except ImportError as error:
  _compiled = None
  _import_error = str(error)

_TARGETS = ("vsa_forward_cpu", "vsa_backward_cpu", "vsa_forward_cuda", "vsa_backward_cuda")

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

  def _workspace(self, problem: Problem, selection: TileSelection) -> int | None:
    """Bytes of scratch that the backward wants as a last result; None: it takes none."""
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
    del precision

    def results(query, *_):
      batch, length, heads, _ = query.shape
      return _like(query), _struct((batch, heads, length), accumulator(query.dtype))

    operands = (query, key, value, *_tables(selection, sizes))
    out, lse = _call(f"vsa_forward_{self.name}", results, 2, operands, selection, scale)
    return out, lse

  def backward(
    self, residual: Residual, d_out: jax.Array, delta: jax.Array, *, scale: float, precision: Any
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_query, d_key, d_value); see `Implementation.backward`."""
    del precision
    query, key, value, selection, sizes, _, lse = residual

    def results(query, key, value, indices, *_):
      tables = TileSelection(
        indices,
        None,
        selection.num_prefix_tiles,
        num_dense_rows=selection.num_dense_rows,
        num_key_tiles=selection.num_key_tiles,
      )
      size = self._workspace(Problem.of(query, key, tables), tables)
      scratch = () if size is None else (_struct((size,), jnp.uint8),)
      return *map(_like, (query, key, value)), *scratch

    operands = (query, key, value, *_tables(selection, sizes), lse, d_out, delta)
    d_query, d_key, d_value = _call(
      f"vsa_backward_{self.name}", results, 3, operands, selection, scale
    )
    return d_query, d_key, d_value


class Cpu(FfiKernels):
  """C++ kernels on XLA's own threads, of any floating dtype, head dim and tile size; sums in float32 or 64."""

  name = "cpu"

  def _why_not(self, problem: Problem) -> str | None:
    del problem
    return None

  def _workspace(self, problem: Problem, selection: TileSelection) -> int | None:
    del problem, selection
    return None


class Cuda(FfiKernels):
  """CUDA C++ kernels for Hopper."""

  name = "cuda"

  dtypes = ("bfloat16", "float16")
  head_dims = (64, 128)
  tile_sizes = (64, 128, 256)
  compute_capability = "9.0"

  def _why_not(self, problem: Problem) -> str | None:
    facts = _compiled.build_facts()
    if not facts["has_cuda"]:
      return f"{facts['cuda']}; put nvcc of CUDA 12.5 or newer on PATH and install vsa_jax anew"
    for name, got, able in (
      ("dtype", jnp.dtype(problem.dtype).name, self.dtypes),
      ("head_dim", problem.head_dim, self.head_dims),
      ("tile size", problem.tile_size, self.tile_sizes),
    ):
      if got not in able:
        return f"{name} {got}; its kernels take {', '.join(map(str, able))}"
    if not isinstance(problem.batch, int):
      return f"batch {problem.batch}: the size of its workspace must be known when it is exported"
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

  def _workspace(self, problem: Problem, selection: TileSelection) -> int | None:
    return _compiled.cuda_backward_workspace(
      jnp.dtype(problem.dtype).name,
      problem.batch,
      problem.heads,
      problem.kv_heads,
      problem.head_dim,
      problem.tile_size,
      problem.query_tiles,
      problem.key_tiles,
      problem.width,
      selection.num_prefix_tiles,
      selection.num_dense_rows,
    )


def is_built() -> bool:
  """Whether the compiled part is installed."""
  return _compiled is not None


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
  if _compiled is not None:
    return None
  return (
    f"the compiled part is not installed ({_import_error}): no C++17 compiler worked at installation; get GCC"
    " or Clang and install vsa_jax anew (pip -v shows what the compiler says)"
  )


def _tables(selection: TileSelection, sizes: Sizes) -> tuple[jax.Array, ...]:
  tables = (selection.indices, selection.counts, sizes.query, sizes.key)
  return tuple(x.astype(jnp.int32) for x in tables)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
  return _struct(x.shape, x.dtype)


_struct = jax.ShapeDtypeStruct


def _call(
  target: str,
  results: Callable[..., tuple[jax.ShapeDtypeStruct, ...]],
  kept: int,
  operands: tuple[jax.Array, ...],
  selection: TileSelection,
  scale: float,
) -> tuple[jax.Array, ...]:
  """One foreign call.

  Args:
    target: the handler.
    results: from the operands to the types of all results.
    kept: how many of them to return; what follows is scratch.
    operands: arrays that all lead with the batch, as what is kept does.
    selection: of it the static integers.
    scale: of the logits.
  """
  register_kernels()
  attributes = {
    "scale": np.float64(scale),
    "num_prefix_tiles": np.int64(selection.num_prefix_tiles),
    "num_dense_rows": np.int64(selection.num_dense_rows),
  }

  @jax.custom_batching.custom_vmap
  def call(*operands):
    made = jax.ffi.ffi_call(target, results(*operands))(*operands, **attributes)
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
