// The Python module _vsa_jax_ffi: handlers to register, and how it was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "xla_ffi/cpu/kernels.h"
#include "xla_ffi/ffi/handlers.h"
#ifdef VSA_CUDA
#include "xla_ffi/dispatch.h"
#endif

namespace nb = nanobind;

namespace {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

nb::capsule Capsule(Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

// Handlers by target name, by the name of the platform that XLA knows them under.
nb::dict Registrations() {
  nb::dict cpu, platforms;
  cpu["vsa_forward_cpu"] = Capsule(vsa_forward_cpu);
  cpu["vsa_backward_cpu"] = Capsule(vsa_backward_cpu);
  platforms["cpu"] = cpu;
#ifdef VSA_CUDA
  nb::dict cuda;
  cuda["vsa_forward_cuda"] = Capsule(vsa_forward_cuda);
  cuda["vsa_backward_cuda"] = Capsule(vsa_backward_cuda);
  platforms["CUDA"] = cuda;
#endif
  return platforms;
}

nb::dict BuildFacts() {
  nb::dict facts;
  facts["compiler"] = VSA_COMPILER;
  facts["jaxlib"] = VSA_JAXLIB;
  facts["cpu_instructions"] = vsa::cpu::Instructions();
  facts["cuda"] = VSA_CUDA_FACTS;
#ifdef VSA_CUDA
  facts["has_cuda"] = true;
#else
  facts["has_cuda"] = false;
#endif
  return facts;
}

#ifdef VSA_CUDA
// Bytes of workspace of a call whose query has this dtype, by its name in NumPy: of the forward, of the backward.
std::pair<int64_t, int64_t> CudaWorkspaces(const std::string& dtype, int64_t batch, int64_t heads, int64_t kv_heads,
                                           int64_t head_dim, int64_t tile_size, int64_t query_tiles,
                                           int64_t key_tiles, int64_t width, int64_t num_prefix_tiles,
                                           int64_t num_dense_rows) {
  const vsa::Shape shape{dtype == "float16" ? vsa::DType::kFloat16 : vsa::DType::kBFloat16,
                         batch,
                         heads,
                         kv_heads,
                         head_dim,
                         tile_size,
                         query_tiles,
                         key_tiles,
                         width,
                         num_prefix_tiles,
                         num_dense_rows};
  return {vsa::cuda::ForwardWorkspace(shape), vsa::cuda::BackwardWorkspace(shape)};
}
#endif

}  // namespace

NB_MODULE(_vsa_jax_ffi, module) {
  module.def("registrations", &Registrations);
  module.def("build_facts", &BuildFacts);
#ifdef VSA_CUDA
  module.def("cuda_workspaces", &CudaWorkspaces);
#endif
}
