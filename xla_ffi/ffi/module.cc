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
#ifdef VSA_SIMULATOR
#include "xla_ffi/sim/kernels.h"
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
#ifdef VSA_SIMULATOR
  cpu["vsa_forward_cuda_sim"] = Capsule(vsa_forward_cuda_sim);
  cpu["vsa_backward_cuda_sim"] = Capsule(vsa_backward_cuda_sim);
#endif
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
#ifdef VSA_SIMULATOR
  facts["has_simulator"] = true;
#else
  facts["has_simulator"] = false;
#endif
  return facts;
}

using Workspaces = std::pair<int64_t, int64_t>;

// Bytes of workspace of a call whose query has this dtype, by its name in NumPy: of the forward, of the backward.
template <int64_t (*kForward)(const vsa::Shape&), int64_t (*kBackward)(const vsa::Shape&)>
Workspaces WorkspacesOf(const std::string& dtype, int64_t batch, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        int64_t tile_size, int64_t query_tiles, int64_t key_tiles, int64_t width,
                        int64_t num_prefix_tiles, int64_t num_dense_rows) {
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
  return {kForward(shape), kBackward(shape)};
}

}  // namespace

NB_MODULE(_vsa_jax_ffi, module) {
  module.def("registrations", &Registrations);
  module.def("build_facts", &BuildFacts);
#ifdef VSA_CUDA
  module.def("cuda_workspaces", &WorkspacesOf<vsa::cuda::ForwardWorkspace, vsa::cuda::BackwardWorkspace>);
#endif
#ifdef VSA_SIMULATOR
  module.def("cuda_sim_workspaces",
             &WorkspacesOf<vsa::sim::ForwardWorkspace, vsa::sim::BackwardWorkspace>);
  module.def("set_simulator", &vsa::sim::Set, nb::arg("seed"), nb::arg("processors"), nb::arg("major") = 10);
#endif
}
