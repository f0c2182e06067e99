// The TMA descriptors of the gradient kernels. Host only.
#pragma once

#include <cuda.h>

#include <string>

#include "../tensor_map.h"
#include "pipeline.cuh"

namespace vsa::sm90 {

struct Maps {
  CUtensorMap query, d_out, key, value;  // boxes of kBlockRows tokens, all columns
};

// Returns why not, or "".
inline std::string Encode(const BackwardParams& params, Maps* maps) {
  const Shape& shape = params.shape;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t length, int64_t heads) {
    return EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, shape.head_dim, kBlockRows,
                        static_cast<int>(shape.head_dim / kSwizzleColumns));
  };
  std::string error = encode(&maps->query, params.query, shape.query_length(), shape.heads);
  if (error.empty()) error = encode(&maps->d_out, params.d_out, shape.query_length(), shape.heads);
  if (error.empty()) error = encode(&maps->key, params.key, shape.key_length(), shape.kv_heads);
  if (error.empty()) error = encode(&maps->value, params.value, shape.key_length(), shape.kv_heads);
  return error;
}

}  // namespace vsa::sm90
