// Which key tiles a query tile keeps, walked by a warp. The rules are those of `Pairs` in params.h.
#pragma once

#include <cstdint>

#include "../params.h"

namespace vsa::sm90 {

constexpr unsigned kWholeWarp = 0xffffffff;

// The kept key tiles that have valid slots, in list order: the prefix tiles, then the listed ones; all tiles for a
// dense row. All methods are for a whole warp, in step.
class KeyTiles {
 public:
  static constexpr int kNone = 0x7fffffff;  // greater than any tile

  KeyTiles() = default;  // of a row that keeps nothing

  __device__ KeyTiles(const Shape& shape, const Pairs& pairs, int batch, int head, int query_tile) {
    const int dense_rows = static_cast<int>(shape.num_dense_rows);
    key_tiles_ = static_cast<int>(shape.key_tiles);
    sizes_ = pairs.key_sizes + batch * shape.key_tiles;
    prefix_ = total_ = key_tiles_;
    if (query_tile >= dense_rows) {
      const int64_t row = (batch * shape.heads + head) * shape.rows() + query_tile - dense_rows;
      prefix_ = static_cast<int>(shape.num_prefix_tiles);
      list_ = pairs.indices + row * shape.width;
      total_ = prefix_ + min(max(pairs.counts[row], 0), static_cast<int>(shape.width));
    }
    next();
  }

  // The tile at hand, kNone past the last; how many of its slots are valid; and where it stands in the order, tiles
  // without valid slots counted.
  __device__ int tile() const { return tile_; }
  __device__ int size() const { return size_; }
  __device__ int place() const { return base_ - 32 + from_; }

  __device__ void next() {
    while (left_ == 0) {
      if (base_ >= total_) {
        tile_ = kNone;
        return;
      }
      fetch();
    }
    from_ = __ffs(left_) - 1;
    left_ &= left_ - 1;
    tile_ = __shfl_sync(kWholeWarp, lane_tile_, from_);
    size_ = __shfl_sync(kWholeWarp, lane_size_, from_);
  }

 private:
  // The next 32 entries, one a lane.
  __device__ void fetch() {
    const int at = base_ + threadIdx.x % 32;
    lane_size_ = 0;
    if (at < total_) {
      lane_tile_ = at < prefix_ ? at : list_[at - prefix_];
      const bool kept = at < prefix_ || (lane_tile_ >= prefix_ && lane_tile_ < key_tiles_);
      if (kept) lane_size_ = sizes_[lane_tile_];
    }
    left_ = __ballot_sync(kWholeWarp, lane_size_ > 0);
    base_ += 32;
  }

  const int32_t *list_ = nullptr, *sizes_ = nullptr;
  int key_tiles_ = 0, prefix_ = 0, total_ = 0, base_ = 0;
  int lane_tile_ = 0, lane_size_ = 0;  // this lane's entry
  unsigned left_ = 0;                  // lanes whose entries are still to come
  int from_ = 0;                       // the lane whose entry is at hand
  int tile_ = kNone, size_ = 0;
};

}  // namespace vsa::sm90
