// Gradients of single rows, the plain way, in double, from the LSE and delta as given; and beside each those of a
// dense twin that rounds what a kernel in T has to round: the weights, the gradients of the logits, the result.
#pragma once

#include "../params.h"
#include "reference_forward.cuh"

namespace vsa::tests {

template <class T>
__device__ double Rounded(double x) {
  return static_cast<double>(static_cast<float>(static_cast<T>(static_cast<float>(x))));
}

// Where the rows of one batch entry and head lie.
template <class T>
struct RowsOf {
  const T* first;
  int64_t stride;
  __device__ RowsOf(const void* x, int64_t batch, int64_t length, int64_t heads, int64_t head, int64_t head_dim)
      : first(static_cast<const T*>(x) + (batch * length * heads + head) * head_dim), stride(heads * head_dim) {}
  __device__ const T* operator[](int64_t token) const { return first + token * stride; }
};

template <class T>
__device__ double Dot(const T* a, const T* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(float(a[i])) * static_cast<double>(float(b[i]));
  return sum;
}

// Block i: query row rows[i], a flat index of [B, N, Jq*M]. d_query [samples, 2, H]: exact, twin.
template <class T>
__global__ void ReferenceQueryGradient(BackwardParams p, const int64_t* rows, double* d_query) {
  const Shape& s = p.shape;
  const int64_t row = rows[blockIdx.x], token = row % s.query_length(), head = row / s.query_length() % s.heads;
  const int64_t batch = row / s.query_length() / s.heads, tile = token / s.tile_size, h_dim = s.head_dim;
  extern __shared__ double memory[];  // [2, threads]
  const T* q = RowsOf<T>(p.query, batch, s.query_length(), s.heads, head, h_dim)[token];
  const T* d_out = RowsOf<T>(p.d_out, batch, s.query_length(), s.heads, head, h_dim)[token];
  const RowsOf<T> key(p.key, batch, s.key_length(), s.kv_heads, head / s.groups(), h_dim);
  const RowsOf<T> value(p.value, batch, s.key_length(), s.kv_heads, head / s.groups(), h_dim);
  const double lse = static_cast<const float*>(p.lse)[row], delta = static_cast<const float*>(p.delta)[row];
  const bool valid = token % s.tile_size < p.pairs.query_sizes[batch * s.query_tiles + tile] && lse != -INFINITY;
  double exact = 0, twin = 0;  // of column threadIdx.x
  if (valid) {
    VisitKeyTiles(s, p.pairs, batch, head, tile, [&](int64_t j, int size) {
      for (int base = 0; base < size; base += blockDim.x) {
        const int count = min(size - base, int(blockDim.x));
        if (threadIdx.x < count) {
          const int64_t at = j * s.tile_size + base + threadIdx.x;
          const double weight = exp2(Dot(q, key[at], h_dim) * p.scale * 1.4426950408889634 - lse);
          const double d_logit = weight * (Dot(d_out, value[at], h_dim) - delta);
          memory[threadIdx.x] = d_logit;
          memory[blockDim.x + threadIdx.x] = Rounded<T>(d_logit);
        }
        __syncthreads();
        for (int i = 0; i < count && threadIdx.x < h_dim; ++i) {
          const double k = float(key[j * s.tile_size + base + i][threadIdx.x]);
          exact += memory[i] * k;
          twin += memory[blockDim.x + i] * k;
        }
        __syncthreads();
      }
    });
  }
  if (threadIdx.x >= h_dim) return;
  d_query[blockIdx.x * 2 * h_dim + threadIdx.x] = exact * p.scale;
  d_query[(blockIdx.x * 2 + 1) * h_dim + threadIdx.x] = Rounded<T>(twin * p.scale);
}

// Block i: key row rows[i], a flat index of [B, K, Jk*M]. d_key, d_value [samples, 2, H]: exact, twin.
template <class T>
__global__ void ReferenceKeyGradient(BackwardParams p, const int64_t* rows, double* d_key, double* d_value) {
  const Shape& s = p.shape;
  const int64_t row = rows[blockIdx.x], token = row % s.key_length(), kv_head = row / s.key_length() % s.kv_heads;
  const int64_t batch = row / s.key_length() / s.kv_heads, tile = token / s.tile_size, h_dim = s.head_dim;
  extern __shared__ double memory[];  // [2, threads]: weights, gradients of logits
  const T* k = RowsOf<T>(p.key, batch, s.key_length(), s.kv_heads, kv_head, h_dim)[token];
  const T* v = RowsOf<T>(p.value, batch, s.key_length(), s.kv_heads, kv_head, h_dim)[token];
  const bool valid = token % s.tile_size < p.pairs.key_sizes[batch * s.key_tiles + tile];
  double exact_key = 0, twin_key = 0, exact_value = 0, twin_value = 0;  // of column threadIdx.x
  for (int64_t head = kv_head * s.groups(); valid && head < (kv_head + 1) * s.groups(); ++head) {
    const RowsOf<T> query(p.query, batch, s.query_length(), s.heads, head, h_dim);
    const RowsOf<T> d_out(p.d_out, batch, s.query_length(), s.heads, head, h_dim);
    for (int64_t query_tile = 0; query_tile < s.query_tiles; ++query_tile) {
      int times = query_tile < s.num_dense_rows || tile < s.num_prefix_tiles;
      const int64_t list = (batch * s.heads + head) * s.rows() + query_tile - s.num_dense_rows;
      if (!times) {
        for (int64_t base = 0; base < s.width; base += blockDim.x) {
          const int64_t i = base + threadIdx.x;
          const bool listed = i < s.width && i < p.pairs.counts[list];
          times += __syncthreads_count(listed && p.pairs.indices[list * s.width + i] == tile);
        }
      }
      const int size = times ? p.pairs.query_sizes[batch * s.query_tiles + query_tile] : 0;
      for (int base = 0; base < size; base += blockDim.x) {
        const int count = min(size - base, int(blockDim.x));
        const int64_t first = query_tile * s.tile_size + base, at = first + threadIdx.x;
        if (threadIdx.x < count) {
          const int64_t flat = (batch * s.heads + head) * s.query_length() + at;
          const double lse = static_cast<const float*>(p.lse)[flat], delta = static_cast<const float*>(p.delta)[flat];
          const double weight = exp2(Dot(k, query[at], h_dim) * p.scale * 1.4426950408889634 - lse);
          memory[threadIdx.x] = weight;
          memory[blockDim.x + threadIdx.x] = weight * (Dot(v, d_out[at], h_dim) - delta);
        }
        __syncthreads();
        for (int i = 0; i < count && threadIdx.x < h_dim; ++i) {
          const double weight = memory[i], d_logit = memory[blockDim.x + i];
          const double q = float(query[first + i][threadIdx.x]), d = float(d_out[first + i][threadIdx.x]);
          exact_key += times * d_logit * q;
          twin_key += times * Rounded<T>(d_logit) * q;
          exact_value += times * weight * d;
          twin_value += times * Rounded<T>(weight) * d;
        }
        __syncthreads();
      }
    }
  }
  if (threadIdx.x >= h_dim) return;
  const int64_t to = blockIdx.x * 2 * h_dim + threadIdx.x;
  d_key[to] = exact_key * p.scale;
  d_key[to + h_dim] = Rounded<T>(twin_key * p.scale);
  d_value[to] = exact_value;
  d_value[to + h_dim] = Rounded<T>(twin_value);
}

}  // namespace vsa::tests
