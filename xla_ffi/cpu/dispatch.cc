// Which instruction set runs: the best one that was built and that this processor has.
#include <cstdlib>
#include <string>

#include "xla_ffi/cpu/kernels.h"

namespace vsa::cpu {
namespace {

struct Kernels {
  const char* name;
  bool (*forward)(const ForwardParams&, const Pool&);
  bool (*backward)(const BackwardParams&, const Pool&);
};

Kernels Choose() {
  // For tests and measurements: no better instructions than these.
  const char* limit = std::getenv("VSA_JAX_CPU_INSTRUCTIONS");
  const std::string asked = limit == nullptr ? "" : limit;
  const std::string most = asked == "baseline" || asked == "avx2" ? asked : "avx512";
#ifdef VSA_X86_KERNELS
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && most == "avx512") return {"avx512", avx512::Forward, avx512::Backward};
  if (has_avx2 && most != "baseline") return {"avx2", avx2::Forward, avx2::Backward};
#endif
  return {"baseline", baseline::Forward, baseline::Backward};
}

const Kernels& Chosen() {
  static const Kernels chosen = Choose();
  return chosen;
}

}  // namespace

bool Forward(const ForwardParams& params, const Pool& pool) { return Chosen().forward(params, pool); }
bool Backward(const BackwardParams& params, const Pool& pool) { return Chosen().backward(params, pool); }
const char* Instructions() { return Chosen().name; }

}  // namespace vsa::cpu
