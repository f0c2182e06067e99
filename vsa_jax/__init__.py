"""Video Sparse Attention for JAX: tiles, routing and block-sparse attention for video diffusion transformers.

`rules N` in docstrings is section N of docs/rules.md, in the source tree.
"""

from vsa_jax import checkpoints as checkpoints
from vsa_jax import linen as linen
from vsa_jax.attention import Aux as Aux
from vsa_jax.attention import explain as explain
from vsa_jax.attention import video_sparse_attention as video_sparse_attention
from vsa_jax.block_sparse.api import block_sparse_attention as block_sparse_attention
from vsa_jax.layout import TileLayout as TileLayout
from vsa_jax.nnx import VSAAttention as VSAAttention
from vsa_jax.routing import pool_tiles as pool_tiles
from vsa_jax.routing import routing_scores as routing_scores
from vsa_jax.routing import select_tiles as select_tiles
from vsa_jax.routing import tile_budget as tile_budget
from vsa_jax.selection import TileSelection as TileSelection
from vsa_jax.tiling import tile_tokens as tile_tokens
from vsa_jax.tiling import untile_tokens as untile_tokens
