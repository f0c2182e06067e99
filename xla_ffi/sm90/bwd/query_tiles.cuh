// Which query tiles keep a key tile, walked by a warp. The rules are those of `Pairs` in params.h.
#pragma once

#include <cstdint>

#include "../lists.cuh"

namespace vsa::sm90 {

// Every query tile that keeps `key_tile` and has valid slots: the dense rows, then all others for a prefix tile, else
// those that list it; of these the ones from `begin` to `end`, in parts of kWhole of their number. offsets and entries: of
// this head, as in parts.h. All methods are for a whole warp, in step.
class QueryTiles {
 public:
  static constexpr int kWhole = 1 << 14;

  __device__ QueryTiles(const Shape& shape, const Pairs& pairs, int batch, const int32_t* offsets,
                        const int32_t* entries, int key_tile, int begin, int end)
      : shape_(shape), pairs_(pairs), batch_(batch), key_tile_(key_tile) {
    const bool everywhere = key_tile < shape.num_prefix_tiles;
    first_listed_ = static_cast<int>(everywhere ? shape.query_tiles : shape.num_dense_rows);
    const int first = everywhere ? 0 : offsets[key_tile];
    const int total = first_listed_ + (everywhere ? 0 : offsets[key_tile + 1] - first);
    base_ = static_cast<int>(int64_t{total} * begin / kWhole);
    end_ = static_cast<int>(int64_t{total} * end / kWhole);
    list_ = entries + first - first_listed_;
    next();
  }

  // The tile at hand, if any is left; how many of its slots are valid; and the place of the key tile in its order
  // (KeyTiles::place).
  __device__ bool left() const { return left_; }
  __device__ int tile() const { return __shfl_sync(kWholeWarp, lane_tile_, __ffs(left_) - 1); }
  __device__ int size() const { return __shfl_sync(kWholeWarp, lane_size_, __ffs(left_) - 1); }
  __device__ int place() const { return __shfl_sync(kWholeWarp, lane_place_, __ffs(left_) - 1); }

  __device__ void next() {
    left_ &= left_ - 1;
    for (; left_ == 0 && base_ < end_; base_ += 32) fetch();
  }

 private:
  // The next 32, one a lane.
  __device__ void fetch() {
    int tile = base_ + threadIdx.x % 32;
    lane_size_ = 0;
    lane_place_ = key_tile_;
    if (tile < end_) {
      if (tile >= first_listed_) {
        const int entry = list_[tile], width = static_cast<int>(shape_.width);
        tile = entry / width;
        lane_place_ = static_cast<int>(shape_.num_prefix_tiles) + entry - tile * width;
        tile += static_cast<int>(shape_.num_dense_rows);
      }
      lane_size_ = pairs_.query_sizes[batch_ * shape_.query_tiles + tile];
    }
    lane_tile_ = tile;
    left_ = __ballot_sync(kWholeWarp, lane_size_ > 0);
  }

  // What constant memory or a few instructions give is not kept: producers have few registers.
  const Shape& shape_;
  const Pairs& pairs_;
  const int batch_, key_tile_;
  const int32_t* list_;
  int first_listed_, base_, end_;
  int lane_tile_, lane_size_, lane_place_;  // this lane's
  unsigned left_ = 0;                       // lanes whose tiles are still to come, that at hand among them
};

}  // namespace vsa::sm90
