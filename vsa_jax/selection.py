"""TileSelection: sparsity as a value.  Which key tiles each query tile keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vsa_jax.arguments import is_known
from vsa_jax.sharding import on_own_shards


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, init=False)
class TileSelection:
  """The key tiles that each query tile keeps, as lists of tile numbers.

  What every row keeps is stated once, by static integers, and only what was chosen is stored:

  * key tiles 0..num_prefix_tiles-1 are kept by every query tile and named by no list;
  * query tiles 0..num_dense_rows-1 keep every key tile and have no list;
  * list r belongs to query tile num_dense_rows + r.

  Letters: B batch, N query heads (also under GQA), R lists, W list width, Jq and Jk query and key tiles.

  Args:
    indices: int32 [B, N, R, W], absolute key-tile numbers in [num_prefix_tiles, num_key_tiles).  The
      first `counts` ids of a list are its tiles, in any order; the rest is never read.  Ids are meant
      to be distinct; a duplicate counts twice, forward and backward.  W = 0 is legal.
    counts: int32 [B, N, R], each in [0, W].  A count of 0 with no prefix is a row without keys.
    num_prefix_tiles: see above.
    num_dense_rows: see above; default num_prefix_tiles.
    num_key_tiles: Jk; default num_dense_rows + R, that is, as many key tiles as query tiles.

  A bad table is a ValueError in the function that uses it, when its values are known.  Under a trace they
  are not: counts then clip to [0, W] and an id out of range keeps no key, on every implementation.
  """

  indices: jax.Array
  counts: jax.Array
  num_prefix_tiles: int
  num_dense_rows: int
  num_key_tiles: int

  def __init__(
    self,
    indices: Any,
    counts: Any,
    num_prefix_tiles: int = 0,
    *,
    num_dense_rows: int | None = None,
    num_key_tiles: int | None = None,
  ):
    # No checks here: JAX rebuilds pytrees out of things that are not arrays.
    if num_dense_rows is None:
      num_dense_rows = num_prefix_tiles
    if num_key_tiles is None:
      num_key_tiles = num_dense_rows + indices.shape[2]
    set_ = object.__setattr__
    set_(self, "indices", indices)
    set_(self, "counts", counts)
    set_(self, "num_prefix_tiles", num_prefix_tiles)
    set_(self, "num_dense_rows", num_dense_rows)
    set_(self, "num_key_tiles", num_key_tiles)

  def tree_flatten_with_keys(self):
    """For jax.tree_util."""
    key = jax.tree_util.GetAttrKey
    children = ((key("indices"), self.indices), (key("counts"), self.counts))
    return children, (self.num_prefix_tiles, self.num_dense_rows, self.num_key_tiles)

  @classmethod
  def tree_unflatten(cls, static, children):
    """For jax.tree_util."""
    num_prefix_tiles, num_dense_rows, num_key_tiles = static
    indices, counts = children
    return cls(
      indices, counts, num_prefix_tiles, num_dense_rows=num_dense_rows, num_key_tiles=num_key_tiles
    )

  @property
  def num_query_tiles(self) -> int:
    """Jq."""
    return self.num_dense_rows + self.indices.shape[2]

  @property
  def width(self) -> int:
    """W."""
    return self.indices.shape[3]

  def keeps(self) -> jax.Array:
    """bool [B, N, R, W]: which entries of `indices` are read: in the count, and a key tile."""
    ids = jnp.asarray(self.indices)
    counts = jnp.asarray(self.counts)[..., None]
    return (
      (jnp.arange(self.width) < counts)
      & (ids >= self.num_prefix_tiles)
      & (ids < self.num_key_tiles)
    )

  @classmethod
  def from_mask(cls, mask: Any) -> TileSelection:
    """The selection that keeps the tile pairs of a block mask, all of them in lists.

    Args:
      mask: bool [B, N, Jq, Jk], True = keep.  The lists are as wide as its largest count, or Jk wide
        when its values are not known (under a trace).

    Raises:
      ValueError: mask of the wrong rank or dtype.
    """
    if np.ndim(mask) != 4 or getattr(mask, "dtype", np.dtype("O")).kind != "b":
      got = f"{getattr(mask, 'dtype', type(mask).__name__)}{list(np.shape(mask))}"
      raise ValueError(f"mask: got {got}, want bool [B, N, Jq, Jk]; compare or cast to bool")
    num_key_tiles = mask.shape[3]
    width = int(np.asarray(mask).sum(3).max(initial=0)) if is_known(mask) else num_key_tiles
    ids, counts = on_own_shards(_ascending, jnp.asarray(mask), unsharded_axis=3)
    return cls(ids[..., :width], counts, 0, num_dense_rows=0, num_key_tiles=num_key_tiles)

  def to_mask(self) -> jax.Array:
    """bool [B, N, Jq, Jk], True = kept; a duplicate shows once.

    Raises:
      ValueError: a bad table; also in `to_q2k` and `transposed`.
    """
    return self._on_shards(lambda here: here.multiplicity() > 0)

  def multiplicity(self) -> jax.Array:
    """int32 [B, N, Jq, Jk]: how often a query tile keeps a key tile; 2 and more where ids repeat."""
    ids = jnp.where(self.keeps(), self.indices, self.num_key_tiles)
    batch, heads, rows, _ = ids.shape
    b, n, r = jnp.ogrid[:batch, :heads, :rows]
    lists = jnp.zeros((batch, heads, rows, self.num_key_tiles), jnp.int32)
    lists = lists.at[b[..., None], n[..., None], r[..., None], ids].add(1, mode="drop")
    lists = lists.at[..., : self.num_prefix_tiles].set(1)
    dense = jnp.ones((batch, heads, self.num_dense_rows, self.num_key_tiles), jnp.int32)
    return jnp.concatenate([dense, lists], axis=2)

  def to_q2k(self) -> tuple[jax.Array, jax.Array]:
    """The reference implementation's table (rules 2.6): (q2k_idx, q2k_num).

    Returns:
      q2k_idx int32 [B, N, Jq, Jk]: the kept key tiles of every query tile, ascending, then -1.
      q2k_num int32 [B, N, Jq]: how many there are.  A duplicate counts once.
    """
    ids, counts = on_own_shards(_ascending, self.to_mask(), unsharded_axis=3)
    return jnp.where(ids == self.num_key_tiles, -1, ids), counts

  def transposed(self) -> tuple[jax.Array, jax.Array]:
    """The listed pairs by key tile: which query tiles list it.  Same answer on every run.

    Returns:
      offsets int32 [B, N, Jk + 1]: key tile j is listed by rows[offsets[j]:offsets[j + 1]].
      rows int32 [B, N, R * W]: query-tile numbers, ascending for each key tile; a duplicate shows twice;
        what lies past offsets[-1] is filled with num_query_tiles.  The implied pairs (prefix columns,
        dense rows) are not listed.
    """
    return self._on_shards(TileSelection._transposed)

  def _transposed(self) -> tuple[jax.Array, jax.Array]:
    batch, heads, rows, width = self.indices.shape
    keys = jnp.where(self.keeps(), self.indices, self.num_key_tiles).reshape(
      batch, heads, rows * width
    )
    queries = self.num_dense_rows + jnp.arange(rows * width, dtype=jnp.int32) // max(width, 1)
    queries = jnp.broadcast_to(queries, keys.shape)
    keys, queries = lax.sort(
      (keys.astype(jnp.int32), queries), dimension=2, num_keys=1, is_stable=True
    )
    first = jax.vmap(
      jax.vmap(lambda a: jnp.searchsorted(a, jnp.arange(self.num_key_tiles + 1), side="left"))
    )
    offsets = first(keys).astype(jnp.int32)
    return offsets, jnp.where(keys == self.num_key_tiles, self.num_query_tiles, queries)

  def _on_shards(self, function: Callable[[TileSelection], Any]) -> Any:
    """function(self), on the shards of batch and heads in explicit mode."""
    check_selection(self, *np.shape(self.indices)[:2])
    leaves, tree = jax.tree.flatten(self)
    return on_own_shards(
      lambda *leaves: function(jax.tree.unflatten(tree, leaves)), *leaves, unsharded_axis=2
    )


def _ascending(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The ids [..., Jk] that a mask keeps, ascending, then Jk; and how many there are."""
  num_key_tiles = mask.shape[-1]
  ids = jnp.where(mask, jnp.arange(num_key_tiles, dtype=jnp.int32), num_key_tiles)
  return lax.sort(ids, dimension=ids.ndim - 1), mask.sum(-1, dtype=jnp.int32)


def check_selection(selection: Any, batch: int, heads: int) -> None:
  """ValueError unless the selection is well formed for [batch, heads] queries.

  Shapes are checked always, table values when they are known.
  """
  if not isinstance(selection, TileSelection):
    raise ValueError(
      f"selection: got {type(selection).__name__}, want a TileSelection; select_tiles makes one, and"
      " TileSelection.from_mask turns a block mask into one"
    )
  ids, counts = selection.indices, selection.counts
  for name, array in (("indices", ids), ("counts", counts)):
    dtype = getattr(array, "dtype", np.dtype("O"))
    if dtype.kind not in "iu" or dtype.itemsize < 4:  # a narrow one cannot hold num_key_tiles
      raise ValueError(f"selection.{name}: got {getattr(array, 'dtype', type(array))}, want int32")
  if np.ndim(ids) != 4 or ids.shape[:2] != (batch, heads):
    raise ValueError(
      f"selection.indices: got shape {list(ids.shape)}, want [{batch}, {heads}, R, W] (batch and query"
      " heads of query; one list per query head, also under GQA)"
    )
  if counts.shape != ids.shape[:3]:
    raise ValueError(
      f"selection.counts: got shape {list(counts.shape)}, want {list(ids.shape[:3])}"
    )
  prefix, dense, keys = (
    selection.num_prefix_tiles,
    selection.num_dense_rows,
    selection.num_key_tiles,
  )
  if not all(type(n) is int or isinstance(n, np.integer) for n in (prefix, dense, keys)) or not (
    0 <= prefix <= keys and dense >= 0
  ):
    raise ValueError(
      f"selection: got num_prefix_tiles={prefix}, num_dense_rows={dense}, num_key_tiles={keys}, want ints,"
      " 0 <= num_prefix_tiles <= num_key_tiles and num_dense_rows >= 0"
    )
  if is_known(ids) and is_known(counts):
    _check_table(np.asarray(ids), np.asarray(counts), prefix, keys)


def _check_table(ids: np.ndarray, counts: np.ndarray, prefix: int, keys: int) -> None:
  width = ids.shape[3]
  wrong = np.argwhere((counts < 0) | (counts > width))
  if wrong.size:
    at = tuple(wrong[0].tolist())
    raise ValueError(
      f"selection.counts{list(at)}: got {counts[at]}, want 0..{width}, the width of the lists"
    )
  wrong = np.argwhere((np.arange(width) < counts[..., None]) & ((ids < prefix) | (ids >= keys)))
  if wrong.size:
    at = tuple(wrong[0].tolist())
    remedy = "; key tiles below num_prefix_tiles are kept already" if 0 <= ids[at] < prefix else ""
    raise ValueError(
      f"selection.indices{list(at)}: got key tile {ids[at]}, want [{prefix}, {keys}) among the first"
      f" `counts` ids of a list{remedy}"
    )


jax.export.register_pytree_node_serialization(
  TileSelection,
  serialized_name="vsa_jax.TileSelection",
  serialize_auxdata=lambda static: json.dumps(static).encode(),
  deserialize_auxdata=lambda data: tuple(json.loads(data)),
)
