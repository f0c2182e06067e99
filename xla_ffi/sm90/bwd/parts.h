// The launches that make up a backward. Each returns "", or why it could not.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "../../params.h"

namespace vsa::sm90 {

// The listed pairs by key tile. Entry r * W + w says that list r names the tile at its place w; the entries of
// head h (of B * N) that name key tile j are entries[h * R * W + offsets[h, j] .. offsets[h, j + 1]), ascending.
struct Transposed {
  int32_t* offsets;  // [B, N, Jk + 1]
  int32_t* entries;  // [B, N, R * W]
};

// The lists are cut in chunks of rows, which are counted and emitted independently.
constexpr int kChunkRows = 32;

// chunk_counts: scratch, int32 [B, N, ceil(R / kChunkRows), Jk].
std::string Transpose(const Shape& shape, const Pairs& pairs, const Transposed& to, int32_t* chunk_counts,
                      cudaStream_t stream);

// d_key and d_value. ticket: scratch, one int.
std::string KeyGradients(const BackwardParams& params, const Transposed& transposed, int* ticket, cudaStream_t stream);

// d_query. ticket: scratch, one int.
std::string QueryGradients(const BackwardParams& params, int* ticket, cudaStream_t stream);

// All three gradients in one launch, head dim 128. kept: scratch of SpillBytes, 0 where it cannot run; counters:
// scratch of SpillCounters ints.
std::string AllGradients(const BackwardParams& params, const Transposed& transposed, void* kept, int* counters,
                         cudaStream_t stream);
int64_t SpillBytes(const Shape& shape);
int64_t SpillCounters(const Shape& shape);

}  // namespace vsa::sm90
