// The functions of sm90/ptx.cuh, and the matrix instructions of sm90/wgmma.cuh, on machine.h.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace vsa::sim {

// A matrix product of a warpgroup, seen from one warp: its 16 rows of D. Registers are read and written when the
// product runs, some time between issue and wait.
struct Product {
  float* d;
  const uint32_t* a;  // registers, or null: a_descriptor
  uint64_t a_descriptor, b_descriptor;
  int n;
  bool half, a_transposed, b_transposed, add;
};
void IssueProduct(const Product& product);
void MultiplyInWarp(float* d, const uint32_t* a, const uint32_t* b, bool half);

}  // namespace vsa::sim

namespace vsa::sm90 {

constexpr unsigned kWholeWarp = 0xffffffff;

uint8_t* dynamic_shared();
uint32_t shared_address(const void* pointer);
inline uint32_t opaque(uint32_t x) { return x; }
inline int uniform(int x) { return __shfl_sync(kWholeWarp, x, 0); }
int load_shared(uint32_t address);

void mbarrier_init(uint32_t barrier, uint32_t count);
void fence_mbarrier_init();
void mbarrier_arrive_for(uint32_t barrier, uint32_t count);
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_for(barrier, 1); }
void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes);
void mbarrier_wait(uint32_t barrier, uint32_t parity);
bool mbarrier_try_wait(uint32_t barrier, uint32_t parity);
bool mbarrier_test_wait(uint32_t barrier, uint32_t parity);
bool elect();

void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int head, int token);
void tma_load_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, int block, int head, int token,
                        uint16_t mask);
void tma_store(const CUtensorMap* map, uint32_t from, int block, int head, int token);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
inline void bulk_load_once(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  bulk_load(to, from, bytes, barrier);
}
void bulk_store_once(void* to, uint32_t from, uint32_t bytes);
void tma_store_commit();
void tma_store_wait_read();
void tma_store_wait();
inline void fence_proxy_async() {}

void ldmatrix(uint32_t* to, uint32_t from);
void stmatrix(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

void publish(int* counter);
void await(const int* counter, int count);

int cluster_rank();
void cluster_sync();
uint32_t address_in(int rank, uint32_t address);
void mbarrier_arrive_in_cluster(uint32_t barrier);
void store_async(uint32_t to, int value, uint32_t barrier);

void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);

void set_registers(int count, bool more);
template <int kRegisters>
void setmaxnreg_inc() { set_registers(kRegisters, true); }
template <int kRegisters>
void setmaxnreg_dec() { set_registers(kRegisters, false); }

inline float exp2_approx(float x) { return std::exp2(x); }

void wgmma_fence();
void wgmma_commit();
void wgmma_wait_for(int pending);
template <int kPending>
void wgmma_wait() { wgmma_wait_for(kPending); }
template <int kCount>
void pin(float (&)[kCount]) {}

}  // namespace vsa::sm90
