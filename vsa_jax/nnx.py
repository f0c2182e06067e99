"""VSAAttention: self-attention of a video diffusion transformer, for Flax NNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from jax.sharding import AxisType, PartitionSpec

from vsa_jax.arguments import check_tokens, tile_sizes_of, valid_slots
from vsa_jax.attention import video_sparse_attention
from vsa_jax.layout import TileLayout
from vsa_jax.routing import plain_budget
from vsa_jax.tiling import untile_tokens

_lecun_normal = initializers.lecun_normal()
_zeros = initializers.zeros_init()


class VSAAttention(nnx.Module):
  """Projections, Video Sparse Attention, gated coarse branch, output projection.

  Example::

    layout = TileLayout([77, (8, 16, 16)], tile=(4, 4, 4))  # 77 text tokens, then a video
    attn = VSAAttention(8, 512, tile=(4, 4, 4), sparsity=0.9, rngs=nnx.Rngs(0))
    y = attn(x, layout)  # x, y [B, layout.num_tokens, 512]

  The gate's projection starts at zero, so a new module (or one whose weights come from a model without
  gates) computes its sparse branch alone, and learns how much of the coarse branch to add (rules 4).

  Args:
    num_heads: N, query heads.
    in_features: features of x.
    qkv_features: features of all query heads together; default in_features.
    out_features: features of y; default in_features.
    num_kv_heads: K, key and value heads, a divisor of num_heads; default num_heads.
    tile: (bT, bH, bW), the tile that the weights are trained with; the layout of a call must have it.
    sparsity: the share of each video region's tiles to drop; a scalar or one per region.
    topk: or the number of tiles to keep.  At most one of the two; without either a call must say sparsity.
    use_gate: whether there is a coarse branch.
    gate_use_bias: whether its projection has a bias (FastVideo's Wan has, its H3 has not).
    use_bias: whether the other projections have one.
    normalize_qk: RMSNorm of query and key over each head's features.
    qk_norm_epsilon: of that norm.
    dtype: of the computation; default: promoted from x and the parameters.
    param_dtype: of the parameters.
    precision: of projections and attention matmuls.
    kernel_init: of all projections but the gate's.
    implementation: see `block_sparse_attention`.
    sharding: NamedSharding of query [B, L, N, H], for meshes with automatic axes.
    rngs: of the initialisers; not kept.

  Parameters: kernels of query, key, value and gate [in_features, heads, head_dim], of out [heads,
  head_dim, out_features]; biases [heads, head_dim] and [out_features]; query_norm and key_norm scales
  [head_dim].  Tensor parallelism shards the heads of all of them.

  Raises:
    ValueError: a wrong argument, named.
  """

  def __init__(
    self,
    num_heads: int,
    in_features: int,
    qkv_features: int | None = None,
    out_features: int | None = None,
    num_kv_heads: int | None = None,
    *,
    tile: tuple[int, int, int],
    sparsity: float | Sequence[float] | None = None,
    topk: int | Sequence[int] | None = None,
    use_gate: bool = True,
    gate_use_bias: bool = False,
    use_bias: bool = True,
    normalize_qk: bool = False,
    qk_norm_epsilon: float = 1e-6,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    precision: Any = None,
    kernel_init: Callable = _lecun_normal,
    implementation: Any = None,
    sharding: jax.sharding.NamedSharding | None = None,
    rngs: nnx.Rngs,
  ):
    qkv_features = in_features if qkv_features is None else qkv_features
    out_features = in_features if out_features is None else out_features
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, value in (
      ("num_heads", num_heads),
      ("in_features", in_features),
      ("out_features", out_features),
    ):
      if value < 1:
        raise ValueError(f"{name}: got {value}, want at least 1")
    if qkv_features % num_heads or qkv_features < 1:
      raise ValueError(
        f"qkv_features: got {qkv_features}, want a multiple of num_heads={num_heads}"
      )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
      raise ValueError(f"num_kv_heads: got {num_kv_heads}, want a divisor of num_heads={num_heads}")
    if sparsity is not None and topk is not None:
      raise ValueError(
        f"sparsity, topk: got sparsity={sparsity!r} and topk={topk!r}, want at most one"
      )
    self.num_heads = num_heads
    self.num_kv_heads = num_kv_heads
    self.in_features = in_features
    self.head_dim = qkv_features // num_heads
    self.out_features = out_features
    self.tile = TileLayout([1], tile).tile
    self.sparsity, self.topk = plain_budget(sparsity, topk)
    self.use_gate = use_gate
    self.gate_use_bias = gate_use_bias
    self.use_bias = use_bias
    self.normalize_qk = normalize_qk
    self.qk_norm_epsilon = qk_norm_epsilon
    self.precision = precision
    self.implementation = implementation
    self.sharding = sharding

    def projection(
      heads: int, *, use_bias: bool = use_bias, zero: bool = False
    ) -> nnx.LinearGeneral:
      return nnx.LinearGeneral(
        in_features,
        (heads, self.head_dim),
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        kernel_init=_zeros if zero else kernel_init,
        rngs=rngs,
      )

    def norm() -> nnx.RMSNorm:
      return nnx.RMSNorm(
        self.head_dim, epsilon=qk_norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs
      )

    self.query = projection(num_heads)
    self.key = projection(num_kv_heads)
    self.value = projection(num_kv_heads)
    self.query_norm = norm() if normalize_qk else None
    self.key_norm = norm() if normalize_qk else None
    self.out = nnx.LinearGeneral(
      (num_heads, self.head_dim),
      out_features,
      axis=(-2, -1),
      use_bias=use_bias,
      dtype=dtype,
      param_dtype=param_dtype,
      precision=precision,
      kernel_init=kernel_init,
      rngs=rngs,
    )
    # Last, so that the other weights are the same with and without a gate.
    self.gate = projection(num_heads, use_bias=gate_use_bias, zero=True) if use_gate else None

  @property
  def config(self) -> dict[str, Any]:
    """What the weights depend on, as JSON values: save it beside them (see `vsa_jax.checkpoints`)."""
    config = {
      "num_heads": self.num_heads,
      "in_features": self.in_features,
      "qkv_features": self.num_heads * self.head_dim,
      "out_features": self.out_features,
      "num_kv_heads": self.num_kv_heads,
      "tile": self.tile,
      "sparsity": self.sparsity,
      "topk": self.topk,
      "use_gate": self.use_gate,
      "gate_use_bias": self.gate_use_bias,
      "use_bias": self.use_bias,
      "normalize_qk": self.normalize_qk,
      "qk_norm_epsilon": self.qk_norm_epsilon,
    }
    return {name: list(x) if isinstance(x, tuple) else x for name, x in config.items()}

  def __call__(
    self,
    x: jax.Array,
    layout: TileLayout,
    *,
    position_fn: Callable[[jax.Array], jax.Array] | None = None,
    tiled: bool = False,
    sparsity: float | Sequence[float] | None = None,
    budget: Any = None,
    tile_sizes: Any = None,
    return_aux: bool = False,
  ) -> Any:
    """Self-attention of one packed sequence.

    Args:
      x: [B, L, in_features] in packed order, L = layout.num_tokens; [B, P, in_features], P =
        layout.padded_length, when tiled.
      layout: the geometry; its tile is the module's.
      position_fn: applied to query [B, L, N, H] and to key [B, L, K, H] after the norm and before
        tiling, for instance a rotary embedding; under tiled=True it sees tiled tokens.  It keeps the
        shape; its result is cast back to the dtype it was given.  (A `jax.tree_util.Partial` crosses
        jit, remat and scan as an argument.)
      tiled: x and y are in tiled order, as `tile_tokens` makes it: tile once per model, not per layer.
      sparsity: instead of the module's sparsity or topk.
      budget, tile_sizes, return_aux: as for `video_sparse_attention`.

    Returns:
      y [B, L, out_features] (P when tiled), 0 in padding; with return_aux (y, Aux).

    Raises:
      ValueError: x, layout or tile does not fit; the message names both sides.
    """
    check_tokens(x, "x", layout, tiled=tiled)
    if x.ndim != 3 or x.shape[2] != self.in_features:
      raise ValueError(
        f"x: got shape {list(x.shape)}, want [B, {x.shape[1]}, {self.in_features}] (in_features)"
      )
    if layout.tile != self.tile:
      raise ValueError(
        f"layout: got tile {layout.tile}, want {self.tile}, which this module was built with; weights are trained"
        " for one tile: build the layout with it, or the module anew"
      )
    topk = self.topk if sparsity is None else None
    sparsity = self.sparsity if sparsity is None else sparsity
    valid = _valid_tokens(x, layout, tile_sizes, tiled)
    if valid is not None:  # a NaN in padding would reach the gradients of the kernels
      x = jnp.where(valid, x, 0)

    query, key, value = self.query(x), self.key(x), self.value(x)
    if self.query_norm is not None and self.key_norm is not None:
      query, key = self.query_norm(query), self.key_norm(key)
    if position_fn is not None:
      query, key = _positioned(position_fn, "query", query), _positioned(position_fn, "key", key)
    out, aux = video_sparse_attention(
      query,
      key,
      value,
      layout,
      sparsity=sparsity,
      topk=topk,
      budget=budget,
      gate=None if self.gate is None else self.gate(x),
      tiled=tiled,
      tile_sizes=tile_sizes,
      precision=self.precision,
      implementation=self.implementation,
      sharding=self.sharding,
      return_aux=True,
    )
    y = self.out(out, out_sharding=_out_sharding(out))
    if valid is not None:
      y = jnp.where(valid, y, 0)
    return (y, aux) if return_aux else y


def _valid_tokens(
  x: jax.Array, layout: TileLayout, tile_sizes: Any, tiled: bool
) -> jax.Array | None:
  """bool [B, tokens, 1]: which tokens of x are not padding; None when all are, for certain."""
  if tile_sizes is None and not (tiled and layout.is_ragged):
    return None
  batch, tiles = x.shape[0], layout.num_tiles
  sizes = tile_sizes_of("tile_sizes", tile_sizes, batch, tiles, layout.tile_sizes)
  valid = valid_slots(sizes, layout.tile_size)[..., None]
  return valid if tiled else untile_tokens(valid, layout)


def _positioned(
  position_fn: Callable[[jax.Array], jax.Array], name: str, x: jax.Array
) -> jax.Array:
  y = position_fn(x)
  if jnp.shape(y) != x.shape:
    raise ValueError(
      f"position_fn: got shape {list(jnp.shape(y))} for {name} of shape {list(x.shape)}, want the same"
    )
  return y.astype(x.dtype)


def _out_sharding(out: jax.Array) -> PartitionSpec | None:
  """The output projection sums over heads, so explicit mode must be told where its result lives."""
  found = jax.typeof(out).sharding
  if not any(kind == AxisType.Explicit for kind in found.mesh.axis_types):
    return None
  return PartitionSpec(found.spec[0], None, None)
