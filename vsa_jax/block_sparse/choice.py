"""Which implementation runs a call, and why the others do not."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from vsa_jax.block_sparse.automatic import Automatic
from vsa_jax.block_sparse.base import Implementation, Problem
from vsa_jax.block_sparse.ffi import Cpu, Cuda, CudaSim
from vsa_jax.block_sparse.reference import Reference
from vsa_jax.block_sparse.xla import Xla

IMPLEMENTATIONS: dict[str, Implementation] = {
  i.name: i for i in (Xla(), Reference(), Cpu(), Cuda(), CudaSim())
}

# Names that are taken, without code in this version.
_ABSENT = ("pallas",)
_NAMES = [*IMPLEMENTATIONS, *_ABSENT]

# What None takes on a platform, by JAX's name of it, where that can run; "xla" otherwise.
_BY_PLATFORM = {"cpu": "cpu", "cuda": "cuda"}


def choose(asked: Any, problem: Problem, *, partitioned: bool) -> Implementation:
  """The implementation for a call.

  Args:
    asked: the argument `implementation`.
    problem: the call.
    partitioned: whether XLA may split the program over devices, with no shard_map of ours around the op.

  Raises:
    ValueError: something that is no implementation, or a named kernel in a program that XLA partitions.
    NotImplementedError: asked for by name, and cannot run; it says why, and which can.
  """
  if asked is None:
    if partitioned:
      warnings.warn(
        "vsa_jax: this mesh has automatic axes and no `sharding` was given, so XLA partitions 'xla' as it"
        " sees fit, with collectives; pass sharding=NamedSharding(mesh, spec of query) to run on local shards",
        stacklevel=3,
      )
      return IMPLEMENTATIONS["xla"]
    branches = tuple(
      (platform, IMPLEMENTATIONS[name])
      for platform, name in _BY_PLATFORM.items()
      if reason_against(name, problem) is None
    )
    return Automatic(branches, IMPLEMENTATIONS["xla"]) if branches else IMPLEMENTATIONS["xla"]
  reasons = []
  for item in _items(asked):
    reason = reason_against(item, problem)
    if reason is None:
      implementation = IMPLEMENTATIONS[item] if isinstance(item, str) else item
      if partitioned and implementation.name not in ("xla", "reference"):
        raise ValueError(
          f"sharding: got None for implementation {implementation.name!r} on a mesh with automatic axes, want the"
          " NamedSharding of query; without it XLA would gather every operand of the kernel"
        )
      return implementation
    reasons.append(f"{_name(item)!r} cannot run this call: {reason}")
  if not reasons:
    raise ValueError("implementation: got an empty sequence, want names to try in order, or None")
  able = [
    name for name in IMPLEMENTATIONS if name != "cuda_sim" and reason_against(name, problem) is None
  ]
  raise NotImplementedError(
    f"implementation: {'; '.join(reasons)}. These can: {able}; None takes the best of them"
  )


def reason_against(item: Any, problem: Problem) -> str | None:
  """Why an implementation, by name or object, cannot run a call; None when it can."""
  if isinstance(item, str):
    if item in _ABSENT:
      return "it is not in this version of vsa_jax"
    if item not in IMPLEMENTATIONS:
      raise ValueError(f"implementation: got {item!r}, want one of {_NAMES}, an object or None")
    item = IMPLEMENTATIONS[item]
  try:
    hash(item)
  except TypeError:
    raise ValueError(
      f"implementation: got {item!r}, which has no hash, want a hashable object"
    ) from None
  if isinstance(item, type):
    raise ValueError(
      f"implementation: got the class {item.__name__}, want an object: {item.__name__}()"
    )
  missing = [
    name for name in ("name", "supports", "forward", "backward") if not hasattr(item, name)
  ]
  if missing:
    raise ValueError(
      f"implementation: got {item!r} without {missing}, want a name of {_NAMES}, None, or an"
      " object as vsa_jax.block_sparse.base.Implementation describes"
    )
  return item.supports(problem)


def survey(asked: Any, problem: Problem) -> dict[Any, str | None]:
  """Every name, and every object asked for, with the reason why it cannot run a call (None: it can)."""
  reasons: dict[Any, str | None] = {}
  for item in [*([] if asked is None else _items(asked)), *_NAMES]:
    reasons.setdefault(_name(item), reason_against(item, problem))
  return reasons


def _items(asked: Any) -> Sequence[Any]:
  return asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]


def _name(item: Any) -> Any:
  return item if isinstance(item, str) else getattr(item, "name", item)
