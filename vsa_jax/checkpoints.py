"""Weights of VSAAttention modules on disk, beside the configuration that they depend on."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from vsa_jax.nnx import VSAAttention

_CONFIG_FILE = "vsa_config.json"


def save(path: str | os.PathLike, model: nnx.Module) -> None:
  """Saves a model's parameters with Orbax, and the config of each VSAAttention in it.

  Args:
    path: a new directory.
    model: a VSAAttention, or any module that holds some.
  """
  folder = pathlib.Path(path).resolve()
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "params", nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  (folder / _CONFIG_FILE).write_text(json.dumps(_configs(model), indent=1))


def restore(
  path: str | os.PathLike, model: nnx.Module, *, zero_missing_gates: bool = False
) -> None:
  """Reads what `save` wrote into a model, in place.

  Args:
    path: the directory.
    model: built as the saved one was.
    zero_missing_gates: let a model with gates take weights without them; the gates become zero, so that
      it computes its sparse branch alone.

  Raises:
    ValueError: the tile or another entry of a config differs, or parameters are missing, surplus or of
      another shape; the message lists them.
  """
  folder = pathlib.Path(path).resolve()
  saved = json.loads((folder / _CONFIG_FILE).read_text())
  check_configs(saved, _configs(model), zero_missing_gates=zero_missing_gates)
  with ocp.StandardCheckpointer() as checkpointer:
    params = checkpointer.restore(folder / "params")
  load_params(model, params, zero_missing_gates=zero_missing_gates)


def load_params(
  model: nnx.Module, params: Mapping[str, Any], *, zero_missing_gates: bool = False
) -> None:
  """Puts a tree of parameters into a model, in place, and refuses to lose or invent any.

  Args:
    model: the module to fill.
    params: nested dict of arrays, as nnx.to_pure_dict(nnx.state(model, nnx.Param)) gives.
    zero_missing_gates: see `restore`.

  Raises:
    ValueError: parameters are missing, surplus or of another shape; the message lists them.
  """
  state = nnx.state(model, nnx.Param)
  want = nnx.to_pure_dict(state)
  if zero_missing_gates:
    have = dict(_flat(params))
    missing = {k: v for k, v in _flat(want) if k not in have and "gate" in k}
    params = _nested({**have, **{k: jax.numpy.zeros_like(v) for k, v in missing.items()}})
  check_params(want, params)
  nnx.replace_by_pure_dict(state, _nested(dict(_flat(params))))
  nnx.update(model, state)


def check_params(want: Mapping[str, Any], got: Mapping[str, Any]) -> None:
  """ValueError unless two trees of parameters have the same names and shapes.

  Args:
    want: the module's, nested dict of arrays or shapes.
    got: the ones to load.
  """
  wanted, given = dict(_flat(want)), dict(_flat(got))
  missing = [_join(k) for k in wanted if k not in given]
  surplus = [_join(k) for k in given if k not in wanted]
  shapes = [
    f"{_join(k)}: got {list(given[k].shape)}, want {list(v.shape)}"
    for k, v in wanted.items()
    if k in given and given[k].shape != v.shape
  ]
  problems = []
  if missing:
    remedy = ""
    if all("gate" in name.split("/") for name in missing):
      remedy = (
        " (weights without gates: zero_missing_gates=True, or build the module with use_gate=False)"
      )
    problems.append(f"missing {missing}{remedy}")
  if surplus:
    remedy = (
      " (gates that would be lost: build the module with use_gate=True)"
      if any("gate" in name.split("/") for name in surplus)
      else ""
    )
    problems.append(f"surplus {surplus}{remedy}")
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
        problems.append(
          f"{path + '.' if path else ''}{name}: saved with {saved[path].get(name)}, built with {value}"
        )
  if problems:
    raise ValueError(
      f"config: {'; '.join(problems)}; build the model as it was saved, or convert the weights"
    )


def _configs(model: nnx.Module) -> dict[str, Any]:
  return {
    _join(path): module.config
    for path, module in nnx.iter_modules(model)
    if isinstance(module, VSAAttention)
  }


def _flat(tree: Mapping[str, Any], path: tuple[str, ...] = ()):
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flat(value, (*path, str(name)))
    else:
      yield (*path, str(name)), value


def _nested(flat: Mapping[tuple[str, ...], Any]) -> dict[Any, Any]:
  return nnx.traversals.unflatten_mapping(
    {tuple(int(n) if n.isdigit() else n for n in k): v for k, v in flat.items()}
  )


def _join(path: Any) -> str:
  return "/".join(str(n) for n in path)
