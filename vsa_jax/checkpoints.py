"""Weights of VSAAttention modules on disk, beside the configuration that they depend on."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vsa_jax.nnx import VSAAttention

_FILE = "vsa_config.json"


def save(path: str | os.PathLike, model: nnx.Module) -> None:
  """Saves a model's parameters with Orbax, and the config of each VSAAttention in it.

  Nothing but nnx.Param: no optimizer state.  A training loop with a checkpoint manager of its own saves
  `configs(model)` beside its state, and calls `check_configs` before it restores.

  Args:
    path: a new directory.
    model: a VSAAttention, or any NNX module that holds some.

  Raises:
    ValueError: the directory holds a checkpoint already, or model is no module with parameters.
  """
  import orbax.checkpoint as ocp  # slow to import, and only needed here

  params = _params(model) if isinstance(model, nnx.Module) else {}
  if not params:
    raise ValueError(f"model: got {type(model).__name__}, want a Flax NNX module with parameters")
  folder = pathlib.Path(path).resolve()
  if (folder / _FILE).exists() or (folder / "params").exists():
    raise ValueError(f"path: got {str(path)!r}, which holds a checkpoint; want a new directory")
  shapes = {_join(name): list(x.shape) for name, x in params.items()}
  about = json.dumps({"config": configs(model), "shapes": shapes}, indent=1)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "params", _nested(params))
  (folder / _FILE).write_text(about)  # last: it says that the checkpoint is whole


def restore(
  path: str | os.PathLike, model: nnx.Module, *, zero_missing_gates: bool = False
) -> None:
  """Reads what `save` wrote into a model, in place, in the dtypes and shardings that the model has.

  Args:
    path: the directory.
    model: built as the saved one was.
    zero_missing_gates: let a model with gates take weights without them; the gates become zero, so that
      it computes its sparse branch alone.

  Raises:
    ValueError: there is no checkpoint; the tile or another entry of a config differs; or parameters are
      missing, surplus or of another shape.  The message lists them.
  """
  import orbax.checkpoint as ocp

  folder = pathlib.Path(path).resolve()
  try:
    about = json.loads((folder / _FILE).read_text())
    saved_configs, shapes = about["config"], about["shapes"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"path: got {str(path)!r}, want a directory that vsa_jax.checkpoints.save wrote; no whole {_FILE} there"
      f" ({error})"
    ) from None
  check_configs(saved_configs, configs(model), zero_missing_gates=zero_missing_gates)
  saved = {_split(name): jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
  wanted = _checked(model, saved, zero_missing_gates=zero_missing_gates)
  target = _nested({name: _struct(wanted[name]) for name in saved})
  with ocp.StandardCheckpointer() as checkpointer:
    params = checkpointer.restore(folder / "params", target)
  load_params(model, params, zero_missing_gates=zero_missing_gates)


def load_params(
  model: nnx.Module, params: Mapping[str, Any], *, zero_missing_gates: bool = False
) -> None:
  """Puts a tree of parameters into a model, in place, in its dtypes; refuses to lose or invent any.

  Args:
    model: the module to fill.
    params: nested dict of arrays, as nnx.to_pure_dict(nnx.state(model, nnx.Param)) gives.
    zero_missing_gates: see `restore`.

  Raises:
    ValueError: parameters are missing, surplus or of another shape; the message lists them.
  """
  given = flat_params(params)
  wanted = _checked(model, given, zero_missing_gates=zero_missing_gates)
  values = {
    name: jnp.asarray(given[name], x.dtype) if name in given else jnp.zeros_like(x)
    for name, x in wanted.items()
  }
  state = nnx.state(model, nnx.Param)
  nnx.replace_by_pure_dict(state, _nested(values))
  nnx.update(model, state)


def _checked(
  model: nnx.Module, given: Mapping[Any, Any], *, zero_missing_gates: bool
) -> dict[tuple[str, ...], Any]:
  """The model's parameters by path; ValueError unless `given` has them all, but for gates that may lack."""
  wanted, gates = _params(model), _gates(model)
  may_lack = gates if zero_missing_gates else ()
  needed = {k: v for k, v in wanted.items() if k in given or k[:-1] not in may_lack}
  check_params(needed, given, gates)
  return wanted


def configs(model: nnx.Module) -> dict[str, Any]:
  """The config of each VSAAttention of a model by its path, JSON values: for checkpoints of your own."""
  return {_join(path): module.config for path, module in _attentions(model)}


def check_params(
  wanted: Mapping[Any, Any], given: Mapping[Any, Any], gates: Collection[Any]
) -> None:
  """ValueError unless two trees of parameters have the same names and shapes.

  Args:
    wanted: the module's, by path (a tuple of names): arrays or shapes.
    given: the ones to load, likewise.
    gates: the paths of the gate projections, for the remedy.
  """
  missing = [k for k in wanted if k not in given]
  surplus = [k for k in given if k not in wanted]
  shapes = [
    f"{_join(k)}: got {list(given[k].shape)}, want {list(v.shape)}"
    for k, v in wanted.items()
    if k in given and given[k].shape != v.shape
  ]
  problems = []
  for what, names, remedy in (
    ("missing", missing, "weights without gates: zero_missing_gates=True, or use_gate=False"),
    ("surplus", surplus, "gates that would be lost: build the module with use_gate=True"),
  ):
    if names:
      only_gates = all(name[:-1] in gates for name in names)
      problems.append(f"{what} {[*map(_join, names)]}" + (f" ({remedy})" if only_gates else ""))
  if shapes:
    problems.append(f"of another shape {shapes}")
  if problems:
    raise ValueError(f"params: {'; '.join(problems)}; want the parameters of this module")


def check_configs(
  saved: Mapping[str, Any], built: Mapping[str, Any], *, zero_missing_gates: bool = False
) -> None:
  """ValueError unless every VSAAttention is built as the saved one was.

  What does not change the weights (sparsity, topk) may differ.

  Args:
    saved, built: config of each module, by its path in the model.
    zero_missing_gates: see `restore`.
  """
  problems = []
  for path in sorted(saved.keys() | built.keys()):
    if path not in saved or path not in built:
      problems.append(f"{path or 'the module'}: only {'saved' if path in saved else 'built'}")
      continue
    free = {"sparsity", "topk"}
    if zero_missing_gates and not saved[path]["use_gate"]:
      free |= {"use_gate", "gate_use_bias"}
    for name, value in built[path].items():
      if name not in free and saved[path].get(name) != value:
        remedy = (
          " (zero_missing_gates=True starts its gate at zero)"
          if name == "use_gate" and value
          else ""
        )
        problems.append(
          f"{path + '.' if path else ''}{name}: saved with {saved[path].get(name)}, built with {value}{remedy}"
        )
  if problems:
    raise ValueError(
      f"config: {'; '.join(problems)}; build the model as it was saved, or convert the weights"
    )


def _gates(model: nnx.Module) -> set[tuple[str, ...]]:
  """The paths of the gate projections; a layer of the user's that is called "gate" is none."""
  return {(*map(str, path), "gate") for path, _ in _attentions(model)}


def _attentions(model: nnx.Module) -> list[tuple[Any, VSAAttention]]:
  return [(p, m) for p, m in nnx.iter_modules(model) if isinstance(m, VSAAttention)]


def _params(model: nnx.Module) -> dict[tuple[str, ...], Any]:
  return flat_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def _struct(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def flat_params(tree: Mapping[Any, Any]) -> dict[tuple[str, ...], Any]:
  """A nested dict by path; every name a string."""
  flat: dict[tuple[str, ...], Any] = {}
  for name, value in tree.items():
    if isinstance(value, Mapping):
      flat.update({(str(name), *path): x for path, x in flat_params(value).items()})
    else:
      flat[(str(name),)] = value
  return flat


def _nested(flat: Mapping[tuple[str, ...], Any]) -> dict[Any, Any]:
  return nnx.traversals.unflatten_mapping(
    {tuple(int(n) if n.isdigit() else n for n in k): v for k, v in flat.items()}
  )


def _join(path: Any) -> str:
  return "/".join(str(n) for n in path)


def _split(name: str) -> tuple[str, ...]:
  return tuple(name.split("/"))
