// Launching kernels; persistent ones with a CTA per SM, whose work a ticket counter in global memory hands out.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace vsa::sm90 {

constexpr double kLog2E = 1.4426950408889634;

inline std::string Said(cudaError_t error) {
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // it has been said: the next launch is not to blame
  return cudaGetErrorString(error);
}

// Launches `ctas` CTAs in clusters.
template <class... Parameters, class... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), int64_t ctas, int cluster, int threads, size_t shared_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Zeroes `counters` ints at `tickets`, then launches min(items, SMs / cluster) clusters. Safe under stream capture.
template <class... Parameters, class... Arguments>
std::string LaunchPersistent(void (*kernel)(Parameters...), int cluster, int threads, size_t shared_bytes, int items,
                             int* tickets, int64_t counters, cudaStream_t stream, const Arguments&... arguments) {
  int device, processors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  if (error == cudaSuccess) error = cudaMemsetAsync(tickets, 0, counters * sizeof(int), stream);
  if (error == cudaSuccess) {
    error = Launch(kernel, std::min(items, processors / cluster) * cluster, cluster, threads, shared_bytes, stream,
                   arguments...);
  }
  return Said(error);
}

}  // namespace vsa::sm90
