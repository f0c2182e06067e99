"""Why forward mode fails, said in our words: JAX only says that there is a custom_vjp somewhere."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def reverse_mode_only(x: jax.Array) -> jax.Array:
  """x.  Forward-mode differentiation of it raises TypeError where its tangent would be computed."""
  return _value.bind(x)


def _refuse(*_: Any, **__: Any) -> Any:
  raise TypeError(
    "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) of an implementation with a backward of"
    " its own: pass implementation='reference', which has it, or use reverse mode (jax.grad, jax.vjp)"
  )


# An identity whose tangent goes through another identity: reverse mode transposes that one away, so only
# forward mode ever comes to compute or compile it.
_value, _tangent = Primitive("vsa_reverse_mode_only"), Primitive("vsa_forward_mode")
for _primitive in (_value, _tangent):
  _primitive.def_abstract_eval(lambda x: x)
  batching.primitive_batchers[_primitive] = lambda args, dims, p=_primitive: (p.bind(*args), *dims)
_value.def_impl(lambda x: x)
mlir.register_lowering(_value, lambda _, x: [x])
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
ad.primitive_jvps[_value] = lambda primals, tangents: (
  _value.bind(*primals),
  tangents[0] if isinstance(tangents[0], ad.Zero) else _tangent.bind(*tangents),
)
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
