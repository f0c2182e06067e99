#include "backward.h"

#include "../supported.h"
#include "parts.h"

namespace vsa::sm90 {
namespace {

// More scratch than this is not worth the time it saves.
constexpr int64_t kSpillCap = int64_t{4} << 30;

int64_t KeptBytes(const Shape& shape) {
  const int64_t bytes = SpillBytes(shape);
  return bytes <= kSpillCap ? bytes : 0;
}

// Where things lie in the workspace, in bytes.
struct Layout {
  int64_t counters, offsets, entries, chunk_counts, kept, end;

  explicit Layout(const Shape& shape) {
    const int64_t heads = shape.batch * shape.heads;
    const int64_t chunks = (shape.rows() + kChunkRows - 1) / kChunkRows;
    counters = take(SpillCounters(shape));
    offsets = take(heads * (shape.key_tiles + 1));
    entries = take(heads * shape.rows() * shape.width);
    chunk_counts = take(heads * chunks * shape.key_tiles);
    kept = take(KeptBytes(shape) / 4);
    end = at_;
  }

 private:
  int64_t take(int64_t ints) {
    const int64_t here = at_;
    at_ += (ints * 4 + 255) / 256 * 256;
    return here;
  }
  int64_t at_ = 0;
};

}  // namespace

int64_t BackwardWorkspace(const Shape& shape) { return Layout(shape).end; }

std::string Backward(const BackwardParams& params, cudaStream_t stream) {
  std::string error = WhyNot(params.shape);
  if (!error.empty()) return error;
  const Layout layout(params.shape);
  const auto ints = [&](int64_t at) { return reinterpret_cast<int32_t*>(static_cast<char*>(params.workspace) + at); };
  const Transposed transposed{ints(layout.offsets), ints(layout.entries)};
  error = Transpose(params.shape, params.pairs, transposed, ints(layout.chunk_counts), stream);
  if (error.empty() && KeptBytes(params.shape) > 0) {
    return AllGradients(params, transposed, ints(layout.kept), ints(layout.counters), stream);
  }
  if (error.empty()) error = KeyGradients(params, transposed, ints(layout.counters), stream);
  if (error.empty()) error = QueryGradients(params, ints(layout.counters) + 1, stream);
  return error;
}

}  // namespace vsa::sm90
