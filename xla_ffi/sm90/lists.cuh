// Which key tiles a query tile keeps, walked by a warp. The rules are those of `Pairs` in params.h.
#pragma once

#include <cstdint>

#include "../params.h"
#include "ptx.cuh"

namespace vsa::sm90 {

// The entries of a query tile's row: the prefix tiles, then the listed ones; all tiles for a dense row.
struct Row {
  const int32_t* ids = nullptr;  // from entry `prefix` on
  int prefix = 0;                // entry i < prefix is tile i
  int end = 0, total = 0;        // entries that there are, and those that count

  Row() = default;
  __device__ Row(const Shape& shape, const Pairs& pairs, int batch, int head, int query_tile) {
    const int dense_rows = static_cast<int>(shape.num_dense_rows);
    prefix = end = total = static_cast<int>(shape.key_tiles);
    if (query_tile < dense_rows) return;
    const int64_t row = (batch * shape.heads + head) * shape.rows() + query_tile - dense_rows;
    prefix = static_cast<int>(shape.num_prefix_tiles);
    ids = pairs.indices + row * shape.width;
    end = prefix + static_cast<int>(shape.width);
    total = prefix + min(max(pairs.counts[row], 0), static_cast<int>(shape.width));
  }

  // The tile of an entry, if that lies before `end`.
  __device__ static int TileAt(int at, const int32_t* ids, int prefix, int end) {
    return at < prefix ? at : at < end ? ids[at - prefix] : -1;
  }
  __device__ static bool Keeps(int at, int tile, int prefix, int total, int key_tiles) {
    return at < total && (at < prefix || (tile >= prefix && tile < key_tiles));
  }
};

// The kept key tiles that have valid slots, in list order: the prefix tiles, then the listed ones; all tiles for a
// dense row. All methods are for a whole warp, in step.
class KeyTiles {
 public:
  static constexpr int kNone = 0x7fffffff;  // greater than any tile

  KeyTiles() = default;  // of a row that keeps nothing

  __device__ KeyTiles(const Shape& shape, const Pairs& pairs, int batch, int head, int query_tile)
      : row_(shape, pairs, batch, head, query_tile),
        sizes_(pairs.key_sizes + batch * shape.key_tiles),
        key_tiles_(static_cast<int>(shape.key_tiles)) {
    fetch(row_.end);
    next();
  }

  // The tile at hand, kNone past the last; how many of its slots are valid; and where it stands in the order, tiles
  // without valid slots counted.
  __device__ int tile() const { return tile_; }
  __device__ int size() const { return size_; }
  __device__ int place() const { return base_ - 32 + from_; }

  __device__ void next() {
    while (left_ == 0) {
      if (base_ >= row_.total) {
        tile_ = kNone;
        return;
      }
      fetch(row_.total);
    }
    from_ = __ffs(left_) - 1;
    left_ &= left_ - 1;
    tile_ = __shfl_sync(kWholeWarp, lane_tile_, from_);
    size_ = __shfl_sync(kWholeWarp, lane_size_, from_);
  }

 private:
  // The next 32 entries, one a lane. Entries before `end` are loaded: the first time it is the list's end, so that the loads
  // need not wait for the count.
  __device__ void fetch(int end) {
    const int at = base_ + threadIdx.x % 32;
    lane_tile_ = Row::TileAt(at, row_.ids, row_.prefix, end);
    lane_size_ = Row::Keeps(at, lane_tile_, row_.prefix, row_.total, key_tiles_) ? sizes_[lane_tile_] : 0;
    left_ = __ballot_sync(kWholeWarp, lane_size_ > 0);
    base_ += 32;
  }

  Row row_;
  const int32_t* sizes_ = nullptr;
  int key_tiles_ = 0, base_ = 0;
  int lane_tile_ = 0, lane_size_ = 0;  // this lane's entry
  unsigned left_ = 0;                  // lanes whose entries are still to come
  int from_ = 0;                       // the lane whose entry is at hand
  int tile_ = kNone, size_ = 0;
};

// The union of the lists of kLists rows, walked by a warp: the smallest of the lists' next tiles comes next. On ascending
// lists that is the union in order; on others each list is still walked in its order, with fewer steps in common.
// Lane i < kLists has list i's place in registers, and all lanes hold the next 32 entries of every list. All methods
// are for a whole warp, in step.
template <int kLists>
class MergedKeyTiles {
 public:
  // query_tile: lane i's, or -1 where there is none; query_size: its size, and without valid slots it keeps nothing.
  __device__ MergedKeyTiles(const Shape& shape, const Pairs& pairs, int batch, int head, int query_tile,
                            int query_size) {
    key_tiles_ = static_cast<int>(shape.key_tiles);
    sizes_ = pairs.key_sizes + batch * shape.key_tiles;
    if (query_tile >= 0) row_ = Row(shape, pairs, batch, head, query_tile);
    if (query_size == 0) row_.total = 0;
    // Of all lists at once, so that their loads share a latency; and to the end, not waiting for the counts.
    const int lane = threadIdx.x % 32;
    int tiles[kLists], sizes[kLists];
#pragma unroll
    for (int i = 0; i < kLists; ++i) tiles[i] = tile_at(i, lane, row_.end);
#pragma unroll
    for (int i = 0; i < kLists; ++i) sizes[i] = size_at(i, lane, tiles[i]);
#pragma unroll
    for (int i = 0; i < kLists; ++i) take(i, tiles[i], sizes[i]);
    advance(true);
    next_ = __reduce_min_sync(kWholeWarp, mine_);
  }

  __device__ bool left() const { return next_ != kNone; }
  __device__ int tile() const { return next_ >> kSizeBits; }
  __device__ int size() const { return next_ & ((1 << kSizeBits) - 1); }

  // The lists that have the tile at hand, and those that have any left, a bit each.
  __device__ unsigned with_tile() const { return __ballot_sync(kWholeWarp, mine_ == next_) & ((1 << kLists) - 1); }
  __device__ unsigned with_more() const { return __ballot_sync(kWholeWarp, mine_ != kNone); }

  __device__ void next() {
    advance(mine_ == next_);
    next_ = __reduce_min_sync(kWholeWarp, mine_);
  }

 private:
  // An entry is tile << kSizeBits | size: of 2**24 tiles of 64 not even K would fit into the memory of a GPU.
  static constexpr int kSizeBits = 7, kNone = 0x7fffffff;

  // The next entry of this lane's list, where `moves`.
  __device__ void advance(bool moves) {
    const int lane = threadIdx.x % 32;
    while (true) {
      const unsigned short_of = __ballot_sync(kWholeWarp, moves && left_ == 0 && base_ < row_.total);
      if (short_of == 0) break;
      fetch(__ffs(short_of) - 1);
    }
    const int from = (__ffs(left_) - 1) & 31;
    int entry = kNone;
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      const int of_list = __shfl_sync(kWholeWarp, entries_[i], from);
      if (lane == i) entry = of_list;
    }
    if (moves) {
      mine_ = left_ ? entry : kNone;
      left_ &= left_ - 1;
    }
  }

  // The next 32 entries of a list, one a lane.
  __device__ void fetch(int list) {
    const int at = __shfl_sync(kWholeWarp, base_, list) + threadIdx.x % 32;
    const int tile = tile_at(list, at, row_.total);
    take(list, tile, size_at(list, at, tile));
  }

  // Entry `at` of a list if it lies before `end` of that list's lane; and how many of its slots are valid, 0 if it does
  // not count.
  __device__ int tile_at(int list, int at, int end) const {
    const auto ids = reinterpret_cast<const int32_t*>(
        __shfl_sync(kWholeWarp, reinterpret_cast<unsigned long long>(row_.ids), list));
    return Row::TileAt(at, ids, __shfl_sync(kWholeWarp, row_.prefix, list), __shfl_sync(kWholeWarp, end, list));
  }
  __device__ int size_at(int list, int at, int tile) const {
    const int prefix = __shfl_sync(kWholeWarp, row_.prefix, list), total = __shfl_sync(kWholeWarp, row_.total, list);
    return Row::Keeps(at, tile, prefix, total, key_tiles_) ? sizes_[tile] : 0;
  }

  __device__ void take(int list, int tile, int size) {
    const unsigned found = __ballot_sync(kWholeWarp, size > 0);
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      if (list == i) entries_[i] = tile << kSizeBits | size;
    }
    if (static_cast<int>(threadIdx.x % 32) == list) {
      left_ = found;
      base_ += 32;
    }
  }

  Row row_;  // of this lane's list
  const int32_t* sizes_ = nullptr;
  int key_tiles_ = 0, base_ = 0;
  unsigned left_ = 0;           // lanes whose entries of this lane's list are still to come
  int entries_[kLists] = {};    // this lane's entry of every list
  int mine_ = kNone;            // the entry at hand of this lane's list
  int next_;                    // the smallest
};

}  // namespace vsa::sm90
