// Which query tiles keep a key tile, walked by a warp. The rules are those of `Pairs` in params.h.
#pragma once

#include <cstdint>

#include "../lists.cuh"

namespace vsa::sm90 {

// Calls visit(tile, size, place) for every query tile that keeps `key_tile` and has valid slots: the dense rows,
// then all others for a prefix tile, else those that list it. `place` is that of the key tile in the query tile's
// order (KeyTiles::place). offsets and entries: of this head, as in parts.h. A whole warp calls this.
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
