// The kernels for Hopper, on the simulator.
#pragma once

#include <cstdint>
#include <string>

#include "xla_ffi/params.h"

namespace vsa::sim {

// See machine.h.
void Set(uint64_t seed, int processors);

// "", or what went wrong: what a launch would answer, or what the simulator found.
std::string ForwardSm90(const ForwardParams& params);
std::string BackwardSm90(const BackwardParams& params);
int64_t ForwardWorkspaceSm90(const Shape& shape);
int64_t BackwardWorkspaceSm90(const Shape& shape);

}  // namespace vsa::sim
