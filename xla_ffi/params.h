// What a kernel is told.  Plain structs: no JAX, XLA or CUDA types.
//
// Letters: B batch, N query heads, K kv heads, H head dim, M tile size, Jq and Jk query and key tiles,
// D dense rows (leading query tiles that keep every key tile and have no list), R = Jq - D lists of width W,
// P prefix tiles (leading key tiles that every query tile keeps and no list names).
#pragma once

#include <cstdint>

namespace vsa {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

struct Shape {
  DType dtype;              // of query, key, value, out and the gradients
  int64_t batch;            // B
  int64_t heads;            // N, a multiple of kv_heads
  int64_t kv_heads;         // K; query head n reads kv head n / (N / K)
  int64_t head_dim;         // H
  int64_t tile_size;        // M
  int64_t query_tiles;      // Jq
  int64_t key_tiles;        // Jk
  int64_t width;            // W
  int64_t num_prefix_tiles; // P, 0..Jk
  int64_t num_dense_rows;   // D, 0..Jq

  constexpr int64_t groups() const { return heads / kv_heads; }
  constexpr int64_t rows() const { return query_tiles - num_dense_rows; }  // R
  constexpr int64_t query_length() const { return query_tiles * tile_size; }
  constexpr int64_t key_length() const { return key_tiles * tile_size; }
};

// Which tiles meet, and which of their slots count.  Counts outside [0, W] are clipped; an id outside [P, Jk)
// keeps no key; ids come in any order, and a duplicate counts twice.  Slots past a size may hold anything,
// NaN included: they reach no result.
struct Pairs {
  const int32_t* indices;      // [B, N, R, W]
  const int32_t* counts;       // [B, N, R]
  const int32_t* query_sizes;  // [B, Jq], each 0..M
  const int32_t* key_sizes;    // [B, Jk], each 0..M
};

// The LSE is base 2, of scale * log2(e) * logits; it and delta are float, double for kFloat64.
struct ForwardParams {
  Shape shape;
  double scale;
  Pairs pairs;
  const void* query;  // [B, Jq*M, N, H]
  const void* key;    // [B, Jk*M, K, H]
  const void* value;  // [B, Jk*M, K, H]
  void* out;          // [B, Jq*M, N, H]; 0 in padded rows and rows without keys
  void* lse;          // [B, N, Jq*M]; -inf there
  void* workspace;    // as many bytes as the kernel's *Workspace function says; CUDA only
};

struct BackwardParams {
  Shape shape;
  double scale;
  Pairs pairs;
  const void* query;  // [B, Jq*M, N, H]
  const void* key;    // [B, Jk*M, K, H]
  const void* value;  // [B, Jk*M, K, H]
  const void* lse;    // [B, N, Jq*M]
  const void* d_out;  // [B, Jq*M, N, H]; may hold anything where lse is -inf
  const void* delta;  // [B, N, Jq*M], sum(out * d_out) - d_lse, 0 where lse is -inf;
                      // d_logits = p * (d_out . value - delta)
  void* d_query;      // [B, Jq*M, N, H]; gradients are 0 in padded rows
  void* d_key;        // [B, Jk*M, K, H]
  void* d_value;      // [B, Jk*M, K, H]
  void* workspace;    // as many bytes as the kernel's *Workspace function says; CUDA only
};

}  // namespace vsa
