// A matrix product D = sum over t of A[t] B[t]^T, [64, 64] each, through everything the kernels are made of: tensor
// maps, TMA into a ring, mbarriers, matrix descriptors, wgmma, TMA stores. As it should be and with one mistake in it
// at a time.
//
//   micro NAME [SEED]: prints "right", or what is wrong; NAME is one of kNames.
//
// The same source runs on the simulator (g++ -DVSA_SIM, see tests/test_simulator.py) and on a GPU (nvcc). On a GPU only
// `right` is worth running: a mistake may hang it, or not show.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../sm90/epilogue.cuh"
#include "../sm90/launch.cuh"
#include "../sm90/ptx.cuh"
#include "../sm90/ring.cuh"
#include "../sm90/tensor_map.h"
#include "../sm90/wgmma.cuh"

namespace vsa::sm90 {
namespace {

constexpr const char* kNames[] = {
    "right",           "no_wait_for_loads", "no_wait_for_products", "no_wait_for_slots", "no_release",
    "wrong_parity",    "arrives_twice",     "wrong_stride",         "wrong_swizzle",     "lanes_apart",
    "returns_early",   "too_many_registers", "misaligned_load",     "no_wait_for_store", "too_few_bytes",
    "not_all_at_barrier",
};
enum Mistake {
  kRight, kNoWaitForLoads, kNoWaitForProducts, kNoWaitForSlots, kNoRelease,
  kWrongParity, kArrivesTwice, kWrongStride, kWrongSwizzle, kLanesApart,
  kReturnsEarly, kTooManyRegisters, kMisalignedLoad, kNoWaitForStore, kTooFewBytes,
  kNotAllAtBarrier,
};
static_assert(sizeof kNames / sizeof *kNames == kNotAllAtBarrier + 1);

constexpr int kSize = 64, kSteps = 7, kSlots = 2, kTileBytes = kSize * 128;
constexpr int kThreads = 3 * kWarpgroup;  // 168 registers each at launch

struct Shared {
  uint8_t a[kSlots][kTileBytes], b[kSlots][kTileBytes], out[kTileBytes];
  uint64_t full[kSlots], empty[kSlots];
};

struct Arguments {
  Mistake mistake;
};

__global__ void __launch_bounds__(kThreads, 1)
    micro(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap a,
          const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap out) {
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_shared());
  const Mistake mistake = args.mistake;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(shared_address(&smem.full[i]), 1);
      mbarrier_init(shared_address(&smem.empty[i]), kWarpgroup / 32);
    }
    fence_mbarrier_init();
  }
  if (mistake != kNotAllAtBarrier || threadIdx.x < kWarpgroup) __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  Cursor<kSlots> slot;
  if (warp >= 4) {
    if (mistake == kTooManyRegisters) setmaxnreg_dec<160>();
    else setmaxnreg_dec<40>();
    if (warp == 4) {
      for (int step = 0; step < kSteps; ++step, slot.advance()) {
        const uint32_t full = shared_address(&smem.full[slot.at]);
        if (mistake != kNoWaitForSlots) mbarrier_wait(shared_address(&smem.empty[slot.at]), slot.parity ^ 1);
        if (elect()) {
          mbarrier_arrive_expect_tx(full, mistake == kTooFewBytes ? kTileBytes : 2 * kTileBytes);
          tma_load(shared_address(smem.a[slot.at]) + (mistake == kMisalignedLoad ? 64 : 0), &a, full, 0, step * kSize);
          tma_load(shared_address(smem.b[slot.at]), &b, full, 0, step * kSize);
        }
      }
    }
    return;
  }
  setmaxnreg_inc<232>();
  if (mistake == kReturnsEarly && warp == 3) return;
  float sums[kSize / 2];
  for (float& x : sums) x = 0;
  for (int step = 0; step < kSteps; ++step, slot.advance()) {
    if (mistake != kNoWaitForLoads) {
      mbarrier_wait(shared_address(&smem.full[slot.at]), mistake == kWrongParity ? slot.parity ^ 1 : slot.parity);
    }
    const KMajor<kTileBytes> left(smem.a[slot.at]), right(smem.b[slot.at]);
    pin(sums);
    wgmma_fence();
    for (int k = 0; k < kSize / 16; ++k) {
      uint64_t of_right = right.step(k);
      if (mistake == kWrongStride) of_right ^= uint64_t{16} << 32;
      if (mistake == kWrongSwizzle) of_right ^= uint64_t{3} << 62;
      wgmma<__nv_bfloat16, Major::kK, Major::kK>(sums, left.step(k), of_right, 1);
    }
    wgmma_commit();
    if (mistake != kNoWaitForProducts) wgmma_wait<0>();
    pin(sums);
    __syncwarp();
    if (threadIdx.x % 32 == 0 && mistake != kNoRelease) {
      mbarrier_arrive(shared_address(&smem.empty[slot.at]));
      if (mistake == kArrivesTwice) mbarrier_arrive(shared_address(&smem.empty[slot.at]));
    }
    if (mistake == kLanesApart && threadIdx.x % 32 < 7) __syncwarp();
  }
  const float one[2] = {1, 1};
  const bool valid[2] = {true, true};
  store_rows_by_tma<__nv_bfloat16, kTileBytes>(&out, smem.out, 0, 0, sums, one, valid);
  if (mistake != kNoWaitForStore && threadIdx.x % 32 == 0) tma_store_wait_read();
  __syncwarp();
  // The place is used again: this warp's rows of it.
  for (int i = threadIdx.x % 32; i < 16 * 128 / 4; i += 32) {
    reinterpret_cast<uint32_t*>(smem.out)[warp * 16 * 128 / 4 + i] = 0xffffffff;
  }
}

// Small numbers, exact in bfloat16, as their sums are in float32.
int Number(int i, int j, int k) { return (i * 7 + j * 13 + k * 5) % 5 - 2; }

uint16_t Bits(float x) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, x);
  uint16_t bits;
  std::memcpy(&bits, &rounded.x, 2);
  return bits;
}

std::string Run(Mistake mistake) {
  uint16_t *a, *b, *out;
  cudaMallocManaged(reinterpret_cast<void**>(&a), kSteps * kSize * kSize * 2);
  cudaMallocManaged(reinterpret_cast<void**>(&b), kSteps * kSize * kSize * 2);
  cudaMallocManaged(reinterpret_cast<void**>(&out), kSize * kSize * 2);
  for (int i = 0; i < kSteps * kSize; ++i) {
    for (int j = 0; j < kSize; ++j) {
      a[i * kSize + j] = Bits(static_cast<float>(Number(i, j, 1)));
      b[i * kSize + j] = Bits(static_cast<float>(Number(j, i, 2)));
    }
  }
  std::memset(out, 0xff, kSize * kSize * 2);
  CUtensorMap maps[3];
  std::string error = EncodeTokens(&maps[0], DType::kBFloat16, a, kSteps * kSize, 1, kSize, kSize, 1);
  if (error.empty()) error = EncodeTokens(&maps[1], DType::kBFloat16, b, kSteps * kSize, 1, kSize, kSize, 1);
  if (error.empty()) error = EncodeTokens(&maps[2], DType::kBFloat16, out, kSize, 1, kSize, 16, 1);
  constexpr int kBytes = sizeof(Shared);
  if (error.empty()) error = Said(cudaFuncSetAttribute(micro, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  if (error.empty()) {
    error = Said(Launch(micro, 1, 1, kThreads, kBytes, nullptr, Arguments{mistake}, maps[0], maps[1], maps[2]));
  }
  if (error.empty()) error = Said(cudaDeviceSynchronize());
  if (!error.empty()) return error;
  int wrong = 0;
  for (int m = 0; m < kSize; ++m) {
    for (int n = 0; n < kSize; ++n) {
      float sum = 0;
      for (int t = 0; t < kSteps; ++t) {
        for (int k = 0; k < kSize; ++k) sum += Number(t * kSize + m, k, 1) * Number(k, t * kSize + n, 2);
      }
      wrong += out[m * kSize + n] != Bits(sum);
    }
  }
  return wrong == 0 ? "right" : std::to_string(wrong) + " of " + std::to_string(kSize * kSize) + " results are wrong";
}

}  // namespace
}  // namespace vsa::sm90

int main(int count, char** words) {
  for (int i = 0; count > 1 && i < static_cast<int>(std::size(vsa::sm90::kNames)); ++i) {
    if (std::strcmp(words[1], vsa::sm90::kNames[i]) != 0) continue;
    std::string said;
#ifdef VSA_SIM
    vsa::sim::SetDevice(count > 2 ? std::atoi(words[2]) : 0, 2);
    try {
      said = vsa::sm90::Run(static_cast<vsa::sm90::Mistake>(i));
    } catch (const vsa::sim::Error& error) {
      said = error.what();
    }
#else
    said = vsa::sm90::Run(static_cast<vsa::sm90::Mistake>(i));
#endif
    std::printf("%s\n", said.c_str());
    return 0;
  }
  std::printf("micro NAME [SEED]\n");
  return 2;
}
