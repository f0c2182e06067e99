// The CUDA kernels on the simulator.
#pragma once

#include <cstdint>
#include <string>

#include "xla_ffi/params.h"

namespace vsa::sim {

// Of what follows: see machine.h; and whose kernels run, 9 Hopper's or 10 Blackwell's. What Blackwell has no kernel for, the
// backward among it, runs on those of Hopper.
void Set(uint64_t seed, int processors, int major);

// "", or what went wrong: what a launch would answer, or what the simulator found.
std::string Forward(const ForwardParams& params);
std::string Backward(const BackwardParams& params);
// Enough for either.
int64_t ForwardWorkspace(const Shape& shape);
int64_t BackwardWorkspace(const Shape& shape);

}  // namespace vsa::sim
