// Forward on CPUs: out and LSE of up to 64 queries of one tile, over all their keys.
//
// Queries are stationary and lie transposed, [h][query], so that vectors run along queries: keys and values are
// read as they lie, maxima and sums of the softmax need no shuffles, and any head dim and tile size will do.
//
//   task        one block of queries of (sample, head, query tile)
//   step        up to 64 kept keys, of as many tiles as that takes; then for every panel of queries:
//                 logits[key][query] = key . query          (Multiply over h; Scale by scale * log2 e)
//                 online softmax, base 2, down the columns
//                 sums[h][query] += value^T . weights       (Multiply over keys)
//
// Scratch is per thread: 2 blocks of streamed rows, 2 of stationary ones, one panel of logits; 113 KB for float and
// H = 128, of which the panel in work (72 KB) lives in the second level cache.
// Bound: fused multiply-adds.
#include "xla_ffi/cpu/kernels.h"
#include "xla_ffi/cpu/product.h"
#include "xla_ffi/cpu/tokens.h"

namespace vsa::cpu::VSA_ISA {
namespace {

template <typename A>
struct Scratch {
  A *key, *value;    // [kBlock][H]
  A *query, *sums;   // panels [H][lane]
  A* weights;        // [kBlock][lane]
  A *top, *total;    // [kBlock], of each query

  static int64_t Size(int64_t head_dim) { return 4 * kBlock * head_dim + kBlock * kPanelLanes<A> + 2 * kBlock; }

  Scratch(void* memory, int64_t head_dim) {
    key = static_cast<A*>(memory);
    value = key + kBlock * head_dim;
    query = value + kBlock * head_dim;
    sums = query + kBlock * head_dim;
    weights = sums + kBlock * head_dim;
    top = weights + kBlock * kPanelLanes<A>;
    total = top + kBlock;
  }
};

// Logits -> weights, in place, for one panel and `count` keys; the earlier sums are rescaled to the new maxima.
template <typename A>
inline void Softmax(int64_t count, int64_t head_dim, A* weights, A* sums, A* top, A* total) {
  constexpr int64_t kLanes = kPanelLanes<A>, kHalf = kVectorLanes<A>;
  for (int64_t lane = 0; lane < kLanes; lane += kHalf) {
    const Vector<A> old_top = Load(top + lane);
    Vector<A> new_top = old_top;
    for (int64_t i = 0; i < count; ++i) new_top = Max<A>(Load(weights + i * kLanes + lane), new_top);
    // As long as all logits are -inf, any base will do: the weights are 0.
    const Vector<A> base = new_top == -kInfinity<A> ? Vector<A>{} : new_top;
    const Vector<A> rescale = Exp2<A>(old_top - base);
    Vector<A> sum = Load(total + lane) * rescale;
    for (int64_t i = 0; i < count; ++i) {
      A* weight = weights + i * kLanes + lane;
      const Vector<A> power = Exp2<A>(Load(weight) - base);
      Store(weight, power);
      sum += power;
    }
    Store(top + lane, new_top);
    Store(total + lane, sum);
    for (int64_t h = 0; h < head_dim; ++h) Store(sums + h * kLanes + lane, Load(sums + h * kLanes + lane) * rescale);
  }
}

template <typename T>
void Block(const void* context, int64_t index, void* memory) {
  using A = Accumulator<T>;
  constexpr int64_t kLanes = kPanelLanes<A>;
  const ForwardParams& params = *static_cast<const ForwardParams*>(context);
  const Shape& shape = params.shape;
  const int64_t head_dim = shape.head_dim, tile_size = shape.tile_size;
  const int64_t blocks = DivideUp(tile_size, kBlock);
  const int64_t block = index % blocks, tile = index / blocks % shape.query_tiles;
  const int64_t head = index / blocks / shape.query_tiles % shape.heads;
  const int64_t batch = index / blocks / shape.query_tiles / shape.heads;
  const int64_t first = tile * tile_size + block * kBlock, count = Least(kBlock, tile_size - block * kBlock);
  const int64_t size = Clip(params.pairs.query_sizes[batch * shape.query_tiles + tile], 0, tile_size);

  const auto query = Rows<const T>::Of(params.query, batch, shape.query_length(), head, shape.heads, head_dim);
  const auto out = Rows<T>::Of(params.out, batch, shape.query_length(), head, shape.heads, head_dim);
  const int64_t kv_head = head / shape.groups();
  const auto key = Rows<const T>::Of(params.key, batch, shape.key_length(), kv_head, shape.kv_heads, head_dim);
  const auto value = Rows<const T>::Of(params.value, batch, shape.key_length(), kv_head, shape.kv_heads, head_dim);
  A* lse = static_cast<A*>(params.lse) + (batch * shape.heads + head) * shape.query_length() + first;

  bool valid[kBlock];
  for (int64_t i = 0; i < count; ++i) valid[i] = block * kBlock + i < size;
  TokenWalk walk(KeysOf(shape, params.pairs, batch, head, tile), params.pairs.key_sizes + batch * shape.key_tiles,
                 tile_size);
  const Scratch<A> scratch(memory, head_dim);
  int64_t tokens[kBlock];
  int64_t keys = block * kBlock < size ? walk.Next(tokens) : 0;
  if (keys == 0) {
    for (int64_t i = 0; i < count; ++i) {
      valid[i] = false;
      lse[i] = -kInfinity<A>;
    }
    return Unpack(scratch.sums, scratch.total, valid, first, count, out);
  }

  const int64_t panels = DivideUp(count, kLanes);
  Pack(query, first, count, valid, A{1}, scratch.query);
  for (int64_t i = 0; i < panels * kLanes * head_dim; ++i) scratch.sums[i] = 0;
  for (int64_t i = 0; i < panels * kLanes; ++i) {
    scratch.top[i] = -kInfinity<A>;
    scratch.total[i] = 0;
  }
  for (; keys > 0; keys = walk.Next(tokens)) {
    Gather(key, tokens, keys, scratch.key);
    Gather(value, tokens, keys, scratch.value);
    for (int64_t panel = 0; panel < panels; ++panel) {
      A* sums = scratch.sums + panel * head_dim * kLanes;
      Multiply<false>(keys, head_dim, scratch.key, head_dim, 1, scratch.query + panel * head_dim * kLanes,
                      scratch.weights);
      Scale(keys * kLanes, static_cast<A>(params.scale * kLog2E), scratch.weights);
      Softmax(keys, head_dim, scratch.weights, sums, scratch.top + panel * kLanes, scratch.total + panel * kLanes);
      Multiply<true>(head_dim, keys, scratch.value, 1, head_dim, scratch.weights, sums);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const A top = scratch.top[i], total = scratch.total[i];
    // Keys, and every logit -inf: 0 / 0, as in dense attention.
    lse[i] = !valid[i] ? -kInfinity<A> : top == -kInfinity<A> ? A(__builtin_nan("")) : top + Log2(total);
    scratch.total[i] = 1 / total;
  }
  Unpack(scratch.sums, scratch.total, valid, first, count, out);
}

template <typename T>
bool Run(const ForwardParams& params, const Pool& pool) {
  const Shape& shape = params.shape;
  const int64_t tasks = shape.batch * shape.heads * shape.query_tiles * DivideUp(shape.tile_size, kBlock);
  const size_t bytes = sizeof(Accumulator<T>) * Scratch<Accumulator<T>>::Size(shape.head_dim);
  return ParallelFor(pool, tasks, bytes, Block<T>, &params);
}

}  // namespace

bool Forward(const ForwardParams& params, const Pool& pool) {
  VSA_FOR_DTYPE(params.shape.dtype, Run, params, pool);
}

}  // namespace vsa::cpu::VSA_ISA
