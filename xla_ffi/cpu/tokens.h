// Which tokens meet, and moving them between BLNH arrays and scratch.
#pragma once

#include "xla_ffi/cpu/simd.h"
#include "xla_ffi/params.h"

namespace vsa::cpu::VSA_ISA {

// Stationary tokens of a task, and streamed tokens of a step, at most.
constexpr int64_t kBlock = 64;

inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Clip(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Some tiles: the first `leading` ones, then those of `ids` that lie in [low, high).
struct TileList {
  int64_t leading = 0;
  const int32_t* ids = nullptr;
  int64_t count = 0;
  int64_t low = 0;
  int64_t high = 0;
};

// The key tiles of a query tile, in the order of its list.
inline TileList KeysOf(const Shape& shape, const Pairs& pairs, int64_t batch, int64_t head, int64_t query_tile) {
  if (query_tile < shape.num_dense_rows) return {shape.key_tiles};
  const int64_t list =
      (batch * shape.heads + head) * shape.rows() + query_tile - shape.num_dense_rows;
  return {shape.num_prefix_tiles, pairs.indices + list * shape.width, Clip(pairs.counts[list], 0, shape.width),
          shape.num_prefix_tiles, shape.key_tiles};
}

// Walks the valid tokens of a list of tiles, up to kBlock at a time.
class TokenWalk {
 public:
  // sizes: of the tiles, [J] of this sample.
  TokenWalk(const TileList& list, const int32_t* sizes, int64_t tile_size)
      : list_(list), sizes_(sizes), tile_size_(tile_size) {}

  // Writes the numbers of the next tokens; returns how many, 0 at the end.
  int64_t Next(int64_t* tokens) {
    int64_t found = 0;
    while (found < kBlock && entry_ < list_.leading + list_.count) {
      const int64_t tile = entry_ < list_.leading ? entry_ : list_.ids[entry_ - list_.leading];
      const bool listed = entry_ < list_.leading || (tile >= list_.low && tile < list_.high);
      const int64_t size = listed ? Clip(sizes_[tile], 0, tile_size_) : 0;
      for (; slot_ < size && found < kBlock; ++slot_) tokens[found++] = tile * tile_size_ + slot_;
      if (slot_ >= size) {
        slot_ = 0;
        ++entry_;
      }
    }
    return found;
  }

 private:
  TileList list_;
  const int32_t* sizes_;
  int64_t tile_size_;
  int64_t entry_ = 0;
  int64_t slot_ = 0;
};

// One head of a BLNH array: the row of a token is at data + token * stride.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  int64_t head_dim;

  // Of sample b and head n of an array of `length` tokens and `heads` heads.
  template <typename Pointer>
  static Rows Of(Pointer array, int64_t b, int64_t length, int64_t n, int64_t heads, int64_t head_dim) {
    return {static_cast<T*>(array) + (b * length * heads + n) * head_dim, heads * head_dim, head_dim};
  }
};

// Rows of these tokens -> to[i][h], in the accumulator's type.
template <typename T>
inline void Gather(const Rows<const T>& rows, const int64_t* tokens, int64_t count, Accumulator<T>* to) {
  for (int64_t i = 0; i < count; ++i) {
    const T* from = rows.data + tokens[i] * rows.stride;
    for (int64_t h = 0; h < rows.head_dim; ++h) to[i * rows.head_dim + h] = Widen(from[h]);
  }
}

// The panels [panel][h][lane] of `count` tokens from `first`, times a factor; zero where keep[i] is false and in
// the lanes past them.
template <typename T>
inline void Pack(const Rows<const T>& rows, int64_t first, int64_t count, const bool* keep, Accumulator<T> factor,
                 Accumulator<T>* panels) {
  using A = Accumulator<T>;
  constexpr int64_t kLanes = kPanelLanes<A>;
  for (int64_t i = 0; i < DivideUp(count, kLanes) * kLanes; ++i) {
    A* to = panels + i / kLanes * rows.head_dim * kLanes + i % kLanes;
    const bool kept = i < count && keep[i];
    const T* from = rows.data + (first + (kept ? i : 0)) * rows.stride;
    for (int64_t h = 0; h < rows.head_dim; ++h) to[h * kLanes] = kept ? factor * Widen(from[h]) : A{0};
  }
}

// The reverse, for all `count` tokens: times factors[i], exactly zero where keep[i] is false.
template <typename T>
inline void Unpack(const Accumulator<T>* panels, const Accumulator<T>* factors, const bool* keep, int64_t first,
                   int64_t count, const Rows<T>& rows) {
  using A = Accumulator<T>;
  constexpr int64_t kLanes = kPanelLanes<A>;
  for (int64_t i = 0; i < count; ++i) {
    const A* from = panels + i / kLanes * rows.head_dim * kLanes + i % kLanes;
    T* to = rows.data + (first + i) * rows.stride;
    for (int64_t h = 0; h < rows.head_dim; ++h) Narrow(keep[i] ? factors[i] * from[h * kLanes] : A{0}, to + h);
  }
}

// Calls function<T>(arguments...) for the storage type of dtype.
#define VSA_FOR_DTYPE(dtype, function, ...)                        \
  switch (dtype) {                                                 \
    case DType::kFloat16: return function<Half>(__VA_ARGS__);      \
    case DType::kBFloat16: return function<BFloat16>(__VA_ARGS__); \
    case DType::kFloat32: return function<float>(__VA_ARGS__);     \
    case DType::kFloat64: return function<double>(__VA_ARGS__);    \
  }                                                                \
  return false

}  // namespace vsa::cpu::VSA_ISA
