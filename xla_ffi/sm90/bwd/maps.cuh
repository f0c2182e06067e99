// The TMA descriptors of the gradient kernels. Host only.
#pragma once

#include <cuda.h>

#include <string>

#include "../tensor_map.h"
#include "pipeline.cuh"

namespace vsa::sm90 {

enum Gradient { kDQuery, kDKey, kDValue, kGradients };

struct Maps {
  CUtensorMap query, d_out, key, value;    // boxes of kBlockRows tokens, all columns
  CUtensorMap gradients[kGradients];       // and of 64 columns
};

// Returns why not, or "".
inline std::string Encode(const BackwardParams& params, Maps* maps) {
  const Shape& shape = params.shape;
  std::string error;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t length, int64_t heads, int blocks) {
    if (!error.empty()) return;
    error = EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, shape.head_dim, kBlockRows, blocks);
  };
  const int all = static_cast<int>(shape.head_dim / kSwizzleColumns);
  encode(&maps->query, params.query, shape.query_length(), shape.heads, all);
  encode(&maps->d_out, params.d_out, shape.query_length(), shape.heads, all);
  encode(&maps->key, params.key, shape.key_length(), shape.kv_heads, all);
  encode(&maps->value, params.value, shape.key_length(), shape.kv_heads, all);
  encode(&maps->gradients[kDQuery], params.d_query, shape.query_length(), shape.heads, 1);
  encode(&maps->gradients[kDKey], params.d_key, shape.key_length(), shape.kv_heads, 1);
  encode(&maps->gradients[kDValue], params.d_value, shape.key_length(), shape.kv_heads, 1);
  return error;
}

}  // namespace vsa::sm90
