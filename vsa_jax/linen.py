"""VSAAttention for Flax Linen: the NNX module through Flax's bridge, no second implementation."""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax.core import FrozenDict

import vsa_jax.nnx
from vsa_jax.checkpoints import check_params, flat_params


def VSAAttention(*args: Any, name: str | None = None, **kwargs: Any) -> nnx.bridge.ToLinen:
  """A Linen module with the arguments of `vsa_jax.nnx.VSAAttention`, less rngs.

  Example::

    attn = vsa_jax.linen.VSAAttention(8, 512, tile=(4, 4, 4), sparsity=0.9)
    variables = attn.init(jax.random.key(0), x, layout)
    y = attn.apply(variables, x, layout)

  Parameters have the names of the NNX module: query, key, value, gate, out, query_norm, key_norm.

  Raises:
    ValueError: from apply, when parameters are missing or surplus; the message lists them.
  """
  return _LinenVSAAttention(
    vsa_jax.nnx.VSAAttention, args=args, kwargs=FrozenDict(kwargs), name=name
  )


class _LinenVSAAttention(nnx.bridge.ToLinen):
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    if not self.is_initializing():
      build = lambda: self.nnx_class(*self.args, **self.kwargs, rngs=nnx.Rngs(0))
      want = nnx.to_pure_dict(nnx.state(nnx.eval_shape(build)))
      given = flat_params(self.variables.get("params", {}))
      check_params(flat_params(want), given, gates=())
    return super().__call__(*args, **kwargs)


_LinenVSAAttention.__name__ = "VSAAttention"  # Linen names parameters after it
