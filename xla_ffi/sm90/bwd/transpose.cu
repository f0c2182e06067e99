// The transposed lists: for every key tile, the entries that name it, ascending. A stable counting sort of the
// entries of each head by key tile, in three kernels:
//
//   count  how often each chunk of kChunkRows lists names each key tile   [head, chunk, key tile]
//   scan   offsets, and in place of each count the sum of those before it in its column
//   emit   a warp walks a chunk in order and puts every entry at offset + sum before + its rank in the chunk
//
// Only integers are added, and every place is a function of the lists: the same answer on every run. Repeated ids
// need no special case. Chunks of at most kSlab key tiles fit in shared memory; more are done slab by slab.
//
// Bound: latency. Each entry is read twice and written once.
#include <algorithm>

#include "../launch.cuh"
#include "../lists.cuh"
#include "parts.h"

namespace vsa::sm90 {
namespace {

constexpr int kSlab = 8192;
constexpr int kCountThreads = 256;
constexpr int kScanThreads = 1024;

struct Arguments {
  int64_t rows, key_tiles, width;
  int prefix;
  int64_t chunks, slabs;
  const int32_t* indices;
  const int32_t* counts;
  int32_t* chunk_counts;
  Transposed to;
};

// What a CTA of `count` and `emit` works on.
struct Part {
  int64_t head;  // of B * N
  int64_t chunk;
  int first_row, last_row;        // [first, last)
  int first_column, last_column;  // key tiles

  __device__ explicit Part(const Arguments& args) {
    const int64_t index = blockIdx.x;
    const int64_t slab = index % args.slabs;
    chunk = index / args.slabs % args.chunks;
    head = index / args.slabs / args.chunks;
    first_row = static_cast<int>(chunk * kChunkRows);
    last_row = static_cast<int>(min(static_cast<int64_t>(first_row) + kChunkRows, args.rows));
    first_column = static_cast<int>(slab * kSlab);
    last_column = static_cast<int>(min(static_cast<int64_t>(first_column) + kSlab, args.key_tiles));
  }

  __device__ const int32_t* list(const Arguments& args, int row) const {
    return args.indices + (head * args.rows + row) * args.width;
  }
  __device__ int listed(const Arguments& args, int row) const {
    return min(max(args.counts[head * args.rows + row], 0), static_cast<int>(args.width));
  }
  // Whether an id is a listed key tile of this slab.
  __device__ bool takes(const Arguments& args, int id) const {
    return id >= max(first_column, args.prefix) && id < last_column;
  }
  __device__ int32_t* chunk_counts(const Arguments& args) const {
    return args.chunk_counts + (head * args.chunks + chunk) * args.key_tiles;
  }
};

__global__ void count(const __grid_constant__ Arguments args) {
  int32_t* const counts = reinterpret_cast<int32_t*>(dynamic_shared());
  const Part part(args);
  const int columns = part.last_column - part.first_column;
  for (int i = threadIdx.x; i < columns; i += kCountThreads) counts[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int row = part.first_row + threadIdx.x / 32; row < part.last_row; row += kCountThreads / 32) {
    const int32_t* list = part.list(args, row);
    const int listed = part.listed(args, row);
    for (int at = lane; at < listed; at += 32) {
      const int id = list[at];
      if (part.takes(args, id)) atomicAdd(&counts[id - part.first_column], 1);
    }
  }
  __syncthreads();
  int32_t* to = part.chunk_counts(args) + part.first_column;
  for (int i = threadIdx.x; i < columns; i += kCountThreads) to[i] = counts[i];
}

// The sum over lower threads of a CTA of kScanThreads; *total becomes the sum over all.
__device__ int exclusive_sum(int x, int* total) {
  int* const warp_sums = reinterpret_cast<int*>(dynamic_shared());  // of every warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(kWholeWarp, sum, distance);
    if (lane >= distance) sum += below;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < kScanThreads / 32; ++i) {
    if (i == warp) before = all;
    all += warp_sums[i];
  }
  __syncthreads();
  *total = all;
  return before + sum - x;
}

// A CTA per head.
__global__ void __launch_bounds__(kScanThreads) scan(const __grid_constant__ Arguments args) {
  constexpr int kAtOnce = 8;  // loads in flight
  const int64_t head = blockIdx.x;
  int32_t* counts = args.chunk_counts + head * args.chunks * args.key_tiles;
  int32_t* offsets = args.to.offsets + head * (args.key_tiles + 1);
  int carry = 0;
  for (int64_t first = 0; first < args.key_tiles; first += kScanThreads) {
    const int64_t column = first + threadIdx.x;
    const bool inside = column < args.key_tiles;
    int sum = 0;
    for (int64_t chunk = 0; inside && chunk < args.chunks; chunk += kAtOnce) {
      int here[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        here[i] = chunk + i < args.chunks ? counts[(chunk + i) * args.key_tiles + column] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (chunk + i < args.chunks) counts[(chunk + i) * args.key_tiles + column] = sum;
        sum += here[i];
      }
    }
    int total;
    const int before = exclusive_sum(sum, &total);
    if (inside) offsets[column] = carry + before;
    carry += total;
  }
  if (threadIdx.x == 0) offsets[args.key_tiles] = carry;
}

// A warp per chunk and slab. next[j]: where the next entry of key tile j goes.
__global__ void emit(const __grid_constant__ Arguments args) {
  int32_t* const next = reinterpret_cast<int32_t*>(dynamic_shared());
  constexpr int kAtOnce = 4;  // loads in flight
  const Part part(args);
  const int lane = threadIdx.x;
  const int32_t* before = part.chunk_counts(args) + part.first_column;
  const int32_t* offsets = args.to.offsets + part.head * (args.key_tiles + 1) + part.first_column;
  int32_t* entries = args.to.entries + part.head * args.rows * args.width;
  for (int i = lane; i < part.last_column - part.first_column; i += 32) next[i] = offsets[i] + before[i];
  __syncwarp();
  for (int row = part.first_row; row < part.last_row; ++row) {
    const int32_t* list = part.list(args, row);
    const int listed = part.listed(args, row);
    for (int base = 0; base < listed; base += 32 * kAtOnce) {
      int ids[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + 32 * i + lane;
        ids[i] = at < listed ? list[at] : -1;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned same = __match_any_sync(kWholeWarp, ids[i]);
        const bool taken = part.takes(args, ids[i]);
        const int column = ids[i] - part.first_column;
        const int place = taken ? next[column] + __popc(same & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (taken) {
          entries[place] = static_cast<int32_t>(row * args.width) + base + 32 * i + lane;
          if ((same >> lane) == 1) next[column] = place + 1;  // the last lane of its id
        }
        __syncwarp();
      }
    }
  }
}

}  // namespace

std::string Transpose(const Shape& shape, const Pairs& pairs, const Transposed& to, int32_t* chunk_counts,
                      cudaStream_t stream) {
  const int64_t heads = shape.batch * shape.heads;
  const auto parts = [](int64_t x, int64_t size) { return (x + size - 1) / size; };
  const Arguments args{shape.rows(),
                       shape.key_tiles,
                       shape.width,
                       static_cast<int>(shape.num_prefix_tiles),
                       parts(shape.rows(), kChunkRows),
                       parts(shape.key_tiles, kSlab),
                       pairs.indices,
                       pairs.counts,
                       chunk_counts,
                       to};
  const int64_t ctas = heads * args.chunks * args.slabs;
  const size_t bytes = std::min<int64_t>(shape.key_tiles, kSlab) * sizeof(int32_t);
  cudaError_t error = cudaSuccess;
  if (ctas > 0) error = Launch(count, ctas, 1, kCountThreads, bytes, stream, args);
  if (error == cudaSuccess) {
    error = Launch(scan, heads, 1, kScanThreads, kScanThreads / 32 * sizeof(int), stream, args);
  }
  if (error == cudaSuccess && ctas > 0) error = Launch(emit, ctas, 1, 32, bytes, stream, args);
  return Said(error);
}

}  // namespace vsa::sm90
