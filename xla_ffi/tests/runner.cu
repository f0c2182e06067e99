// Runs the kernels without Python: checks them against a double reference, on poisoned memory between canaries,
// repeats them bit for bit, and times them. Arguments are name=value; see Options below. Exit status 1 on a fault.
#include <cmath>
#include <cstring>

#include "../sm90/fwd/forward.h"
#include "measure.cuh"
#include "problem.cuh"
#include "reference_forward.cuh"
#include "runner_backward.cuh"

namespace vsa::tests {
namespace {

// Where the faults lie: relative error by 64 rows of a tile and 32 columns.
void PrintErrors(const Shape& shape, const std::vector<int64_t>& rows, const std::vector<double>& got,
                 const std::vector<double>& want) {
  const int64_t row_blocks = (shape.tile_size + 63) / 64, column_blocks = shape.head_dim / 32;
  std::vector<double> error(row_blocks * column_blocks), norm(error.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t h = 0; h < shape.head_dim; ++h) {
      const size_t at = rows[i] % shape.tile_size / 64 * column_blocks + h / 32, from = i * shape.head_dim + h;
      error[at] += std::pow(got[from] - want[from], 2);
      norm[at] += std::pow(want[from], 2);
    }
  }
  for (size_t at = 0; at < error.size(); ++at) {
    std::printf("%s%.1e", at % column_blocks ? " " : "\n    ", std::sqrt(error[at] / norm[at]));
  }
  std::printf("\n");
}

template <class T>
bool Run(Options& options, DType dtype) {
  const auto integer = [&](const char* name, int64_t fallback) {
    return static_cast<int64_t>(options.number(name, static_cast<double>(fallback)));
  };
  Shape shape{};
  shape.dtype = dtype;
  shape.batch = integer("B", 1);
  shape.heads = integer("N", 2);
  shape.kv_heads = integer("K", shape.heads);
  shape.head_dim = integer("H", 128);
  shape.tile_size = integer("M", 128);
  shape.query_tiles = integer("Jq", 16);
  shape.key_tiles = integer("Jk", shape.query_tiles);
  shape.num_prefix_tiles = integer("prefix", 0);
  shape.num_dense_rows = integer("dense", shape.num_prefix_tiles);
  shape.width = integer("W", 4);
  Problem<T> problem(shape, options.text("lists", "random"), options.number("common", 0.7), integer("group", 4),
                     integer("ragged", 0), integer("seed", 1));
  const double scale = options.number("scale", 1 / std::sqrt(static_cast<double>(shape.head_dim)));
  if (options.text("pass", "forward") == "backward") return RunBackward<T>(options, problem, scale);
  const int64_t samples = integer("samples", 512), repeats = integer("repeats", 3);
  const double seconds = options.number("seconds", 0);

  Buffer workspace("workspace", sm90::ForwardWorkspace(shape));
  ForwardParams params{shape, scale, problem.pairs(), problem.query.data(), problem.key.data(), problem.value.data(),
                       problem.out.data(), problem.lse.data(), workspace.data()};
  const auto call = [&] {
    const std::string error = sm90::Forward(params, nullptr);
    if (!error.empty()) {
      std::printf("FAILED launch: %s\n", error.c_str());
      std::exit(1);
    }
  };

  bool good = true;
  std::vector<uint16_t> first_out;
  std::vector<float> first_lse;
  for (int64_t i = 0; i < repeats; ++i) {
    problem.out.poison();
    problem.lse.poison();
    workspace.poison();
    call();
    Check(cudaDeviceSynchronize(), "forward");
    auto out = problem.out.template download<uint16_t>();
    auto lse = problem.lse.template download<float>();
    if (i == 0) {
      first_out = std::move(out);
      first_lse = std::move(lse);
    } else if (out != first_out || std::memcmp(lse.data(), first_lse.data(), lse.size() * 4)) {
      std::printf("FAILED repeat %ld differs\n", static_cast<long>(i));
      good = false;
    }
  }

  std::mt19937_64 random(7);
  std::vector<int64_t> rows(samples);
  for (int64_t& row : rows) row = random() % (shape.batch * shape.heads * shape.query_length());
  Buffer rows_("rows", samples * 8), out_("reference", samples * shape.head_dim * 8), lse_("reference", samples * 8);
  rows_.upload(rows);
  constexpr int kThreads = 128;
  ReferenceForward<T><<<samples, kThreads, (kThreads + shape.head_dim) * sizeof(double)>>>(
      shape, problem.pairs(), scale * 1.4426950408889634, problem.query.template data<T>(),
      problem.key.template data<T>(), problem.value.template data<T>(), rows_.data<int64_t>(), out_.data<double>(),
      lse_.data<double>());
  Check(cudaDeviceSynchronize(), "reference");
  std::vector<double> got_out, got_lse;
  for (int64_t row : rows) {
    const int64_t token = row % shape.query_length(), batch_head = row / shape.query_length();
    const int64_t batch = batch_head / shape.heads, head = batch_head % shape.heads;
    got_lse.push_back(first_lse[row]);
    const uint16_t* from = first_out.data() + ((batch * shape.query_length() + token) * shape.heads + head) * shape.head_dim;
    for (int64_t h = 0; h < shape.head_dim; ++h) got_out.push_back(float(reinterpret_cast<const T*>(from)[h]));
  }
  const double out_error = RelativeError(got_out, out_.download<double>());
  const double lse_error = RelativeError(got_lse, lse_.download<double>());
  const double limit = dtype == DType::kFloat16 ? 5e-4 : 3.5e-3;
  good &= out_error < limit && lse_error < 1e-5;
  good &= problem.intact() && workspace.intact();
  std::printf("%s forward error %.2e lse %.1e", good ? "ok    " : "FAILED", out_error, lse_error);
  if (!good) PrintErrors(shape, rows, got_out, out_.download<double>());
  if (seconds > 0) {
    const Timing timing = Time(seconds, call);
    const double flops = 4. * shape.head_dim * problem.num_pairs() * shape.tile_size * shape.tile_size;
    std::printf("  sustained %.3f ms %.0f TFLOP/s at %.0f MHz  burst %.3f ms %.0f TFLOP/s", timing.sustained_ms,
                flops / timing.sustained_ms / 1e9, timing.sustained_mhz, timing.burst_ms, flops / timing.burst_ms / 1e9);
  }
  std::printf("\n");
  return good;
}

}  // namespace
}  // namespace vsa::tests

int main(int count, char** words) {
  vsa::tests::Options options(count, words);
  for (int i = 1; i < count; ++i) std::printf("%s ", words[i]);
  std::printf("\n  ");
  const bool half = options.text("dtype", "bf16") == "f16";
  const bool good = half ? vsa::tests::Run<__half>(options, vsa::DType::kFloat16)
                         : vsa::tests::Run<__nv_bfloat16>(options, vsa::DType::kBFloat16);
  return options.all_asked() && good ? 0 : 1;
}
