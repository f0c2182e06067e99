#include "sm90.h"

#include "../sm90/bwd/backward.h"
#include "../sm90/fwd/forward.h"
#include "machine.h"

namespace vsa::sim {
namespace {

template <class Params>
std::string Try(std::string (*kernel)(const Params&, cudaStream_t), const Params& params) {
  if (params.shape.batch == 0) return "";
  try {
    return kernel(params, nullptr);
  } catch (const std::exception& error) {
    return std::string("simulator: ") + error.what();
  }
}

}  // namespace

std::string ForwardSm90(const ForwardParams& params) { return Try(sm90::Forward, params); }
std::string BackwardSm90(const BackwardParams& params) { return Try(sm90::Backward, params); }
int64_t ForwardWorkspaceSm90(const Shape& shape) { return sm90::ForwardWorkspace(shape); }
int64_t BackwardWorkspaceSm90(const Shape& shape) { return sm90::BackwardWorkspace(shape); }

}  // namespace vsa::sim
