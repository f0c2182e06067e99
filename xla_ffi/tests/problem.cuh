// A random problem on the device: arrays between canaries, lists, sizes, poison where nothing may be read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../params.h"

namespace vsa::tests {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Arguments of the form name=value.
class Options {
 public:
  Options(int count, char** words) {
    for (int i = 1; i < count; ++i) {
      const std::string word = words[i];
      const size_t at = word.find('=');
      if (at == std::string::npos) {
        std::printf("FAILED argument %s: want name=value\n", words[i]);
        std::exit(2);
      }
      given_[word.substr(0, at)] = word.substr(at + 1);
    }
  }
  // Whether everything given was asked for; says what was not.
  bool all_asked() const {
    bool all = true;
    for (const auto& [name, value] : given_) {
      if (asked_.count(name)) continue;
      std::printf("FAILED argument %s=%s: nothing asks for it\n", name.c_str(), value.c_str());
      all = false;
    }
    return all;
  }
  std::string text(const std::string& name, const std::string& fallback) {
    asked_.insert(name);
    return given_.count(name) ? given_[name] : fallback;
  }
  double number(const std::string& name, double fallback) {
    asked_.insert(name);
    return given_.count(name) ? std::stod(given_[name]) : fallback;
  }

 private:
  std::map<std::string, std::string> given_;
  std::set<std::string> asked_;
};

// Device memory between two guards; says when anything wrote into them.
class Buffer {
 public:
  Buffer(std::string name, size_t bytes) : name_(std::move(name)), bytes_(bytes) {
    Check(cudaMalloc(&base_, 2 * kGuard + rounded()), name_.c_str());
    Check(cudaMemset(base_, kCanary, 2 * kGuard + rounded()), name_.c_str());
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(base_); }

  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + kGuard);
  }
  size_t bytes() const { return bytes_; }
  // All bits one: NaN in every floating dtype.
  void poison() { Check(cudaMemset(data(), 0xff, bytes_), name_.c_str()); }

  template <class T>
  void upload(const std::vector<T>& from) {
    Check(cudaMemcpy(data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), name_.c_str());
  }
  template <class T>
  std::vector<T> download() const {
    std::vector<T> to(bytes_ / sizeof(T));
    Check(cudaMemcpy(to.data(), data(), to.size() * sizeof(T), cudaMemcpyDeviceToHost), name_.c_str());
    return to;
  }
  bool intact() const {
    std::vector<unsigned char> guards(2 * kGuard + rounded() - bytes_);
    const size_t after = kGuard + rounded() - bytes_;
    Check(cudaMemcpy(guards.data(), base_, kGuard, cudaMemcpyDeviceToHost), name_.c_str());
    Check(cudaMemcpy(guards.data() + kGuard, data<char>() + bytes_, after, cudaMemcpyDeviceToHost), name_.c_str());
    const bool whole = std::all_of(guards.begin(), guards.end(), [](unsigned char c) { return c == kCanary; });
    if (!whole) std::printf("FAILED %s: written outside\n", name_.c_str());
    return whole;
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr int kCanary = 0xa5;
  size_t rounded() const { return (bytes_ + 255) / 256 * 256; }
  std::string name_;
  size_t bytes_;
  void* base_ = nullptr;
};

__host__ __device__ inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Standard normal, by element number: the same on every run.
template <class T>
__global__ void FillNormal(T* x, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = Mix(seed * 0x9e3779b97f4a7c15ull + i);
    const float u = ((bits >> 40) + 1) * 0x1p-24f, v = (bits & 0xffffff) * 0x1p-24f;
    x[i] = static_cast<T>(sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

// NaN in the slots of [B, J*M, heads, H] past each tile's size.
template <class T>
__global__ void PoisonPadding(T* x, const int32_t* sizes, int64_t tiles, int64_t tile_size, int64_t row) {
  const int64_t token = blockIdx.x;
  if (token % tile_size < sizes[token / tile_size]) return;
  for (int64_t i = threadIdx.x; i < row; i += blockDim.x) x[token * row + i] = static_cast<T>(NAN);
}

// lists: "random" distinct, ascending; "routed": groups of `group` neighbouring rows have `common` of their ids in
// common; "wild": any order, duplicates, ids out of range, counts from -1 to W + 1.
template <class T>
struct Problem {
  Shape shape;
  std::vector<int32_t> indices, counts, query_sizes, key_sizes;
  Buffer indices_, counts_, query_sizes_, key_sizes_;
  Buffer query, key, value, out, lse;

  Problem(const Shape& shape, const std::string& lists, double common, int group, bool ragged, uint64_t seed)
      : shape(shape),
        indices_("indices", shape.batch * shape.heads * shape.rows() * shape.width * 4),
        counts_("counts", shape.batch * shape.heads * shape.rows() * 4),
        query_sizes_("query_sizes", shape.batch * shape.query_tiles * 4),
        key_sizes_("key_sizes", shape.batch * shape.key_tiles * 4),
        query("query", shape.batch * shape.query_length() * shape.heads * shape.head_dim * sizeof(T)),
        key("key", shape.batch * shape.key_length() * shape.kv_heads * shape.head_dim * sizeof(T)),
        value("value", key.bytes()),
        out("out", query.bytes()),
        lse("lse", shape.batch * shape.heads * shape.query_length() * 4) {
    std::mt19937_64 random(seed);
    make_lists(lists, common, group, random);
    make_sizes(query_sizes, shape.query_tiles, ragged, random);
    if (shape.query_tiles == shape.key_tiles) key_sizes = query_sizes;
    else make_sizes(key_sizes, shape.key_tiles, ragged, random);
    indices_.upload(indices);
    counts_.upload(counts);
    query_sizes_.upload(query_sizes);
    key_sizes_.upload(key_sizes);
    fill(query, shape.heads, shape.query_tiles, query_sizes_, seed + 1);
    fill(key, shape.kv_heads, shape.key_tiles, key_sizes_, seed + 2);
    fill(value, shape.kv_heads, shape.key_tiles, key_sizes_, seed + 3);
  }

  Pairs pairs() const {
    return {indices_.data<int32_t>(), counts_.data<int32_t>(), query_sizes_.data<int32_t>(), key_sizes_.data<int32_t>()};
  }

  void fill(Buffer& buffer, int64_t heads, int64_t tiles, const Buffer& sizes, uint64_t seed) {
    FillNormal<<<4096, 256>>>(buffer.data<T>(), buffer.bytes() / sizeof(T), seed);
    PoisonPadding<<<shape.batch * tiles * shape.tile_size, 128>>>(buffer.data<T>(), sizes.data<int32_t>(), tiles,
                                                                  shape.tile_size, heads * shape.head_dim);
    Check(cudaDeviceSynchronize(), "fill");
  }

  // Pairs of tiles that meet, prefix and dense rows included.
  double num_pairs() const {
    double listed = 0;
    for (int32_t count : counts) listed += std::clamp<int64_t>(count, 0, shape.width) + shape.num_prefix_tiles;
    return listed + double(shape.batch) * shape.heads * shape.num_dense_rows * shape.key_tiles;
  }

  bool intact() const {
    bool whole = true;
    for (const Buffer* x : {&indices_, &counts_, &query_sizes_, &key_sizes_, &query, &key, &value, &out, &lse}) {
      whole &= x->intact();
    }
    return whole;
  }

 private:
  void make_lists(const std::string& kind, double common, int group, std::mt19937_64& random) {
    const int64_t prefix = shape.num_prefix_tiles, choices = shape.key_tiles - prefix;
    indices.assign(shape.batch * shape.heads * shape.rows() * shape.width, static_cast<int32_t>(shape.key_tiles));
    counts.assign(shape.batch * shape.heads * shape.rows(), static_cast<int32_t>(shape.width));
    std::vector<int32_t> ids(choices), shared(choices);
    std::iota(ids.begin(), ids.end(), static_cast<int32_t>(prefix));
    auto draw = [&](int64_t from, int64_t to) {  // ids[from..to) become random, distinct from ids[..from)
      for (int64_t i = from; i < to; ++i) std::swap(ids[i], ids[i + random() % (choices - i)]);
    };
    for (size_t list = 0; list < counts.size(); ++list) {
      int32_t* row = indices.data() + list * shape.width;
      if (kind == "wild") {
        counts[list] = static_cast<int32_t>(random() % (shape.width + 3)) - 1;
        for (int64_t i = 0; i < shape.width; ++i) row[i] = static_cast<int32_t>(random() % (shape.key_tiles + 4)) - 2;
        continue;
      }
      const int64_t kept = kind == "routed" ? static_cast<int64_t>(common * shape.width + 0.5) : 0;
      if (kind == "routed" && list % shape.rows() % group == 0) {
        draw(0, kept);
        shared = ids;
      }
      if (kind == "routed") ids = shared;
      draw(kept, shape.width);
      std::copy_n(ids.begin(), shape.width, row);
      std::sort(row, row + shape.width);
    }
  }

  void make_sizes(std::vector<int32_t>& sizes, int64_t tiles, bool ragged, std::mt19937_64& random) {
    sizes.assign(shape.batch * tiles, static_cast<int32_t>(shape.tile_size));
    if (!ragged) return;
    for (int32_t& size : sizes) {
      if (random() % 2) size = static_cast<int32_t>(random() % (shape.tile_size + 1));
    }
    sizes.front() = 0;
  }
};

}  // namespace vsa::tests
