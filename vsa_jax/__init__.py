"""Video Sparse Attention for JAX: tiles, routing and block-sparse attention for video diffusion transformers.

`rules N` in docstrings is section N of docs/rules.md, in the source tree.
"""

from vsa_jax import checkpoints, linen
from vsa_jax.attention import Aux, explain, video_sparse_attention
from vsa_jax.block_sparse.api import block_sparse_attention
from vsa_jax.block_sparse.ffi import EXPORT_CHECKS, register_kernels
from vsa_jax.layout import TileLayout
from vsa_jax.nnx import VSAAttention
from vsa_jax.routing import pool_tiles, routing_scores, select_tiles, tile_budget
from vsa_jax.selection import TileSelection
from vsa_jax.tiling import tile_tokens, untile_tokens

__all__ = [
  "EXPORT_CHECKS",
  "Aux",
  "TileLayout",
  "TileSelection",
  "VSAAttention",
  "block_sparse_attention",
  "checkpoints",
  "explain",
  "linen",
  "pool_tiles",
  "register_kernels",
  "routing_scores",
  "select_tiles",
  "tile_budget",
  "tile_tokens",
  "untile_tokens",
  "video_sparse_attention",
]
