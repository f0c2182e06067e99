// What the kernels for Hopper take.
#pragma once

#include <cstdint>
#include <string>

#include "../params.h"

namespace vsa::sm90 {

// Why no kernel takes these shapes, or "".
inline std::string WhyNot(const Shape& shape) {
  if (shape.dtype != DType::kFloat16 && shape.dtype != DType::kBFloat16) return "dtype: want float16 or bfloat16";
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    return "head_dim: got " + std::to_string(shape.head_dim) + ", want 64 or 128";
  }
  if (shape.tile_size != 64 && shape.tile_size != 128 && shape.tile_size != 256) {
    return "tile size: got " + std::to_string(shape.tile_size) + ", want 64, 128 or 256";
  }
  // TMA coordinates are int32, and so are the numbers of items.
  constexpr int64_t kMost = int64_t{1} << 31;
  if (shape.batch * shape.query_length() >= kMost || shape.batch * shape.key_length() >= kMost ||
      shape.batch * shape.heads * (shape.query_tiles + shape.key_tiles) * 4 >= kMost ||
      shape.rows() * shape.width >= kMost) {
    return "sizes: got " + std::to_string(shape.batch) + " x " + std::to_string(shape.query_length()) + " queries, " +
           std::to_string(shape.key_length()) + " keys, " + std::to_string(shape.heads) +
           " heads, want fewer than 2^31 tokens over the batch and fewer than 2^29 tiles over batch and heads";
  }
  return "";
}

}  // namespace vsa::sm90
