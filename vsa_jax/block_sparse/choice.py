"""Which implementation runs a call, and why the others do not."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from vsa_jax.block_sparse.base import Implementation, Problem
from vsa_jax.block_sparse.reference import Reference
from vsa_jax.block_sparse.xla import Xla
from vsa_jax.routing import has_auto_axes

IMPLEMENTATIONS: dict[str, Implementation] = {i.name: i for i in (Xla(), Reference())}

# Names of the design that this version has no code for.
_ABSENT = {
  "cpu": "the C++ kernel is not in this version of vsa_jax",
  "pallas": "the Pallas kernels are not in this version of vsa_jax",
  "cuda": "the CUDA kernels are not in this version of vsa_jax",
  "cuda_sim": "the simulated Blackwell kernel is not in this version of vsa_jax",
}

# What None tries, best first.
_AUTOMATIC = ("xla",)


def choose(asked: Any, problem: Problem, *, placed: bool) -> Implementation:
  """The implementation for a call.

  Args:
    asked: the argument `implementation`.
    problem: the call.
    placed: whether a shard_map of ours wraps the op.

  Raises:
    ValueError: something that is no implementation, or a named kernel in a program that XLA partitions.
    NotImplementedError: asked for by name, and cannot run; it says why, and which can.
  """
  partitioned = has_auto_axes() and not placed
  if asked is None:
    if partitioned:
      warnings.warn(
        "vsa_jax: this mesh has automatic axes and no `sharding` was given, so XLA partitions 'xla' as it"
        " sees fit, with collectives; pass sharding=NamedSharding(mesh, spec of query) to run on local shards",
        stacklevel=3,
      )
    return next(
      IMPLEMENTATIONS[name] for name in _AUTOMATIC if reason_against(name, problem) is None
    )
  several = isinstance(asked, Sequence) and not isinstance(asked, str)
  reasons = []
  for item in asked if several else [asked]:
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
  able = [name for name in IMPLEMENTATIONS if reason_against(name, problem) is None]
  raise NotImplementedError(
    f"implementation: {'; '.join(reasons)}. These can: {able}; None takes the best of them"
  )


def reason_against(item: Any, problem: Problem) -> str | None:
  """Why an implementation, by name or object, cannot run a call; None when it can."""
  if isinstance(item, str):
    if item in _ABSENT:
      return _ABSENT[item]
    if item not in IMPLEMENTATIONS:
      raise ValueError(
        f"implementation: got {item!r}, want one of {[*IMPLEMENTATIONS, *_ABSENT]}, an object or None"
      )
    item = IMPLEMENTATIONS[item]
  try:
    hash(item)
  except TypeError:
    raise ValueError(
      f"implementation: got {item!r}, which has no hash, want a hashable object"
    ) from None
  missing = [
    name for name in ("name", "supports", "forward", "backward") if not hasattr(item, name)
  ]
  if missing:
    raise ValueError(
      f"implementation: got {item!r} without {missing}, want a name of {[*IMPLEMENTATIONS, *_ABSENT]}, None, or an"
      " object as vsa_jax.block_sparse.base.Implementation describes"
    )
  return item.supports(problem)


def survey(problem: Problem) -> dict[str, str | None]:
  """Every name, with the reason why it cannot run a call (None: it can)."""
  names = dict.fromkeys([*_AUTOMATIC, *IMPLEMENTATIONS, *_ABSENT])
  return {name: reason_against(name, problem) for name in names}


def _name(item: Any) -> Any:
  return item if isinstance(item, str) else getattr(item, "name", item)
