#include "kernels.h"

#include <algorithm>
#include <atomic>

#include "../sm100/fwd/forward.h"
#include "../sm90/bwd/backward.h"
#include "../sm90/fwd/forward.h"
#include "machine.h"

namespace vsa::sim {
namespace {

constexpr int kHopper = 9, kBlackwell = 10;
std::atomic<int> architecture = kBlackwell;

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

void Set(uint64_t seed, int processors, int major) {
  if (major != kHopper && major != kBlackwell) {
    throw std::invalid_argument("major: got " + std::to_string(major) + ", want 9 (Hopper) or 10 (Blackwell)");
  }
  SetDevice(seed, processors);
  architecture = major;
}

std::string Forward(const ForwardParams& params) {
  const bool blackwell = architecture == kBlackwell && sm100::WhyNot(params.shape).empty();
  return Try(blackwell ? sm100::Forward : sm90::Forward, params);
}
std::string Backward(const BackwardParams& params) { return Try(sm90::Backward, params); }
int64_t ForwardWorkspace(const Shape& shape) {
  return std::max(sm90::ForwardWorkspace(shape), sm100::ForwardWorkspace(shape));
}
int64_t BackwardWorkspace(const Shape& shape) { return sm90::BackwardWorkspace(shape); }

}  // namespace vsa::sim
