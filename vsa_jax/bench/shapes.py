"""The problems to time, by name."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
  """One problem."""

  segments: tuple[Any, ...]  # of the layout
  tile: tuple[int, int, int]
  sparsity: float
  heads: int
  head_dim: int
  dtype: str


def _of_kernels(video: tuple[int, int, int], sparsity: float) -> dict[str, Shape]:
  """One video at tiles of 64, 128 and 256: what kernels are compared on."""
  tokens = video[0] * video[1] * video[2]
  tiles = {64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8)}
  return {
    f"{tokens}-{size}": Shape((video,), tile, sparsity, 24, 128, "bfloat16")
    for size, tile in tiles.items()
  }


SHAPES = {
  # For CPUs.
  "small-64": Shape(((8, 16, 16),), (4, 4, 4), 0.75, 2, 64, "float32"),
  "small-128": Shape(((8, 16, 16),), (4, 4, 4), 0.75, 2, 128, "float32"),
  "medium-64": Shape(((8, 32, 32),), (4, 4, 4), 0.875, 2, 64, "float32"),
  "medium-128": Shape(((8, 32, 32),), (4, 4, 4), 0.875, 2, 128, "float32"),
  "prefix": Shape((150, (8, 16, 16)), (4, 4, 4), 0.75, 2, 128, "float32"),
  # Rules 1.8, for GPUs.
  "fasth3": Shape((16 * 64, (28, 36, 40)), (4, 4, 4), 0.9, 56, 128, "bfloat16"),
  "wan-480p": Shape(((21, 30, 52),), (4, 4, 4), 0.9, 12, 128, "bfloat16"),
  "wan-720p": Shape(((21, 45, 80),), (4, 4, 4), 0.9, 12, 128, "bfloat16"),
  "paper": Shape(((16, 32, 32),), (4, 4, 4), 0.875, 12, 64, "bfloat16"),
  **_of_kernels((16, 40, 48), 0.875),
  **_of_kernels((32, 48, 48), 0.9),
  **_of_kernels((8, 32, 32), 0.9),
}

# What `bench` times when told nothing, by platform.
DEFAULTS = {
  "cpu": ("small-64", "small-128", "medium-128", "prefix"),
  "gpu": ("30720-64", "30720-128", "30720-256", "wan-480p"),
}
