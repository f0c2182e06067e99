// Times of calls, errors of results.
#pragma once

#include <chrono>
#include <cmath>
#include <vector>

#include "problem.cuh"

namespace vsa::tests {

struct Timing {
  double sustained_ms, burst_ms;
  double sustained_mhz;  // cycles counted by an SM over nanoseconds; nvidia-smi's are not always those
};

struct Clocks {
  uint32_t sm;
  uint64_t cycles, nanoseconds;
};

static __global__ void ReadClocks(Clocks* to) {
  asm volatile("mov.u32 %0, %%smid;" : "=r"(to->sm));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(to->cycles));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to->nanoseconds));
}

// An SM's clock between two moments of the default stream.
class ClockRate {
 public:
  ClockRate() { Check(cudaMallocHost(&clocks_, 2 * sizeof(Clocks)), "clocks"); }
  ~ClockRate() { cudaFreeHost(clocks_); }
  void begin() { ReadClocks<<<1, 1>>>(clocks_); }
  void end() { ReadClocks<<<1, 1>>>(clocks_ + 1); }
  // NaN if the two were not read on one SM.
  double mhz() const {
    Check(cudaDeviceSynchronize(), "clocks");
    if (clocks_[0].sm != clocks_[1].sm) return NAN;
    return 1e3 * (clocks_[1].cycles - clocks_[0].cycles) / (clocks_[1].nanoseconds - clocks_[0].nanoseconds);
  }

 private:
  Clocks* clocks_;
};

// Sustained: the median of the second half of `seconds` of back-to-back calls; burst: the median of 7 after 0.4 s
// of idling and 3 warm-ups, on demand.
template <class Call>
Timing Time(double seconds, Call call, bool bursts = true) {
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "event");
  Check(cudaEventCreate(&end), "event");
  auto once = [&] {
    cudaEventRecord(begin);
    call();
    cudaEventRecord(end);
    Check(cudaEventSynchronize(end), "timed call");
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    return static_cast<double>(ms);
  };
  auto median = [](std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  };
  std::vector<double> all;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  ClockRate rate;
  rate.begin();
  bool half = false;
  while (elapsed() < seconds) {
    if (!half && elapsed() > seconds / 2) {
      rate.begin();
      half = true;
    }
    // Ten at a time, so that the host's waits do not let the card rest.
    cudaEventRecord(begin);
    for (int i = 0; i < 10; ++i) call();
    cudaEventRecord(end);
    Check(cudaEventSynchronize(end), "timed calls");
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    all.push_back(ms / 10);
  }
  rate.end();
  const double mhz = rate.mhz();
  const double sustained = median({all.begin() + all.size() / 2, all.end()});
  std::vector<double> burst;
  for (int i = 0; i < 7 && bursts; ++i) {
    const auto rest = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - rest < std::chrono::milliseconds(400)) {
    }
    for (int j = 0; j < 3; ++j) once();
    burst.push_back(once());
  }
  return {sustained, bursts ? median(burst) : NAN, mhz};
}

inline double RelativeError(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) != std::isnan(got[i])) return NAN;
    if (std::isinf(want[i]) || std::isinf(got[i])) {
      if (want[i] != got[i]) return INFINITY;
      continue;
    }
    if (std::isnan(want[i])) continue;
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace vsa::tests
