// Attention of single query rows, the plain way, in double.
#pragma once

#include "../params.h"

namespace vsa::tests {

// Visits (key tile, valid slots) as `Pairs` in params.h says, a tile at a time.
template <class Visit>
__host__ __device__ void VisitKeyTiles(const Shape& s, const Pairs& pairs, int64_t batch, int64_t head, int64_t tile,
                                       Visit visit) {
  const int32_t* sizes = pairs.key_sizes + batch * s.key_tiles;
  const bool dense = tile < s.num_dense_rows;
  const int64_t prefix = dense ? s.key_tiles : s.num_prefix_tiles;
  for (int64_t j = 0; j < prefix; ++j) visit(j, sizes[j]);
  if (dense) return;
  const int64_t row = (batch * s.heads + head) * s.rows() + tile - s.num_dense_rows;
  for (int64_t i = 0; i < s.width && i < pairs.counts[row]; ++i) {
    const int32_t j = pairs.indices[row * s.width + i];
    if (j >= s.num_prefix_tiles && j < s.key_tiles) visit(j, sizes[j]);
  }
}

// Block i computes query row rows[i], a flat index of [B, N, Jq*M]: out [i, H] and lse [i], base 2.
template <class T>
__global__ void ReferenceForward(Shape s, Pairs pairs, double scale_log2, const T* query, const T* key, const T* value,
                                 const int64_t* rows, double* out, double* lse) {
  const int64_t row = rows[blockIdx.x], token = row % s.query_length(), head = row / s.query_length() % s.heads;
  const int64_t batch = row / s.query_length() / s.heads, kv_head = head / s.groups(), tile = token / s.tile_size;
  extern __shared__ double memory[];
  double* partial = memory;                  // [threads], for sums
  double* sum = memory + blockDim.x;         // [H]
  const T* q = query + ((batch * s.query_length() + token) * s.heads + head) * s.head_dim;
  const auto at = [&](const T* x, int64_t j, int64_t slot) {
    return x + ((batch * s.key_length() + j * s.tile_size + slot) * s.kv_heads + kv_head) * s.head_dim;
  };
  const auto logit = [&](int64_t j, int64_t slot) {
    double dot = 0;
    const T* k = at(key, j, slot);
    for (int64_t h = 0; h < s.head_dim; ++h) dot += double(float(q[h])) * double(float(k[h]));
    return dot * scale_log2;
  };
  const bool valid = token % s.tile_size < pairs.query_sizes[batch * s.query_tiles + tile];

  double top = -INFINITY;
  bool any = false;
  if (valid) {
    VisitKeyTiles(s, pairs, batch, head, tile, [&](int64_t j, int size) {
      any |= size > 0;
      for (int slot = threadIdx.x; slot < size; slot += blockDim.x) top = fmax(top, logit(j, slot));
    });
  }
  partial[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < blockDim.x; ++i) top = fmax(top, partial[i]);
  for (int h = threadIdx.x; h < s.head_dim; h += blockDim.x) sum[h] = 0;
  __syncthreads();

  double total = 0;
  if (any) {
    VisitKeyTiles(s, pairs, batch, head, tile, [&](int64_t j, int size) {
      for (int base = 0; base < size; base += blockDim.x) {
        const int slot = base + threadIdx.x;
        partial[threadIdx.x] = slot < size ? exp2(logit(j, slot) - top) : 0;
        __syncthreads();
        const int count = min(size - base, int(blockDim.x));
        for (int i = 0; i < count; ++i) total += partial[i];
        for (int h = threadIdx.x; h < s.head_dim; h += blockDim.x) {
          for (int i = 0; i < count; ++i) sum[h] += partial[i] * double(float(at(value, j, base + i)[h]));
        }
        __syncthreads();
      }
    });
  }
  for (int h = threadIdx.x; h < s.head_dim; h += blockDim.x) out[blockIdx.x * s.head_dim + h] = any ? sum[h] / total : 0;
  if (threadIdx.x == 0) lse[blockIdx.x] = any ? top + log2(total) : -INFINITY;
}

}  // namespace vsa::tests
