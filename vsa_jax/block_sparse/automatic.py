"""What `implementation=None` runs: one implementation for each platform."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax

from vsa_jax.block_sparse.base import Implementation, Problem, Residual, Sizes
from vsa_jax.selection import TileSelection


@dataclasses.dataclass(frozen=True)
class Automatic:
  """Branches on the platform a program is compiled for, which need not be the default one.

  Forward and backward branch each for itself, so differentiation sees no branch.
  """

  branches: tuple[tuple[str, Implementation], ...]  # by JAX's name of the platform
  default: Implementation
  name = "automatic"

  def on(self, platform: str) -> Implementation:
    """The implementation of a platform."""
    return dict(self.branches).get(platform, self.default)

  def supports(self, problem: Problem) -> str | None:
    """It was made of implementations that do."""
    del problem
    return None

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
    """See `Implementation.forward`."""
    operands = (query, key, value, selection, sizes)
    return self._run("forward", operands, scale=scale, precision=precision)

  def backward(
    self, residual: Residual, d_out: jax.Array, delta: jax.Array, *, scale: float, precision: Any
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `Implementation.backward`; any serves any forward."""
    operands = (residual, d_out, delta)
    return self._run("backward", operands, scale=scale, precision=precision)

  def _run(self, rule: str, operands: Any, **options: Any) -> Any:
    def branch(implementation):
      return functools.partial(getattr(implementation, rule), **options)

    return lax.platform_dependent(
      *operands,
      default=branch(self.default),
      **{platform: branch(implementation) for platform, implementation in self.branches},
    )
