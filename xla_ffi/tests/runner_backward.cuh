// The backward's part of the runner: gradients against a double reference and a twin that rounds as they must, on
// poisoned memory between canaries, bit for bit on repeats; the transposed lists against the host's; times.
#pragma once

#include <cmath>
#include <cstring>

#include "../sm90/bwd/backward.h"
#include "../sm90/bwd/parts.h"
#include "measure.cuh"
#include "problem.cuh"
#include "reference_backward.cuh"

namespace vsa::tests {

constexpr int kReferenceThreads = 128;

// LSE and delta as a forward would leave them, of every row, and NaN in the d_out of rows without keys. Large problems
// take `typical` values instead: the reference uses whatever is given.
template <class T>
void MakeResidual(const Problem<T>& problem, double scale, bool typical, Buffer& d_out, Buffer& lse, Buffer& delta) {
  const Shape& s = problem.shape;
  const int64_t rows = s.batch * s.heads * s.query_length();
  std::vector<float> lse_to(rows), delta_to(rows, 0);
  const auto tile_of = [&](int64_t row) {
    return row / s.query_length() / s.heads * s.query_tiles + row % s.query_length() / s.tile_size;
  };
  if (typical) {
    const double kept = (s.num_prefix_tiles + s.width) * s.tile_size;
    for (int64_t row = 0; row < rows; ++row) {
      const bool valid = row % s.tile_size < problem.query_sizes[tile_of(row)];
      lse_to[row] = valid ? static_cast<float>(std::log2(kept) + 0.72) : -INFINITY;
      delta_to[row] = valid ? static_cast<float>(row % 17 - 8) * 0.02f : 0;
    }
  } else {
    std::vector<int64_t> all(rows);
    std::iota(all.begin(), all.end(), 0);
    Buffer all_("rows", rows * 8), out_("out", rows * s.head_dim * 8), lse_("lse", rows * 8);
    all_.upload(all);
    ReferenceForward<T><<<rows, kReferenceThreads, (kReferenceThreads + s.head_dim) * sizeof(double)>>>(
        s, problem.pairs(), scale * 1.4426950408889634, problem.query.template data<T>(),
        problem.key.template data<T>(), problem.value.template data<T>(), all_.data<int64_t>(), out_.data<double>(),
        lse_.data<double>());
    Check(cudaDeviceSynchronize(), "reference forward");
    const auto out = out_.template download<double>(), exact_lse = lse_.template download<double>();
    auto gradient = d_out.template download<uint16_t>();
    for (int64_t row = 0; row < rows; ++row) {
      lse_to[row] = static_cast<float>(exact_lse[row]);
      const int64_t token = row / s.query_length() / s.heads * s.query_length() + row % s.query_length();
      T* d = reinterpret_cast<T*>(gradient.data()) + (token * s.heads + row / s.query_length() % s.heads) * s.head_dim;
      double sum = 0;
      for (int64_t h = 0; h < s.head_dim; ++h) {
        if (lse_to[row] == -INFINITY) d[h] = static_cast<T>(NAN);
        else sum += out[row * s.head_dim + h] * double(float(d[h]));
      }
      delta_to[row] = static_cast<float>(sum);
    }
    d_out.upload(gradient);
  }
  lse.upload(lse_to);
  delta.upload(delta_to);
}

// The transposed lists of the device against those made here.
template <class T>
bool CheckTransposed(const Problem<T>& problem, double seconds, double* ms) {
  const Shape& s = problem.shape;
  const int64_t heads = s.batch * s.heads, entries = s.rows() * s.width;
  const int64_t chunks = (s.rows() + sm90::kChunkRows - 1) / sm90::kChunkRows;
  Buffer offsets_("offsets", heads * (s.key_tiles + 1) * 4), entries_("entries", heads * entries * 4);
  Buffer counts_("chunk counts", heads * chunks * s.key_tiles * 4);
  for (Buffer* x : {&offsets_, &entries_, &counts_}) x->poison();
  const auto call = [&] {
    const sm90::Transposed to{offsets_.data<int32_t>(), entries_.data<int32_t>()};
    const std::string error = sm90::Transpose(s, problem.pairs(), to, counts_.data<int32_t>(), nullptr);
    if (!error.empty()) std::printf("FAILED transpose: %s\n", error.c_str());
  };
  call();
  Check(cudaDeviceSynchronize(), "transpose");
  const auto got_offsets = offsets_.download<int32_t>(), got_entries = entries_.download<int32_t>();
  bool good = offsets_.intact() && entries_.intact() && counts_.intact();
  for (int64_t head = 0; head < heads && good; ++head) {
    std::vector<std::vector<int32_t>> columns(s.key_tiles);
    for (int64_t entry = 0; entry < entries; ++entry) {
      const int64_t count = problem.counts[head * s.rows() + entry / s.width];
      const int32_t id = problem.indices[head * entries + entry];
      const bool kept = entry % s.width < count && id >= s.num_prefix_tiles && id < s.key_tiles;
      if (kept) columns[id].push_back(static_cast<int32_t>(entry));
    }
    int32_t at = 0;
    for (int64_t j = 0; j <= s.key_tiles && good; ++j) {
      good = got_offsets[head * (s.key_tiles + 1) + j] == at;
      for (size_t i = 0; j < s.key_tiles && good && i < columns[j].size(); ++i) {
        good = got_entries[head * entries + at++] == columns[j][i];
      }
      if (!good) std::printf("FAILED transposed lists: head %ld key tile %ld\n", long(head), long(j));
    }
  }
  if (seconds > 0) *ms = Time(seconds, call, false).sustained_ms;
  return good;
}

// Relative errors of sampled rows [samples, H] of `got`, and the twin's; says where the worst faults are.
template <class T>
bool CheckRows(const char* name, const std::vector<uint16_t>& got, const std::vector<double>& want,
               const std::vector<int64_t>& rows, int64_t length, int64_t heads, int64_t tile_size, int64_t head_dim,
               std::string* said) {
  std::vector<double> a, b, twin;
  int told = 0;
  double worst = 0;  // of a row: error over the twin's
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t token = rows[i] % length, head = rows[i] / length % heads, batch = rows[i] / length / heads;
    const T* row = reinterpret_cast<const T*>(got.data()) + ((batch * length + token) * heads + head) * head_dim;
    double error = 0, norm = 0;
    for (int64_t h = 0; h < head_dim; ++h) {
      a.push_back(float(row[h]));
      b.push_back(want[i * 2 * head_dim + h]);
      twin.push_back(want[(i * 2 + 1) * head_dim + h]);
      error += (a.back() - b.back()) * (a.back() - b.back());
      norm += b.back() * b.back();
    }
    const double exact = std::sqrt(norm);
    double twin_error = 0;
    for (size_t h = b.size() - head_dim; h < b.size(); ++h) twin_error += (twin[h] - b[h]) * (twin[h] - b[h]);
    if (exact > 0) worst = std::max(worst, std::sqrt(error) / (std::sqrt(twin_error) + 1e-4 * exact));
    if (!(error <= 0.01 * norm + 1e-12) && !(std::isnan(error) && std::isnan(norm)) && told++ < 6) {
      std::printf("\n    %s batch %ld head %ld tile %ld slot %ld: got %.4g %.4g .. %.4g, want %.4g %.4g .. %.4g", name,
                  long(batch), long(head), long(token / tile_size), long(token % tile_size), a[a.size() - head_dim],
                  a[a.size() - head_dim + 1], a.back(), b[b.size() - head_dim], b[b.size() - head_dim + 1], b.back());
    }
  }
  if (told > 6) std::printf("\n    %s: %d of %ld rows are wrong\n", name, told, long(rows.size()));
  const double error = RelativeError(a, b), limit = RelativeError(twin, b);
  char text[100];
  std::snprintf(text, sizeof(text), " %s %.2e (twin %.2e, worst row x%.1f)", name, error, limit, worst);
  *said += text;
  return error <= 1.5 * limit + 1e-6;
}

// Where two runs differ.
template <class T>
void TellDifference(int64_t repeat, int result, const std::vector<uint16_t>& now, const std::vector<uint16_t>& before,
                    int64_t heads, int64_t tile_size, int64_t head_dim) {
  int64_t differing = 0;
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] == before[i] || differing++ >= 4) continue;
    const int64_t token = i / head_dim / heads;
    std::printf("\n    repeat %ld, %s differs: tile %ld slot %ld head %ld column %ld: %g, before %g", long(repeat),
                result == 0 ? "dQ" : result == 1 ? "dK" : "dV", long(token / tile_size), long(token % tile_size),
                long(i / head_dim % heads), long(i % head_dim), float(reinterpret_cast<const T&>(now[i])),
                float(reinterpret_cast<const T&>(before[i])));
  }
  std::printf("\n    %ld elements in all\n", long(differing));
}

template <class T>
bool RunBackward(Options& options, Problem<T>& problem, double scale) {
  const Shape& s = problem.shape;
  const auto integer = [&](const char* name, int64_t fallback) {
    return static_cast<int64_t>(options.number(name, static_cast<double>(fallback)));
  };
  const int64_t samples = integer("samples", 256), repeats = integer("repeats", 3);
  const double seconds = options.number("seconds", 0);
  Buffer d_out("d_out", problem.query.bytes()), lse("lse", s.batch * s.heads * s.query_length() * 4);
  Buffer delta("delta", lse.bytes()), workspace("workspace", sm90::BackwardWorkspace(s));
  Buffer d_query("d_query", problem.query.bytes()), d_key("d_key", problem.key.bytes());
  Buffer d_value("d_value", problem.key.bytes());
  problem.fill(d_out, s.heads, s.query_tiles, problem.query_sizes_, 99);
  MakeResidual(problem, scale, integer("typical", 0), d_out, lse, delta);
  const BackwardParams params{s, scale, problem.pairs(), problem.query.data(), problem.key.data(), problem.value.data(),
                              lse.data(), d_out.data(), delta.data(), d_query.data(), d_key.data(), d_value.data(),
                              workspace.data()};
  // plain=1: the plain pair, also where the backward would keep the logits' gradients.
  Buffer offsets("offsets", s.batch * s.heads * (s.key_tiles + 1) * 4);
  Buffer entries("entries", s.batch * s.heads * s.rows() * s.width * 4);
  Buffer counts("chunk counts", s.batch * s.heads * (s.rows() / sm90::kChunkRows + 1) * s.key_tiles * 4);
  Buffer ticket("ticket", 4);
  const sm90::Transposed transposed{offsets.data<int32_t>(), entries.data<int32_t>()};
  const bool plain = integer("plain", 0);
  const auto call = [&] {
    std::string error;
    if (plain) {
      error = sm90::Transpose(s, problem.pairs(), transposed, counts.data<int32_t>(), nullptr);
      if (error.empty()) error = sm90::KeyGradients(params, transposed, ticket.data<int>(), nullptr);
      if (error.empty()) error = sm90::QueryGradients(params, ticket.data<int>(), nullptr);
    } else {
      error = sm90::Backward(params, nullptr);
    }
    if (error.empty()) return;
    std::printf("FAILED launch: %s\n", error.c_str());
    std::exit(1);
  };

  double transpose_ms = 0;
  bool good = CheckTransposed(problem, seconds / 4, &transpose_ms);
  std::vector<uint16_t> first[3];
  Buffer* results[3] = {&d_query, &d_key, &d_value};
  for (int64_t i = 0; i < repeats; ++i) {
    for (Buffer* x : {&d_query, &d_key, &d_value, &workspace}) x->poison();
    call();
    Check(cudaDeviceSynchronize(), "backward");
    for (int j = 0; j < 3; ++j) {
      auto now = results[j]->template download<uint16_t>();
      if (i == 0) first[j] = std::move(now);
      else if (now != first[j]) {
        TellDifference<T>(i, j, now, first[j], j == 0 ? s.heads : s.kv_heads, s.tile_size, s.head_dim);
        good = false;
      }
    }
  }

  std::mt19937_64 random(7);
  const auto draw = [&](int64_t count) {
    std::vector<int64_t> rows(samples);
    for (int64_t& row : rows) row = random() % count;
    return rows;
  };
  const auto query_rows = draw(s.batch * s.heads * s.query_length());
  const auto key_rows = draw(s.batch * s.kv_heads * s.key_length());
  Buffer rows_("rows", samples * 8), q_("reference", samples * 2 * s.head_dim * 8);
  Buffer k_("reference", q_.bytes()), v_("reference", q_.bytes());
  constexpr size_t kBytes = 2 * kReferenceThreads * sizeof(double);
  rows_.upload(query_rows);
  ReferenceQueryGradient<T><<<samples, kReferenceThreads, kBytes>>>(params, rows_.data<int64_t>(), q_.data<double>());
  Check(cudaDeviceSynchronize(), "reference d_query");
  rows_.upload(key_rows);
  ReferenceKeyGradient<T><<<samples, kReferenceThreads, kBytes>>>(params, rows_.data<int64_t>(), k_.data<double>(),
                                                                  v_.data<double>());
  Check(cudaDeviceSynchronize(), "reference d_key, d_value");
  std::string said;
  const auto check = [&](const char* name, int result, const Buffer& want, const std::vector<int64_t>& rows,
                         int64_t length, int64_t heads) {
    good &= CheckRows<T>(name, first[result], want.download<double>(), rows, length, heads, s.tile_size, s.head_dim,
                         &said);
  };
  check("dQ", 0, q_, query_rows, s.query_length(), s.heads);
  check("dK", 1, k_, key_rows, s.key_length(), s.kv_heads);
  check("dV", 2, v_, key_rows, s.key_length(), s.kv_heads);
  good &= problem.intact();
  for (const Buffer* x : {&d_out, &lse, &delta, &workspace, &d_query, &d_key, &d_value}) good &= x->intact();
  std::printf("%s backward%s", good ? "ok    " : "FAILED", said.c_str());
  if (seconds > 0) {
    const bool bursts = integer("bursts", 1);
    const auto report = [&](const char* name, double flops_per_score, auto part) {
      const Timing timing = Time(seconds, part, bursts);
      const double scores = problem.num_pairs() * s.tile_size * s.tile_size;
      std::printf("\n    %s sustained %.3f ms %.0f TFLOP/s at %.0f MHz  burst %.3f ms %.0f TFLOP/s", name, timing.sustained_ms,
                  flops_per_score * s.head_dim * scores / timing.sustained_ms / 1e9, timing.sustained_mhz, timing.burst_ms,
                  flops_per_score * s.head_dim * scores / timing.burst_ms / 1e9);
    };
    std::printf("\n    transpose %.3f ms", transpose_ms);
    report("backward", 10, call);
    if (plain) {
      int* at = ticket.data<int>();
      report("  dK and dV, 4 products", 8, [&] { sm90::KeyGradients(params, transposed, at, nullptr); });
      report("  dQ, 3 products", 6, [&] { sm90::QueryGradients(params, at, nullptr); });
    }
  }
  std::printf("\n");
  return good;
}

}  // namespace vsa::tests
