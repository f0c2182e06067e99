// Backward on CPUs: d_query with queries stationary, d_key and d_value with keys stationary.
//
// With S the logits, P = 2^(S scale log2 e - lse) and dS = P (dO V^T - delta):
//   d_query = scale dS K,  d_key = scale dS^T Q,  d_value = P^T dO.
// Both parts make P and dS anew (seven products instead of five), so that every sum belongs to one task and has one
// order, and no task waits for another.  Layout and step are those of forward.cc; with keys stationary the roles are
// exchanged: keys lie transposed, [h][key], and rows of queries stream.
//
//   lists       a task per (sample, head): for every key tile the query tiles that list it, ascending
//   d_query     a task per block of 64 queries of (sample, head, query tile)
//   d_key/value a task per block of 64 keys of (sample, kv head, key tile); heads of the group one after the other
//
// Queries whose lse is -inf have no keys, and their d_out may hold anything: they are left out, never multiplied.
#include "xla_ffi/cpu/kernels.h"
#include "xla_ffi/cpu/product.h"
#include "xla_ffi/cpu/tokens.h"

namespace vsa::cpu::VSA_ISA {
namespace {

// The listed pairs by key tile.  Prefix columns and dense rows are not among them.
struct TransposedLists {
  int64_t* ends;  // [B, N, Jk]: the query tiles of key tile j are rows[ends[j - 1]] up to rows[ends[j]]
  int32_t* rows;  // [B, N, R * W]

  static size_t Bytes(const Shape& shape) {
    return shape.batch * shape.heads *
           (shape.key_tiles * sizeof(int64_t) + shape.rows() * shape.width * sizeof(int32_t));
  }

  TransposedLists(const Shape& shape, void* memory) {
    ends = static_cast<int64_t*>(memory);
    rows = reinterpret_cast<int32_t*>(ends + shape.batch * shape.heads * shape.key_tiles);
  }

  // The query tiles that keep a key tile.
  TileList QueriesOf(const Shape& shape, int64_t batch, int64_t head, int64_t key_tile) const {
    if (key_tile < shape.num_prefix_tiles) return {shape.query_tiles};
    const int64_t lists = batch * shape.heads + head;
    const int64_t* end = ends + lists * shape.key_tiles + key_tile;
    const int64_t start = key_tile == 0 ? 0 : end[-1];
    return {shape.num_dense_rows, rows + lists * shape.rows() * shape.width + start, *end - start,
            shape.num_dense_rows, shape.query_tiles};
  }
};

struct Call {
  const BackwardParams& params;
  TransposedLists lists;
};

// The lists of one (sample, head).
void Transpose(const void* context, int64_t index, void*) {
  const Call& call = *static_cast<const Call*>(context);
  const Shape& shape = call.params.shape;
  int64_t* ends = call.lists.ends + index * shape.key_tiles;
  int32_t* rows = call.lists.rows + index * shape.rows() * shape.width;
  const auto for_each_pair = [&](auto function) {
    for (int64_t tile = shape.num_dense_rows; tile < shape.query_tiles; ++tile) {
      const TileList list =
          KeysOf(shape, call.params.pairs, index / shape.heads, index % shape.heads, tile);
      for (int64_t i = 0; i < list.count; ++i) {
        const int64_t key_tile = list.ids[i];
        if (key_tile >= list.low && key_tile < list.high) function(key_tile, tile);
      }
    }
  };
  for (int64_t j = 0; j < shape.key_tiles; ++j) ends[j] = 0;
  for_each_pair([&](int64_t key_tile, int64_t) { ++ends[key_tile]; });
  int64_t start = 0;
  for (int64_t j = 0; j < shape.key_tiles; ++j) {
    const int64_t count = ends[j];
    ends[j] = start;
    start += count;
  }
  for_each_pair([&](int64_t key_tile, int64_t tile) { rows[ends[key_tile]++] = static_cast<int32_t>(tile); });
}

// Where the arrays of one task lie.
template <typename A>
struct Scratch {
  A *streamed[2];                // [kBlock][H]: key and value, or query and d_out
  A *stationary[2];              // panels [H][lane]: query and d_out, or key and value
  A *sums[2];                    // panels [H][lane]: d_query, or d_key and d_value
  A *weights, *d_weights;        // [kBlock][lane]
  A *lse, *delta;                // [kBlock]
  A *factors;                    // [kBlock]

  static int64_t Size(int64_t head_dim) {
    return 6 * kBlock * head_dim + 2 * kBlock * kPanelLanes<A> + 3 * kBlock;
  }

  Scratch(void* memory, int64_t head_dim) {
    A* next = static_cast<A*>(memory);
    const auto take = [&](int64_t size) {
      A* start = next;
      next += size;
      return start;
    };
    for (auto* pair : {&streamed, &stationary, &sums}) {
      for (A*& array : *pair) array = take(kBlock * head_dim);
    }
    weights = take(kBlock * kPanelLanes<A>);
    d_weights = take(kBlock * kPanelLanes<A>);
    lse = take(kBlock);
    delta = take(kBlock);
    factors = take(kBlock);
  }

  void Clear(A* panels, int64_t count, int64_t head_dim) const {
    for (int64_t i = 0; i < DivideUp(count, kPanelLanes<A>) * kPanelLanes<A> * head_dim; ++i) panels[i] = 0;
  }

  // The logits, times `scale`, in `weights`, and d_out . value in `d_weights`: streamed rows by the panel at `offset`.
  void MultiplyStreamed(int64_t rows, int64_t head_dim, int64_t offset, A scale) const {
    Multiply<false>(rows, head_dim, streamed[0], head_dim, 1, stationary[0] + offset, weights);
    Scale(rows * kPanelLanes<A>, scale, weights);
    Multiply<false>(rows, head_dim, streamed[1], head_dim, 1, stationary[1] + offset, d_weights);
  }
};

// The arrays of one (sample, head), and of its kv head.
template <typename T>
struct Operands {
  using A = Accumulator<T>;
  Rows<const T> query, d_out, key, value;
  const A *lse, *delta;  // [Jq*M]

  Operands(const BackwardParams& params, int64_t batch, int64_t head) {
    const Shape& shape = params.shape;
    const int64_t kv_head = head / shape.groups(), row = (batch * shape.heads + head) * shape.query_length();
    query = Rows<const T>::Of(params.query, batch, shape.query_length(), head, shape.heads, shape.head_dim);
    d_out = Rows<const T>::Of(params.d_out, batch, shape.query_length(), head, shape.heads, shape.head_dim);
    key = Rows<const T>::Of(params.key, batch, shape.key_length(), kv_head, shape.kv_heads, shape.head_dim);
    value = Rows<const T>::Of(params.value, batch, shape.key_length(), kv_head, shape.kv_heads, shape.head_dim);
    lse = static_cast<const A*>(params.lse) + row;
    delta = static_cast<const A*>(params.delta) + row;
  }
};

template <typename T>
void QueryBlock(const void* context, int64_t index, void* memory) {
  using A = Accumulator<T>;
  constexpr int64_t kLanes = kPanelLanes<A>, kHalf = kVectorLanes<A>;
  const BackwardParams& params = static_cast<const Call*>(context)->params;
  const Shape& shape = params.shape;
  const int64_t head_dim = shape.head_dim, tile_size = shape.tile_size, blocks = DivideUp(tile_size, kBlock);
  const int64_t block = index % blocks, tile = index / blocks % shape.query_tiles;
  const int64_t head = index / blocks / shape.query_tiles % shape.heads;
  const int64_t batch = index / blocks / shape.query_tiles / shape.heads;
  const int64_t first = tile * tile_size + block * kBlock, count = Least(kBlock, tile_size - block * kBlock);
  const int64_t size = Clip(params.pairs.query_sizes[batch * shape.query_tiles + tile], 0, tile_size);
  const Operands<T> operands(params, batch, head);
  const auto d_query =
      Rows<T>::Of(params.d_query, batch, shape.query_length(), head, shape.heads, head_dim);
  const Scratch<A> scratch(memory, head_dim);
  const A scale = static_cast<A>(params.scale * kLog2E);

  bool has_keys[kBlock], any = false;
  for (int64_t i = 0; i < kBlock; ++i) {
    has_keys[i] = i < count && block * kBlock + i < size && operands.lse[first + i] != -kInfinity<A>;
    any |= has_keys[i];
    scratch.lse[i] = has_keys[i] ? operands.lse[first + i] : kInfinity<A>;
    scratch.delta[i] = has_keys[i] ? operands.delta[first + i] : A{0};
    scratch.factors[i] = static_cast<A>(params.scale);
  }
  if (!any) return Unpack(scratch.sums[0], scratch.factors, has_keys, first, count, d_query);

  Pack(operands.query, first, count, has_keys, A{1}, scratch.stationary[0]);
  Pack(operands.d_out, first, count, has_keys, A{1}, scratch.stationary[1]);
  scratch.Clear(scratch.sums[0], count, head_dim);
  TokenWalk walk(KeysOf(shape, params.pairs, batch, head, tile), params.pairs.key_sizes + batch * shape.key_tiles,
                 tile_size);
  int64_t tokens[kBlock];
  while (const int64_t keys = walk.Next(tokens)) {
    Gather(operands.key, tokens, keys, scratch.streamed[0]);
    Gather(operands.value, tokens, keys, scratch.streamed[1]);
    for (int64_t panel = 0; panel < DivideUp(count, kLanes); ++panel) {
      const int64_t offset = panel * head_dim * kLanes;
      scratch.MultiplyStreamed(keys, head_dim, offset, scale);
      for (int64_t lane = 0; lane < kLanes; lane += kHalf) {
        const Vector<A> lse = Load(scratch.lse + panel * kLanes + lane);
        const Vector<A> delta = Load(scratch.delta + panel * kLanes + lane);
        for (int64_t at = lane; at < keys * kLanes; at += kLanes) {
          const Vector<A> weight = Exp2<A>(Load(scratch.weights + at) - lse);
          Store(scratch.weights + at, weight * (Load(scratch.d_weights + at) - delta));
        }
      }
      Multiply<true>(head_dim, keys, scratch.streamed[0], 1, head_dim, scratch.weights, scratch.sums[0] + offset);
    }
  }
  Unpack(scratch.sums[0], scratch.factors, has_keys, first, count, d_query);
}

template <typename T>
void KeyBlock(const void* context, int64_t index, void* memory) {
  using A = Accumulator<T>;
  constexpr int64_t kLanes = kPanelLanes<A>, kHalf = kVectorLanes<A>;
  const Call& call = *static_cast<const Call*>(context);
  const BackwardParams& params = call.params;
  const Shape& shape = params.shape;
  const int64_t head_dim = shape.head_dim, tile_size = shape.tile_size, blocks = DivideUp(tile_size, kBlock);
  const int64_t block = index % blocks, tile = index / blocks % shape.key_tiles;
  const int64_t kv_head = index / blocks / shape.key_tiles % shape.kv_heads;
  const int64_t batch = index / blocks / shape.key_tiles / shape.kv_heads;
  const int64_t first = tile * tile_size + block * kBlock, count = Least(kBlock, tile_size - block * kBlock);
  const int64_t size = Clip(params.pairs.key_sizes[batch * shape.key_tiles + tile], 0, tile_size);
  const auto d_key = Rows<T>::Of(params.d_key, batch, shape.key_length(), kv_head, shape.kv_heads, head_dim);
  const auto d_value = Rows<T>::Of(params.d_value, batch, shape.key_length(), kv_head, shape.kv_heads, head_dim);
  const Scratch<A> scratch(memory, head_dim);
  const A scale = static_cast<A>(params.scale * kLog2E);

  bool valid[kBlock];
  for (int64_t i = 0; i < count; ++i) valid[i] = block * kBlock + i < size;
  scratch.Clear(scratch.sums[0], count, head_dim);
  scratch.Clear(scratch.sums[1], count, head_dim);
  const Operands<T> of_group(params, batch, kv_head * shape.groups());
  Pack(of_group.key, first, count, valid, A{1}, scratch.stationary[0]);
  Pack(of_group.value, first, count, valid, A{1}, scratch.stationary[1]);
  for (int64_t group = 0; group < shape.groups() && block * kBlock < size; ++group) {
    const int64_t head = kv_head * shape.groups() + group;
    const Operands<T> operands(params, batch, head);
    TokenWalk walk(call.lists.QueriesOf(shape, batch, head, tile),
                   params.pairs.query_sizes + batch * shape.query_tiles, tile_size);
    int64_t tokens[kBlock];
    while (const int64_t found = walk.Next(tokens)) {
      int64_t queries = 0;
      for (int64_t i = 0; i < found; ++i) {
        if (operands.lse[tokens[i]] == -kInfinity<A>) continue;
        scratch.lse[queries] = operands.lse[tokens[i]];
        scratch.delta[queries] = operands.delta[tokens[i]];
        tokens[queries++] = tokens[i];
      }
      Gather(operands.query, tokens, queries, scratch.streamed[0]);
      Gather(operands.d_out, tokens, queries, scratch.streamed[1]);
      for (int64_t panel = 0; panel < DivideUp(count, kLanes); ++panel) {
        const int64_t offset = panel * head_dim * kLanes;
        scratch.MultiplyStreamed(queries, head_dim, offset, scale);
        for (int64_t at = 0; at < queries * kLanes; at += kHalf) {
          const int64_t row = at / kLanes;
          const Vector<A> weight = Exp2<A>(Load(scratch.weights + at) - scratch.lse[row]);
          Store(scratch.weights + at, weight);
          Store(scratch.d_weights + at, weight * (Load(scratch.d_weights + at) - scratch.delta[row]));
        }
        Multiply<true>(head_dim, queries, scratch.streamed[0], 1, head_dim, scratch.d_weights,
                       scratch.sums[0] + offset);
        Multiply<true>(head_dim, queries, scratch.streamed[1], 1, head_dim, scratch.weights,
                       scratch.sums[1] + offset);
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) scratch.factors[i] = static_cast<A>(params.scale);
  Unpack(scratch.sums[0], scratch.factors, valid, first, count, d_key);
  for (int64_t i = 0; i < count; ++i) scratch.factors[i] = 1;
  Unpack(scratch.sums[1], scratch.factors, valid, first, count, d_value);
}

template <typename T>
bool Run(const BackwardParams& params, const Pool& pool) {
  const Shape& shape = params.shape;
  const Memory memory(TransposedLists::Bytes(shape));
  if (memory.get() == nullptr) return false;
  const Call call{params, TransposedLists(shape, memory.get())};
  const int64_t blocks = DivideUp(shape.tile_size, kBlock);
  const size_t bytes = sizeof(Accumulator<T>) * Scratch<Accumulator<T>>::Size(shape.head_dim);
  return ParallelFor(pool, shape.batch * shape.heads, 0, Transpose, &call) &&
         ParallelFor(pool, shape.batch * shape.heads * shape.query_tiles * blocks, bytes, QueryBlock<T>, &call) &&
         ParallelFor(pool, shape.batch * shape.kv_heads * shape.key_tiles * blocks, bytes, KeyBlock<T>, &call);
}

}  // namespace

bool Backward(const BackwardParams& params, const Pool& pool) {
  VSA_FOR_DTYPE(params.shape.dtype, Run, params, pool);
}

}  // namespace vsa::cpu::VSA_ISA
