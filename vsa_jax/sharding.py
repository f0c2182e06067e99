"""Where the arrays live: batch and heads may be sharded, and then one shard_map wraps the op.

A bare custom call (and a Pallas kernel) in a sharded program makes XLA gather its operands; inside a
shard_map every device works on its own batch and heads, with no collective forward or backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_ULYSSES = (
  "a tile list needs the whole sequence; exchange the sharded axis for heads first (Ulysses:"
  " jax.lax.all_to_all of query, key, value and gate inside shard_map), then call with heads sharded"
)


@dataclasses.dataclass(frozen=True)
class Placement:
  """How query [B, L, N, H] is sharded: the mesh, and the axes that split its batch and its heads."""

  mesh: Any
  batch: Any  # an entry of a PartitionSpec
  heads: Any

  def spec(self, shape: tuple[int, ...], head_axis: int | None = None) -> PartitionSpec:
    """The spec of an array with the batch on axis 0 and heads on this one; a size of 1 is replicated."""
    entries: list[Any] = [None] * len(shape)
    if shape[0] != 1:
      entries[0] = self.batch
    if head_axis is not None and shape[head_axis] != 1:
      entries[head_axis] = self.heads
    return PartitionSpec(*entries)


def shard_map(mesh: Any, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
  """`function` on the shards of each device; in_specs has a spec for every array."""
  manual = getattr(mesh, "manual_axes", ())
  mapped = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=frozenset(mesh.axis_names) - frozenset(manual),
  )
  if AxisType.Explicit not in mesh.axis_types:
    return mapped

  hidden = {
    name
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind != AxisType.Explicit
  }

  def place(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    # What is not sharded yet (tile sizes, a broadcast gate) is cut where it lies: no collective.
    seen = PartitionSpec(*(_entry(entry, hidden) for entry in spec))
    return jax.sharding.reshard(x, NamedSharding(mesh, seen))

  return lambda *arrays: mapped(*jax.tree.map(place, arrays, in_specs))


def placement_of(query: jax.Array, sharding: Any) -> Placement | None:
  """How query is sharded, from the argument `sharding` or from its own type; None when it is not.

  Raises:
    ValueError: a sharding that is not a NamedSharding of query, splits its sequence or its head dim, or
      does not divide its batch or heads.
  """
  if sharding is not None and not isinstance(sharding, NamedSharding):
    raise ValueError(
      f"sharding: got {type(sharding).__name__}, want the NamedSharding of query, [B, L, N, H]"
    )
  found = sharding if sharding is not None else _own_sharding(query)
  if found is None:
    return None
  found = _in_context(found)
  spec = tuple(found.spec) + (None,) * (query.ndim - len(found.spec))
  if len(spec) > query.ndim:
    raise ValueError(
      f"sharding: got {found.spec}, want a spec of query's {query.ndim} axes [B, L, N, H]"
    )
  manual = set(getattr(found.mesh, "manual_axes", ()))
  batch, sequence, heads, head_dim = (_entry(entry, manual) for entry in spec)
  for name, entry, axis in (("sequence", sequence, 1), ("head dim", head_dim, 3)):
    if _ways(found.mesh, entry) > 1:
      remedy = _ULYSSES if axis == 1 else "replicate it"
      raise ValueError(
        f"sharding: got {found.spec}, which splits query's {name} (axis {axis}); {remedy}"
      )
  for name, entry, axis in (("batch", batch, 0), ("heads", heads, 2)):
    ways = _ways(found.mesh, entry)
    if query.shape[axis] % ways:
      raise ValueError(
        f"sharding: got {found.spec}, which splits query's {name} (axis {axis}, size {query.shape[axis]}) over mesh"
        f" axis {entry!r} of size {ways}, want a size that divides; pad the {name} or choose another mesh axis"
      )
  if _ways(found.mesh, batch) * _ways(found.mesh, heads) == 1:
    return None
  return Placement(found.mesh, batch, heads)


def check_key_placement(
  placement: Placement, query: jax.Array, key: jax.Array, value: jax.Array
) -> None:
  """ValueError unless key and value can be sharded like query, and are."""
  kv_heads, ways = key.shape[2], _ways(placement.mesh, placement.heads)
  if kv_heads != 1 and kv_heads % ways:
    raise ValueError(
      f"sharding: query's {query.shape[2]} heads are split {ways} ways over mesh axis {placement.heads!r}, key has"
      f" {kv_heads}; want a multiple of {ways}, or one head; repeat key and value heads up to {ways}"
    )
  for name, array in (("key", key), ("value", value)):
    check_placement(placement, name, array, placement.spec(array.shape, 2))


def check_placement(placement: Placement, name: str, array: Any, want: PartitionSpec) -> None:
  """ValueError when an array's type says that it is sharded otherwise than `want`."""
  found = _own_sharding(array)
  if found is None:
    return
  manual = set(getattr(found.mesh, "manual_axes", ()))
  got = [
    _entry(entry, manual) for entry in tuple(found.spec) + (None,) * (array.ndim - len(found.spec))
  ]
  if got != [_entry(entry, manual) for entry in want]:
    raise ValueError(
      f"{name}: is sharded as {found.spec}, want {want}, as query's batch and heads are; jax.sharding.reshard it"
    )


def on_own_shards(function: Callable, *arrays: jax.Array, unsharded_axis: int) -> Any:
  """function(*arrays) for a function that leaves alone every axis that is sharded in explicit mode.

  Explicit mode cannot type a reshape between sharded axes, and XLA gathers a sharded operand of top_k; on
  the shards there is neither.  All arrays and results are sharded as the first.

  Args:
    function: the function.
    arrays: its arguments.
    unsharded_axis: the axis it works on.

  Raises:
    ValueError: that axis is sharded.
  """
  found = _own_sharding(arrays[0])
  if found is None or AxisType.Explicit not in found.mesh.axis_types or not any(found.spec):
    return function(*arrays)
  entries = list(found.spec)
  if len(entries) > unsharded_axis and entries[unsharded_axis] is not None:
    raise ValueError(
      f"sharding: got {found.spec}, which splits axis {unsharded_axis}, want it whole; {_ULYSSES}"
    )
  while entries[-1] is None:
    entries.pop()
  spec = PartitionSpec(*entries)
  return shard_map(found.mesh, function, (spec,) * len(arrays), spec)(*arrays)


def has_auto_axes(x: Any) -> bool:
  """Whether XLA may be partitioning what is done with x over mesh axes whose use its type does not show."""
  meshes = [jax.sharding.get_abstract_mesh()]
  if isinstance(x, jax.Array):
    meshes.append(getattr(jax.typeof(x).sharding, "mesh", meshes[0]))
  return any(
    kind == AxisType.Auto and mesh.shape[name] > 1
    for mesh in meshes
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
  )


def vary_alike(*trees: Any) -> tuple[Any, ...]:
  """Inside a shard_map, gives all arrays one set of varying axes (a custom_vjp wants them equal)."""
  axes = varying_axes(*jax.tree.leaves(trees))
  return jax.tree.map(lambda x: vary_over(x, axes), trees)


def varying_axes(*arrays: Any) -> frozenset[str]:
  """The manual mesh axes over which any of the arrays varies."""
  return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_over(x: Any, axes: frozenset[str]) -> jax.Array:
  """x, as an array that varies over these manual axes."""
  missing = axes - jax.typeof(x).manual_axis_type.varying
  return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _own_sharding(x: Any) -> NamedSharding | None:
  """What an array knows about its sharding: by type in explicit mode, by placement when it is concrete."""
  if not isinstance(x, jax.Array):
    return None
  if not isinstance(x, jax.core.Tracer):
    return x.sharding if isinstance(x.sharding, NamedSharding) else None
  found = jax.typeof(x).sharding
  return found if AxisType.Explicit in found.mesh.axis_types else None


def _in_context(sharding: NamedSharding) -> NamedSharding:
  """Inside a user's shard_map over some axes of the mesh, the same on the mesh that knows they are manual."""
  context = jax.sharding.get_abstract_mesh()
  if context.manual_axes and context.axis_names == sharding.mesh.axis_names:
    return NamedSharding(context, sharding.spec)
  return sharding


def _entry(entry: Any, manual: set[str]) -> Any:
  """An entry of a spec without manual axes; None when no axis is left."""
  names = tuple(
    n
    for n in (entry if isinstance(entry, tuple) else (entry,))
    if n is not None and n not in manual
  )
  return None if not names else names[0] if len(names) == 1 else names


def _ways(mesh: Any, entry: Any) -> int:
  names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
  return math.prod(mesh.shape[n] for n in names)
