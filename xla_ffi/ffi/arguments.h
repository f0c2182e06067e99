// From what XLA passes to what a kernel is told: every shape, dtype and attribute is checked here, once, for all
// platforms.  A message says the name, what was got and what is wanted.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/params.h"

namespace vsa {

namespace ffi = ::xla::ffi;

inline std::string Text(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F16: return "float16";
    case ffi::DataType::BF16: return "bfloat16";
    case ffi::DataType::F32: return "float32";
    case ffi::DataType::F64: return "float64";
    case ffi::DataType::S32: return "int32";
    case ffi::DataType::U8: return "uint8";
    default: return "dtype " + std::to_string(static_cast<int>(dtype)) + " of XLA";
  }
}

template <typename Numbers>
std::string Text(const Numbers& numbers) {
  std::string text;
  for (int64_t n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

// Collects the first thing that is wrong.
class Check {
 public:
  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }

  void That(bool right, const std::string& name, const std::string& got, const std::string& want) {
    if (ok() && !right) message_ = "vsa: " + name + ": got " + got + ", want " + want;
  }

  void Rank(const char* name, const ffi::AnyBuffer& buffer, size_t rank, const char* letters) {
    That(buffer.dimensions().size() == rank, name, "shape " + Text(buffer.dimensions()), letters);
  }

  void Is(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype, std::initializer_list<int64_t> shape) {
    const auto got = buffer.dimensions();
    bool same = buffer.element_type() == dtype && got.size() == shape.size();
    for (size_t i = 0; same && i < got.size(); ++i) same = got[i] == shape.begin()[i];
    That(same, name, Text(buffer.element_type()) + Text(got), Text(dtype) + Text(shape));
  }

 private:
  std::string message_;
};

// The attributes of all calls.
struct Attributes {
  double scale;
  int64_t num_prefix_tiles;
  int64_t num_dense_rows;
};

// The operands that forward and backward begin with.
struct Inputs {
  Attributes attributes;
  ffi::AnyBuffer query, key, value, indices, counts, query_sizes, key_sizes;
};

// The dtype and the dims of a call; `sums` is the dtype of its lse.
inline Shape CheckInputs(const Inputs& in, Check* check, ffi::DataType* sums) {
  Shape shape{};
  check->Rank("query", in.query, 4, "[B, Jq*M, N, H]");
  check->Rank("key", in.key, 4, "[B, Jk*M, K, H]");
  check->Rank("indices", in.indices, 4, "[B, N, R, W]");
  check->Rank("query_sizes", in.query_sizes, 2, "[B, Jq]");
  check->Rank("key_sizes", in.key_sizes, 2, "[B, Jk]");
  if (!check->ok()) return shape;

  const ffi::DataType dtype = in.query.element_type();
  *sums = ffi::DataType::F32;
  switch (dtype) {
    case ffi::DataType::F16: shape.dtype = DType::kFloat16; break;
    case ffi::DataType::BF16: shape.dtype = DType::kBFloat16; break;
    case ffi::DataType::F32: shape.dtype = DType::kFloat32; break;
    case ffi::DataType::F64:
      shape.dtype = DType::kFloat64;
      *sums = ffi::DataType::F64;
      break;
    default: check->That(false, "query", Text(dtype), "float16, bfloat16, float32 or float64");
  }
  const auto query = in.query.dimensions(), key = in.key.dimensions();
  shape.batch = query[0];
  shape.heads = query[2];
  shape.kv_heads = key[2];
  shape.head_dim = query[3];
  shape.query_tiles = in.query_sizes.dimensions()[1];
  shape.key_tiles = in.key_sizes.dimensions()[1];
  shape.width = in.indices.dimensions()[3];
  shape.num_prefix_tiles = in.attributes.num_prefix_tiles;
  shape.num_dense_rows = in.attributes.num_dense_rows;

  const double scale = in.attributes.scale;
  check->That(std::isfinite(scale) && scale > 0, "scale", std::to_string(scale), "a finite number > 0");
  check->That(shape.head_dim > 0 && shape.heads > 0, "query", "shape " + Text(query),
              "at least one head and one head dim");
  check->That(shape.kv_heads > 0 && shape.heads % std::max<int64_t>(shape.kv_heads, 1) == 0, "key",
              std::to_string(shape.kv_heads) + " heads", "a divisor of query's " + std::to_string(shape.heads));
  check->That(shape.query_tiles > 0 && query[1] > 0 && query[1] % std::max<int64_t>(shape.query_tiles, 1) == 0,
              "query", std::to_string(query[1]) + " tokens",
              "a multiple of query_sizes' " + std::to_string(shape.query_tiles) + " tiles, at least one");
  check->That(shape.key_tiles > 0 && shape.key_tiles <= std::numeric_limits<int32_t>::max(), "key_sizes",
              std::to_string(shape.key_tiles) + " tiles", "1 to 2^31 - 1");
  check->That(shape.query_tiles <= std::numeric_limits<int32_t>::max(), "query_sizes",
              std::to_string(shape.query_tiles) + " tiles", "1 to 2^31 - 1");
  const auto check_range = [&](const char* name, int64_t got, int64_t most, const char* tiles) {
    check->That(got >= 0 && got <= most, name, std::to_string(got), "0 to " + std::to_string(most) + ", " + tiles);
  };
  check_range("num_prefix_tiles", shape.num_prefix_tiles, shape.key_tiles, "the key tiles");
  check_range("num_dense_rows", shape.num_dense_rows, shape.query_tiles, "the query tiles");
  if (!check->ok()) return shape;

  shape.tile_size = query[1] / shape.query_tiles;
  check->Is("key", in.key, dtype, {shape.batch, shape.key_length(), shape.kv_heads, shape.head_dim});
  check->Is("value", in.value, dtype, {shape.batch, shape.key_length(), shape.kv_heads, shape.head_dim});
  check->Is("indices", in.indices, ffi::DataType::S32, {shape.batch, shape.heads, shape.rows(), shape.width});
  check->Is("counts", in.counts, ffi::DataType::S32, {shape.batch, shape.heads, shape.rows()});
  check->Is("query_sizes", in.query_sizes, ffi::DataType::S32, {shape.batch, shape.query_tiles});
  check->Is("key_sizes", in.key_sizes, ffi::DataType::S32, {shape.batch, shape.key_tiles});
  return shape;
}

inline Pairs PairsOf(const Inputs& in) {
  const auto data = [](const ffi::AnyBuffer& buffer) { return static_cast<const int32_t*>(buffer.untyped_data()); };
  return {data(in.indices), data(in.counts), data(in.query_sizes), data(in.key_sizes)};
}

// Buffer by buffer of a call; the binding leaves them unnamed, so that one binding serves every handler.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  void CheckCounts(size_t operands, size_t results, Check* check) const {
    check->That(args_.size() == operands, "operands", std::to_string(args_.size()), std::to_string(operands));
    check->That(rets_.size() == results, "results", std::to_string(rets_.size()), std::to_string(results));
  }
  ffi::AnyBuffer operand(size_t i) const { return *args_.get<ffi::AnyBuffer>(i); }
  ffi::AnyBuffer result(size_t i) const { return **rets_.get<ffi::AnyBuffer>(i); }

  Inputs inputs(const Attributes& attributes) const {
    return {attributes, operand(0), operand(1), operand(2), operand(3), operand(4), operand(5), operand(6)};
  }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
};

// Bytes of the workspace of a kernel, which is its last result; null: it has none.
using WorkspaceBytes = int64_t (*)(const Shape&);

inline void* Workspace(const Buffers& buffers, size_t result, WorkspaceBytes bytes, const Shape& shape, Check* check) {
  if (bytes == nullptr || !check->ok()) return nullptr;
  const ffi::AnyBuffer workspace = buffers.result(result);
  check->Is("workspace", workspace, ffi::DataType::U8, {bytes(shape)});
  return workspace.untyped_data();
}

// Operands: query, key, value, indices, counts, query_sizes, key_sizes.  Results: out, lse, perhaps a workspace.
inline ffi::ErrorOr<ForwardParams> ForwardArguments(const Attributes& attributes, const Buffers& buffers,
                                                    WorkspaceBytes workspace_bytes) {
  Check check;
  buffers.CheckCounts(7, workspace_bytes == nullptr ? 2 : 3, &check);
  if (!check.ok()) return ffi::Unexpected(check.error());
  const Inputs in = buffers.inputs(attributes);
  const ffi::AnyBuffer out = buffers.result(0), lse = buffers.result(1);
  ffi::DataType sums;
  const Shape shape = CheckInputs(in, &check, &sums);
  check.Is("out", out, in.query.element_type(), {shape.batch, shape.query_length(), shape.heads, shape.head_dim});
  check.Is("lse", lse, sums, {shape.batch, shape.heads, shape.query_length()});
  void* workspace = Workspace(buffers, 2, workspace_bytes, shape, &check);
  if (!check.ok()) return ffi::Unexpected(check.error());
  return ForwardParams{shape,
                       attributes.scale,
                       PairsOf(in),
                       in.query.untyped_data(),
                       in.key.untyped_data(),
                       in.value.untyped_data(),
                       out.untyped_data(),
                       lse.untyped_data(),
                       workspace};
}

// Operands: those of the forward, lse, d_out, delta.  Results: d_query, d_key, d_value, perhaps a workspace.
inline ffi::ErrorOr<BackwardParams> BackwardArguments(const Attributes& attributes, const Buffers& buffers,
                                                      WorkspaceBytes workspace_bytes) {
  Check check;
  buffers.CheckCounts(10, workspace_bytes == nullptr ? 3 : 4, &check);
  if (!check.ok()) return ffi::Unexpected(check.error());
  const Inputs in = buffers.inputs(attributes);
  const ffi::AnyBuffer lse = buffers.operand(7), d_out = buffers.operand(8), delta = buffers.operand(9);
  const ffi::AnyBuffer d_query = buffers.result(0), d_key = buffers.result(1), d_value = buffers.result(2);
  ffi::DataType sums;
  const Shape shape = CheckInputs(in, &check, &sums);
  const ffi::DataType dtype = in.query.element_type();
  check.Is("lse", lse, sums, {shape.batch, shape.heads, shape.query_length()});
  check.Is("d_out", d_out, dtype, {shape.batch, shape.query_length(), shape.heads, shape.head_dim});
  check.Is("delta", delta, sums, {shape.batch, shape.heads, shape.query_length()});
  check.Is("d_query", d_query, dtype, {shape.batch, shape.query_length(), shape.heads, shape.head_dim});
  check.Is("d_key", d_key, dtype, {shape.batch, shape.key_length(), shape.kv_heads, shape.head_dim});
  check.Is("d_value", d_value, dtype, {shape.batch, shape.key_length(), shape.kv_heads, shape.head_dim});
  void* workspace = Workspace(buffers, 3, workspace_bytes, shape, &check);
  if (!check.ok()) return ffi::Unexpected(check.error());
  return BackwardParams{shape,
                        attributes.scale,
                        PairsOf(in),
                        in.query.untyped_data(),
                        in.key.untyped_data(),
                        in.value.untyped_data(),
                        lse.untyped_data(),
                        d_out.untyped_data(),
                        delta.untyped_data(),
                        d_query.untyped_data(),
                        d_key.untyped_data(),
                        d_value.untyped_data(),
                        workspace};
}

// Completes a binding of contexts: then come the attributes and all buffers.
template <typename Binding>
auto BindCall(Binding&& contexts) {
  return std::move(contexts)
      .template Attr<double>("scale")
      .template Attr<int64_t>("num_prefix_tiles")
      .template Attr<int64_t>("num_dense_rows")
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace vsa
