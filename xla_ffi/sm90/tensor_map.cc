#include "tensor_map.h"

#include <cuda_runtime.h>

namespace vsa::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that nothing links to the driver: the library loads where there is none.
Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

std::string EncodeTokens(CUtensorMap* map, DType dtype, const void* x, int64_t tokens, int64_t heads,
                         int64_t head_dim, int box_tokens, int box_blocks) {
  const Encode encode = FindEncode();
  if (encode == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled; it needs driver 525 or newer";
  const auto u64 = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[4] = {64, u64(tokens), u64(head_dim / 64), u64(heads)};
  const cuuint64_t strides[3] = {u64(heads * head_dim * 2), 128, u64(head_dim * 2)};  // bytes
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_tokens), static_cast<cuuint32_t>(box_blocks), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const auto type = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(x), sizes, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return "";
  return "cuTensorMapEncodeTiled failed with " + std::to_string(result) + " for [" + std::to_string(tokens) + ", " +
         std::to_string(heads) + ", " + std::to_string(head_dim) + "]";
}

}  // namespace vsa::sm90
