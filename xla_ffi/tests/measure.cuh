// Times of calls, errors of results.
#pragma once

#include <chrono>
#include <cmath>
#include <vector>

#include "problem.cuh"

namespace vsa::tests {

struct Timing {
  double sustained_ms, burst_ms;
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
  while (elapsed() < seconds) {
    // Ten at a time, so that the host's waits do not let the card rest.
    cudaEventRecord(begin);
    for (int i = 0; i < 10; ++i) call();
    cudaEventRecord(end);
    Check(cudaEventSynchronize(end), "timed calls");
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    all.push_back(ms / 10);
  }
  const double sustained = median({all.begin() + all.size() / 2, all.end()});
  std::vector<double> burst;
  for (int i = 0; i < 7 && bursts; ++i) {
    const auto rest = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - rest < std::chrono::milliseconds(400)) {
    }
    for (int j = 0; j < 3; ++j) once();
    burst.push_back(once());
  }
  return {sustained, bursts ? median(burst) : NAN};
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
