// What device code takes from CUDA, for a host compiler: qualifiers, built-in variables, warp intrinsics, and as much
// of the runtime as launches need. Everything runs on machine.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "../machine.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

using std::max;
using std::min;

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace vsa::sim {

// One dimension: y and z do not exist.
template <unsigned (*kValue)()>
struct BuiltIn {
  struct {
    operator unsigned() const { return kValue(); }
  } x;
};
inline unsigned ThreadIndex() {
  const Lane& lane = Machine::current().lane();
  return lane.warp->index * kLanes + lane.index;
}
inline unsigned BlockIndex() { return Machine::current().cta().index; }
inline unsigned GridSize() { return Machine::current().launch().grid.x; }

template <class T>
T Shuffle(const char* what, T x, int from, int (*source)(int lane, int from)) {
  struct In { T x; int from; };
  return Machine::current().together<In, T>(what, In{x, from}, [source](const In* const* in, T* const* out) {
    for (int i = 0; i < kLanes; ++i) {
      const int j = source(i, in[i]->from);
      *out[i] = in[j < 0 || j >= kLanes ? i : j]->x;
    }
  });
}

inline uint32_t Ballot(const char* what, bool x) {
  return Machine::current().together<bool, uint32_t>(what, x, [](const bool* const* in, uint32_t* const* out) {
    uint32_t set = 0;
    for (int i = 0; i < kLanes; ++i) set |= static_cast<uint32_t>(*in[i]) << i;
    for (int i = 0; i < kLanes; ++i) *out[i] = set;
  });
}

inline void WholeWarp(unsigned mask) {
  if (mask != 0xffffffff) Machine::current().fail("a mask that is not the whole warp is not modelled");
}

}  // namespace vsa::sim

inline constexpr vsa::sim::BuiltIn<vsa::sim::ThreadIndex> threadIdx{};
inline constexpr vsa::sim::BuiltIn<vsa::sim::BlockIndex> blockIdx{};
inline constexpr vsa::sim::BuiltIn<vsa::sim::GridSize> gridDim{};

template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Shuffle("shfl.idx", x, from, [](int, int from) { return from & 31; });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Shuffle("shfl.bfly", x, bits, [](int lane, int bits) { return lane ^ bits; });
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int distance) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Shuffle("shfl.up", x, distance, [](int lane, int distance) { return lane - distance; });
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Ballot("vote.ballot", x);
}
inline bool __any_sync(unsigned mask, bool x) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Ballot("vote.any", x) != 0;
}
inline bool __all_sync(unsigned mask, bool x) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Ballot("vote.all", x) == 0xffffffff;
}
inline void __syncwarp(unsigned mask = 0xffffffff) {
  vsa::sim::WholeWarp(mask);
  vsa::sim::Ballot("bar.warp", true);
}
inline int __reduce_min_sync(unsigned mask, int x) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Machine::current().together<int, int>("redux.min", x, [](const int* const* in, int* const* out) {
    int least = *in[0];
    for (int i = 1; i < vsa::sim::kLanes; ++i) least = std::min(least, *in[i]);
    for (int i = 0; i < vsa::sim::kLanes; ++i) *out[i] = least;
  });
}
inline unsigned __match_any_sync(unsigned mask, int x) {
  vsa::sim::WholeWarp(mask);
  return vsa::sim::Machine::current().together<int, unsigned>("match.any", x, [](const int* const* in, unsigned* const* out) {
    for (int i = 0; i < vsa::sim::kLanes; ++i) {
      *out[i] = 0;
      for (int j = 0; j < vsa::sim::kLanes; ++j) *out[i] |= static_cast<unsigned>(*in[i] == *in[j]) << j;
    }
  });
}
void __syncthreads();

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline void __nanosleep(unsigned) {}

inline int atomicAdd(int* x, int y) {
  const int before = *x;
  *x += y;
  return before;
}

using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = vsa::sim::Processors();
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return bytes <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMallocManaged(void** to, size_t bytes) {
  *to = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct { unsigned x, y, z; } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  if (config->gridDim.x == 0) return cudaErrorInvalidValue;
  vsa::sim::Launch launch;
  launch.grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  launch.block = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
  for (unsigned i = 0; i < config->numAttrs; ++i) launch.cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
  launch.shared_bytes = config->dynamicSmemBytes;
  launch.kernel = [=] { kernel(arguments...); };
  vsa::sim::Run(launch);
  return cudaSuccess;
}
