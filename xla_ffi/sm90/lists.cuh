// Which key tiles a query tile keeps, walked by a warp. The rules are those of `Pairs` in params.h.
#pragma once

#include <cstdint>

#include "../params.h"

namespace vsa::sm90 {

constexpr unsigned kWholeWarp = 0xffffffff;

// Calls visit(tile, size) for every kept key tile that has valid slots, in list order: the prefix tiles, then
// the listed ones; all tiles for a dense row. A whole warp calls this, and visits together.
template <class Visit>
__device__ __forceinline__ void for_each_key_tile(const Shape& shape, const Pairs& pairs, int batch,
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
      visit(__shfl_sync(kWholeWarp, tile, from), __shfl_sync(kWholeWarp, size, from));
    }
  }
}

}  // namespace vsa::sm90
