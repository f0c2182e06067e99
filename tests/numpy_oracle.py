"""Float64 NumPy truth for the tests: brute force from the definitions, sharing no code with the library.

Letters: B batch, L tokens, N query heads, K kv heads, H head dim, J tiles.  Arrays are in packed order.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tiles:
  """A packed sequence cut in tiles: the tokens of each tile, in slot order."""

  members: list  # J lists of token numbers
  num_prefix: int
  spans: list  # (start, stop) tile ranges, one per video region

  @property
  def tile_of(self):
    """int [L]: the tile of each token."""
    pairs = sorted((token, j) for j, tokens in enumerate(self.members) for token in tokens)
    return np.array([j for _, j in pairs])

  def slots(self, size):
    """int [L]: the slot of each token."""
    pairs = sorted((t, j * size + o) for j, ts in enumerate(self.members) for o, t in enumerate(ts))
    return np.array([slot for _, slot in pairs])


def cut(segments, tile):
  """Rules 1.2 and 1.3, one token at a time."""
  size, start, prefix, videos = math.prod(tile), 0, [], []
  for segment in segments:
    if isinstance(segment, int):
      tokens = list(range(start, start + segment))
      prefix += [tokens[i : i + size] for i in range(0, segment, size)]
      start += segment
    else:
      cuboids = {}
      for t, y, x in np.ndindex(*segment):
        corner = (t // tile[0], y // tile[1], x // tile[2])
        cuboids.setdefault(corner, []).append(start + (t * segment[1] + y) * segment[2] + x)
      videos.append([cuboids[corner] for corner in sorted(cuboids)])
      start += math.prod(segment)
  members, spans = list(prefix), []
  for video in videos:
    spans.append((len(members), len(members) + len(video)))
    members += video
  return Tiles(members, len(prefix), spans)


def wide(x):
  """Any array in float64."""
  return np.asarray(x, np.float64)


@dataclasses.dataclass
class Attention:
  """Results of `attention`; the gradients are None without a cotangent."""

  out: np.ndarray
  lse: np.ndarray
  d_query: np.ndarray | None = None
  d_key: np.ndarray | None = None
  d_value: np.ndarray | None = None


def attention(query, key, value, keep=None, scale=None, d_out=None, d_lse=None):
  """Softmax attention over the kept keys, and its gradients.

  query [B, Lq, N, H]; key, value [B, Lk, K, H]; keep broadcastable to [B, N, Lq, Lk], how often a key
  counts; d_out like query, d_lse [B, Lq, N].  Rows without keys: 0, -inf, no gradient.
  """
  q, k, v = wide(query), wide(key), wide(value)
  groups = q.shape[2] // k.shape[2]
  k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
  scale = q.shape[3] ** -0.5 if scale is None else scale
  logits = np.einsum("bqnh,bknh->bnqk", q, k) * scale
  keep = np.broadcast_to(1.0 if keep is None else wide(keep), logits.shape)
  logits = np.where(keep > 0, logits, -np.inf)
  top = logits.max(-1, keepdims=True, initial=-np.inf)
  top = np.where(np.isinf(top), 0, top)
  weights = keep * np.exp(logits - top)
  total = weights.sum(-1, keepdims=True)
  weights = weights / np.where(total > 0, total, 1)
  out = np.einsum("bnqk,bknh->bqnh", weights, v)
  with np.errstate(divide="ignore"):
    lse = np.moveaxis((top + np.log(total))[..., 0], 1, 2)
  if d_out is None and d_lse is None:
    return Attention(out, lse)
  d_out = np.zeros_like(out) if d_out is None else wide(d_out)
  d_lse = np.zeros_like(lse) if d_lse is None else wide(d_lse)
  d_weights = np.einsum("bqnh,bknh->bnqk", d_out, v)
  delta = np.moveaxis((out * d_out).sum(-1) - d_lse, 1, 2)[..., None]
  d_logits = weights * (d_weights - delta) * scale
  fold = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3)
  return Attention(
    out,
    lse,
    np.einsum("bnqk,bknh->bqnh", d_logits, k),
    fold(np.einsum("bnqk,bqnh->bknh", d_logits, q)),
    fold(np.einsum("bnqk,bqnh->bknh", weights, d_out)),
  )


def pool(x, tiles, valid=None):
  """[B, L, N, H] -> [B, J, N, H]: the mean of each tile over its valid tokens; 0 when there are none."""
  x = wide(x)
  valid = np.ones(x.shape[:2], bool) if valid is None else valid
  rows = []
  for tokens in tiles.members:
    some = valid[:, tokens].sum(1)
    total = np.where(valid[:, tokens, None, None], x[:, tokens], 0).sum(1)
    rows.append(total / np.maximum(some, 1)[:, None, None])
  return np.stack(rows, 1)


def tile_scores(query, key, tiles, scale=None, valid=None):
  """[B, N, J, J]; -inf for key tiles without valid tokens."""
  q, k = pool(query, tiles, valid), pool(key, tiles, valid)
  k = np.repeat(k, q.shape[2] // k.shape[2], 2)
  scale = q.shape[3] ** -0.5 if scale is None else scale
  scores = np.einsum("bqnh,bknh->bnqk", q, k) * scale
  if valid is not None:
    some = np.stack([valid[:, tokens].any(1) for tokens in tiles.members], 1)
    scores = np.where(some[:, None, None], scores, -np.inf)
  return scores


def route(scores, tiles, keep, *, compete=False):
  """bool [B, N, J, J]: the prefix, and the `keep` best tiles of every region (rules 2.4, "exempt").

  keep: ints that broadcast to [B, N, J, regions].  With "compete" prefix and video are one region.
  NaN ranks last, a tie goes to the lower tile.
  """
  scores = np.where(np.isnan(scores), -np.inf, scores)
  mask = np.zeros(scores.shape, bool)
  mask[..., : tiles.num_prefix] = not compete
  mask[:, :, : tiles.num_prefix] = True
  spans = [(0, scores.shape[3])] if compete else tiles.spans
  keep = np.broadcast_to(keep, (*scores.shape[:3], len(spans)))
  for region, (start, stop) in enumerate(spans):
    best = np.argsort(-scores[..., start:stop], axis=-1, kind="stable")
    place = np.argsort(best, axis=-1)
    mask[..., start:stop] |= place < keep[..., region, None]
  return mask


@dataclasses.dataclass
class Op:
  """Results of `vsa`."""

  out: np.ndarray
  lse: np.ndarray
  mask: np.ndarray  # bool [B, N, J, J]
  fine: Attention
  coarse: np.ndarray  # [B, L, N, H]


def vsa(
  query,
  key,
  value,
  segments,
  tile,
  keep,
  *,
  gate=None,
  scale=None,
  valid=None,
  mask=None,
  d_out=None,
):
  """The whole op in packed order; `fine` has the gradients of fine for d_out."""
  tiles = cut(segments, tile)
  heads = np.shape(query)[2]
  scores = tile_scores(query, key, tiles, scale, valid)
  mask = route(scores, tiles, keep) if mask is None else mask
  tile_of = tiles.tile_of
  tokens = mask[:, :, tile_of][..., tile_of]
  if valid is not None:
    tokens = tokens & valid[:, None, :, None] & valid[:, None, None, :]
  fine = attention(query, key, value, tokens, scale, d_out)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  pooled = np.repeat(pool(value, tiles, valid), heads // np.shape(value)[2], 2)
  coarse = np.einsum("bnqk,bknh->bqnh", weights, pooled)[:, tile_of]
  if valid is not None:
    coarse = np.where(valid[..., None, None], coarse, 0)
  out = fine.out if gate is None else fine.out + wide(gate) * coarse
  return Op(out, fine.lse, mask, fine, coarse)
