// Which key tiles a query tile keeps, walked by a warp. The rules are those of `Pairs` in params.h.
#pragma once

#include <cstdint>

#include "../params.h"

namespace vsa::sm90 {

constexpr unsigned kWholeWarp = 0xffffffff;

// Calls visit(tile, size, place) for every kept key tile that has valid slots, in list order: the prefix tiles,
// then the listed ones; all tiles for a dense row. `place` is where the tile stands in that order, those without
// valid slots counted. A whole warp calls this, and visits together.
template <class Visit>
__device__ __forceinline__ void for_each_placed_key_tile(const Shape& shape, const Pairs& pairs, int batch,
                                                  int head, int query_tile, Visit visit) {
  const int lane = threadIdx.x % 32;
  const int key_tiles = static_cast<int>(shape.key_tiles);
  const int dense_rows = static_cast<int>(shape.num_dense_rows);
  const bool dense = query_tile < dense_rows;
  const int prefix = dense ? key_tiles : static_cast<int>(shape.num_prefix_tiles);
  const int32_t* list = nullptr;
  int listed = 0;
  if (!dense) {
    const int64_t row = (batch * shape.heads + head) * shape.rows() + query_tile - dense_rows;
    list = pairs.indices + row * shape.width;
    listed = min(max(pairs.counts[row], 0), static_cast<int>(shape.width));
  }
  const int32_t* sizes = pairs.key_sizes + batch * shape.key_tiles;
  const int total = prefix + listed;

  // The entry this lane holds of the chunk at `base`; size 0 where there is none.
  int next_tile = 0, next_size = 0;
  auto fetch = [&](int base) {
    const int at = base + lane;
    next_size = 0;
    if (at < total) {
      next_tile = at < prefix ? at : list[at - prefix];
      const bool kept = at < prefix || (next_tile >= prefix && next_tile < key_tiles);
      if (kept) next_size = sizes[next_tile];
    }
  };

  fetch(0);
  for (int base = 0; base < total; base += 32) {
    const int tile = next_tile, size = next_size;
    fetch(base + 32);  // early: its latency passes behind this chunk
    for (unsigned left = __ballot_sync(kWholeWarp, size > 0); left; left &= left - 1) {
      const int from = __ffs(left) - 1;
      visit(__shfl_sync(kWholeWarp, tile, from), __shfl_sync(kWholeWarp, size, from), base + from);
    }
  }
}

// The same without places: visit(tile, size).
template <class Visit>
__device__ __forceinline__ void for_each_key_tile(const Shape& shape, const Pairs& pairs, int batch,
                                                  int head, int query_tile, Visit visit) {
  for_each_placed_key_tile(shape, pairs, batch, head, query_tile,
                           [&](int tile, int size, int) { visit(tile, size); });
}

// Calls visit(tile, size, place) for every query tile that keeps `key_tile` and has valid slots: the dense rows,
// then all others for a prefix tile, else those that list it. `place` is that of the key tile in the query tile's
// order (for_each_placed_key_tile). offsets and entries: of this head, as in bwd/parts.h. A whole warp calls this.
template <class Visit>
__device__ __forceinline__ void for_each_query_tile(const Shape& shape, const Pairs& pairs, int batch,
                                                    const int32_t* offsets, const int32_t* entries, int key_tile,
                                                    Visit visit) {
  const int lane = threadIdx.x % 32;
  const int prefix = static_cast<int>(shape.num_prefix_tiles);
  const int width = static_cast<int>(shape.width);
  const bool everywhere = key_tile < prefix;
  const int dense = static_cast<int>(everywhere ? shape.query_tiles : shape.num_dense_rows);
  const int first = everywhere ? 0 : offsets[key_tile];
  const int total = dense + (everywhere ? 0 : offsets[key_tile + 1] - first);
  const int32_t* list = entries + first - dense;
  const int32_t* sizes = pairs.query_sizes + batch * shape.query_tiles;

  for (int base = 0; base < total; base += 32) {
    int tile = base + lane, size = 0, place = key_tile;
    if (tile < total) {
      if (tile >= dense) {
        const int entry = list[tile];
        tile = entry / width;
        place = prefix + entry - tile * width;
        tile += static_cast<int>(shape.num_dense_rows);
      }
      size = sizes[tile];
    }
    for (unsigned left = __ballot_sync(kWholeWarp, size > 0); left; left &= left - 1) {
      const int from = __ffs(left) - 1;
      visit(__shfl_sync(kWholeWarp, tile, from), __shfl_sync(kWholeWarp, size, from),
            __shfl_sync(kWholeWarp, place, from));
    }
  }
}

}  // namespace vsa::sm90
