// The functions of sm100/ptx.cuh on machine.h.
#pragma once

#include <cuda_runtime.h>

#include <cfenv>
#include <cmath>
#include <cstdint>

#include "hopper.h"

namespace vsa::sim {

void LoadTensorMemory(uint32_t* to, int count, uint32_t address);
void StoreTensorMemory(uint32_t address, const uint32_t* from, int count);
void WaitTensorLoads();

}  // namespace vsa::sim

namespace vsa::sm100 {

using namespace sm90;

void tmem_alloc(uint32_t to, int columns);
void tmem_dealloc(uint32_t address, int columns);
void tcgen05_fence_before_sync();
void tcgen05_fence_after_sync();
void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add);
void tcgen05_mma(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool add);
void tcgen05_commit(uint32_t barrier);

template <int kCount>
void tmem_load(uint32_t (&to)[kCount], uint32_t address) { sim::LoadTensorMemory(to, kCount, address); }
template <int kCount>
void tmem_store(uint32_t address, const uint32_t (&from)[kCount]) { sim::StoreTensorMemory(address, from, kCount); }
template <int kParts, int kCount>
void tmem_wait_load(uint32_t (&)[kParts][kCount]) { sim::WaitTensorLoads(); }
void tmem_wait_store();

void try_cancel(uint32_t response, uint32_t barrier);
int cancelled_cta(uint32_t response);

inline float2 fma2(float2 a, float2 b, float2 c) { return {std::fma(a.x, b.x, c.x), std::fma(a.y, b.y, c.y)}; }
inline float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
float add_down(float a, float b);
inline float max_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }

}  // namespace vsa::sm100
