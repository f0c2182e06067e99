// Forward for tiles of 64 tokens: three neighbouring query tiles share the loads of the key tiles they have in common.
//
// CTA: 4 warpgroups, persistent, one per SM.
//   warpgroup 0     producer: warp 0 takes tickets, merges three lists and issues every TMA load; 32 registers
//   warpgroups 1-3  consumers, a query tile each; 160 registers: O 64, S 32, Q 32, P 16
//
// A step is a key tile of the union of the three lists; its mask says who keeps it. Consumers go through all steps; one
// whose bit is 0 gives the stage back at once. There is no overlap within a consumer: three hide each other's softmax,
// and since they skip independently, they take no turns.
//
//   producer            consumer 1 (mask 1)   consumer 2 (mask 1)   consumer 3 (mask 0)
//   K, V -> stage g     S = Q K               softmax               -
//   K, V -> stage g+1   softmax               O += P V              (step g+1) S = Q K
//   ...                 O += P V              (step g+1) -          softmax
//
// The merge takes the smallest of the three lists' next entries. On ascending lists that is the union; on others it still
// walks each list in its order, only with fewer loads shared.
//
// Barriers         arrivals                 meaning (waiter)
//   key_full[5]    producer + bytes         the step's note and K are there (consumers)
//   value_full[5]  producer + bytes         V is there (consumers that keep it)
//   empty[5]       one lane of 12 warps     nobody needs the stage (producer)
//   q_full[3]      producer + bytes         a consumer's Q is there (that consumer)
//   q_empty[3]     one lane of 4 warps      it has it in registers (producer)
//   own[1..3]      named, 128 threads       one consumer's threads
//
// Shared memory at H = 128: Q 3 x 16 KB, five stages of K and V of 32 KB, 208 KB; then barriers and notes.
#include "forward.h"

#include "../epilogue.cuh"
#include "../launch.cuh"
#include "../lists.cuh"
#include "../ptx.cuh"
#include "../ring.cuh"
#include "../softmax.cuh"
#include "../tensor_map.h"
#include "../wgmma.cuh"

namespace vsa::sm90 {
namespace {

constexpr int kTile = 64;
constexpr int kConsumers = 3;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kBlockBytes = kTile * 128;  // 64 columns of a tile

struct Arguments {
  Shape shape;
  Pairs pairs;
  float scale_log2;
  void* out;
  float* lse;
  int* ticket;  // 0 at launch
  int items;    // three query tiles of one head
};

// What the producer says of a step, in one word.
class Step {
 public:
  Step() = default;
  // keys: valid slots; mask: the consumers that keep the tile, none where no one keeps any; first, last: of its item.
  __device__ Step(int keys, int mask, bool first, bool last) : word_(keys | mask << 8 | first << 16 | last << 17) {}
  __device__ static Step End() {  // no step: the work is over
    Step step;
    step.word_ = 1 << 18;
    return step;
  }
  __device__ int keys() const { return word_ & 0xff; }
  __device__ bool kept_by(int consumer) const { return word_ >> (8 + consumer) & 1; }
  __device__ bool first() const { return word_ >> 16 & 1; }
  __device__ bool last() const { return word_ >> 17 & 1; }
  __device__ bool end() const { return word_ >> 18; }

 private:
  int word_;
};

// A consumer's part of an item.
struct Part {
  int batch, head, tile;  // tile: -1 past the last
  int valid;              // rows that count; the rest give 0
};

template <int kHeadDim>
struct Shared {
  static constexpr int kStages = kHeadDim == 128 ? 5 : 8;
  static constexpr int kColumnBlocks = kHeadDim / kSwizzleColumns;
  struct Stage {
    uint8_t key[kColumnBlocks][kBlockBytes], value[kColumnBlocks][kBlockBytes];  // rows of 128 bytes
  };
  uint8_t query[kConsumers][kColumnBlocks][kBlockBytes];
  Stage stages[kStages];
  uint64_t key_full[kStages], value_full[kStages], empty[kStages];
  uint64_t q_full[kConsumers], q_empty[kConsumers];
  Step steps[kStages];
  Part parts[kConsumers][2];  // this one and the next, in turns
};

template <int kHeadDim>
class Producer {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Producer(Smem& smem, const Arguments& args, const CUtensorMap* query, const CUtensorMap* key,
                      const CUtensorMap* value)
      : smem_(smem), args_(args), query_(query), key_(key), value_(value) {}

  __device__ void run() {
    for (int ticket = blockIdx.x; ticket < args_.items;) {
      int next = 0;
      if (lane_ == 0) next = gridDim.x + atomicAdd(args_.ticket, 1);
      item(ticket);
      ticket = __shfl_sync(kWholeWarp, next, 0);
    }
    acquire();
    if (lane_ == 0) {
      smem_.steps[stage_.at] = Step::End();
      mbarrier_arrive(shared_address(&smem_.key_full[stage_.at]));
    }
  }

 private:
  // Dense rows are grouped with dense rows alone: beside a listed row one would keep its warpgroup idle.
  __device__ void item(int ticket) {
    const Shape& shape = args_.shape;
    const int dense = static_cast<int>(shape.num_dense_rows), heads = static_cast<int>(shape.heads);
    const int dense_groups = (dense + kConsumers - 1) / kConsumers;
    const int groups = dense_groups + (static_cast<int>(shape.rows()) + kConsumers - 1) / kConsumers;
    const int group = ticket % groups, head = ticket / groups % heads, batch = ticket / groups / heads;
    const bool is_dense = group < dense_groups;
    const int first_tile = is_dense ? group * kConsumers : dense + (group - dense_groups) * kConsumers;
    const int limit = is_dense ? dense : static_cast<int>(shape.query_tiles);

    KeyTiles lists[kConsumers];
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      const int tile = first_tile + i;
      const int size = tile < limit ? args_.pairs.query_sizes[batch * shape.query_tiles + tile] : 0;
      load_query(i, {batch, head, tile < limit ? tile : -1, size});
      if (size > 0) lists[i] = KeyTiles(shape, args_.pairs, batch, head, tile);
    }
    ++items_;

    const int kv_head = head / static_cast<int>(shape.groups());
    const int keys_before = batch * static_cast<int>(shape.key_tiles);
    int tile = smallest(lists);
    if (tile == KeyTiles::kNone) step(0, 0, Step(0, 0, true, true));
    for (bool first = true; tile != KeyTiles::kNone; first = false) {
      int mask = 0, size = 0;
#pragma unroll
      for (int i = 0; i < kConsumers; ++i) {
        if (lists[i].tile() != tile) continue;
        mask |= 1 << i;
        size = lists[i].size();
        lists[i].next();
      }
      const int next = smallest(lists);
      step(kv_head, (keys_before + tile) * kTile, Step(size, mask, first, next == KeyTiles::kNone));
      tile = next;
    }
  }

  __device__ static int smallest(const KeyTiles (&lists)[kConsumers]) {
    return min(lists[0].tile(), min(lists[1].tile(), lists[2].tile()));
  }

  __device__ void load_query(int consumer, const Part& part) {
    mbarrier_wait(shared_address(&smem_.q_empty[consumer]), items_ & 1 ^ 1);
    if (lane_ != 0) return;
    const uint32_t full = shared_address(&smem_.q_full[consumer]);
    smem_.parts[consumer][items_ & 1] = part;
    if (part.tile < 0) return mbarrier_arrive(full);
    mbarrier_arrive_expect_tx(full, sizeof(smem_.query[consumer]));
    const int token = (part.batch * static_cast<int>(args_.shape.query_tiles) + part.tile) * kTile;
    for (int block = 0; block < Smem::kColumnBlocks; ++block) {
      tma_load(shared_address(smem_.query[consumer][block]), query_, full, block * kSwizzleColumns, part.head, token);
    }
  }

  __device__ void acquire() { mbarrier_wait(shared_address(&smem_.empty[stage_.at]), stage_.parity ^ 1); }

  __device__ void step(int head, int token, Step step) {
    acquire();
    if (lane_ == 0) {
      typename Smem::Stage& stage = smem_.stages[stage_.at];
      smem_.steps[stage_.at] = step;
      load(stage.key, key_, &smem_.key_full[stage_.at], head, token, step);
      load(stage.value, value_, &smem_.value_full[stage_.at], head, token, step);
    }
    stage_.advance();
  }

  __device__ void load(uint8_t (&to)[Smem::kColumnBlocks][kBlockBytes], const CUtensorMap* map, const uint64_t* barrier,
                       int head, int token, Step step) {
    const uint32_t full = shared_address(barrier);
    if (step.keys() == 0) return mbarrier_arrive(full);
    mbarrier_arrive_expect_tx(full, sizeof(to));
    for (int block = 0; block < Smem::kColumnBlocks; ++block) {
      tma_load(shared_address(to[block]), map, full, block * kSwizzleColumns, head, token);
    }
  }

  Smem& smem_;
  const Arguments& args_;
  const CUtensorMap *query_, *key_, *value_;
  const int lane_ = threadIdx.x % 32;
  Cursor<Smem::kStages> stage_;
  uint32_t items_ = 0;  // whose Q was asked for
};

template <class T, int kHeadDim>
class Consumer {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Consumer(Smem& smem, const Arguments& args, int index) : smem_(smem), args_(args), index_(index) {}

  __device__ void run() {
    bool any_keys = false;
    // Without this ptxas 13.0 lets `weights` overwrite query_: it is loaded under a condition, and read in a loop.
    for (uint32_t& word : query_) word = 0;
    for (;; stage_.advance()) {
      mbarrier_wait(shared_address(&smem_.key_full[stage_.at]), stage_.parity);
      const Step step = smem_.steps[stage_.at];
      if (step.end()) return;
      if (step.first()) {
        take_query();
        rows_.reset();
        any_keys = false;
      }
      if (step.kept_by(index_)) {
        attend(step.keys(), !any_keys);
        any_keys = true;
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&smem_.empty[stage_.at]));
      if (step.last()) store(any_keys);
    }
  }

 private:
  static constexpr int kOwn = 1;  // named barriers, one a consumer

  __device__ void take_query() {
    mbarrier_wait(shared_address(&smem_.q_full[index_]), items_ & 1);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) load_a<kBlockBytes>(query_ + 4 * k, smem_.query[index_], k);
    fence_proxy_async();  // an arrival alone does not wait for the loads, and TMA writes there next
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&smem_.q_empty[index_]));
  }

  // One key tile. first: out_ holds nothing yet.
  __device__ __forceinline__ void attend(int keys, bool first) {
    const auto& stage = smem_.stages[stage_.at];
    const KMajor<kBlockBytes> key(stage.key);
    float logits[kTile / 2];
    pin(logits);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      wgmma<T, Major::kK>(logits, query_ + 4 * k, key.step(k), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(logits);

    rows_.update(logits, keys, args_.scale_log2);
    uint32_t weights[kTile / 4];
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) weights[i] = pack<T>(logits[2 * i], logits[2 * i + 1]);
    if (!first) rows_.rescale(out_);

    mbarrier_wait(shared_address(&smem_.value_full[stage_.at]), stage_.parity);
    if (keys < kTile) clear_rows<Smem::kColumnBlocks, kTile>(smem_.stages[stage_.at].value[0], keys, kOwn + index_);
    const MNMajor<kBlockBytes> value(stage.value);
    pin(out_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      wgmma<T, Major::kMN>(out_, weights + 4 * k, value.step(k), k > 0 || !first);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(out_);
  }

  __device__ void store(bool any_keys) {
    const Part part = smem_.parts[index_][items_ & 1];
    ++items_;
    if (part.tile < 0) return;
    const Shape& shape = args_.shape;
    T* const out = static_cast<T*>(args_.out) + part.head * kHeadDim;
    float* const lse = args_.lse + (part.batch * shape.heads + part.head) * shape.query_length() + part.tile * kTile;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = accumulator_row(2 * pair);
      const bool valid = row < part.valid && any_keys;
      float norm, row_lse;
      rows_.finish(pair, any_keys, args_.scale_log2, &norm, &row_lse);
      if (threadIdx.x % 4 == 0) lse[row] = valid ? row_lse : -INFINITY;
      const int64_t token = part.batch * shape.query_length() + part.tile * kTile + row;
      store_row(out + token * shape.heads * kHeadDim, out_, pair, norm, valid);
    }
  }

  Smem& smem_;
  const Arguments& args_;
  const int index_;
  Cursor<Smem::kStages> stage_;
  uint32_t items_ = 0;  // done
  RowStatistics rows_;
  float out_[kHeadDim / 2];
  uint32_t query_[kHeadDim / 4];
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap query,
            const __grid_constant__ CUtensorMap key, const __grid_constant__ CUtensorMap value) {
  using Smem = Shared<kHeadDim>;
  static_assert(sizeof(Smem) <= 227 * 1024);
  extern __shared__ __align__(1024) uint8_t memory[];
  Smem& smem = *reinterpret_cast<Smem*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Smem::kStages; ++i) {
      mbarrier_init(shared_address(&smem.key_full[i]), 1);
      mbarrier_init(shared_address(&smem.value_full[i]), 1);
      mbarrier_init(shared_address(&smem.empty[i]), kConsumers * kWarpgroup / 32);
    }
    for (int i = 0; i < kConsumers; ++i) {
      mbarrier_init(shared_address(&smem.q_full[i]), 1);
      mbarrier_init(shared_address(&smem.q_empty[i]), kWarpgroup / 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    setmaxnreg_dec<32>();
    if (threadIdx.x < 32) Producer<kHeadDim>(smem, args, &query, &key, &value).run();
  } else {
    setmaxnreg_inc<160>();
    Consumer<T, kHeadDim>(smem, args, warpgroup - 1).run();
  }
}

template <class T, int kHeadDim>
std::string Launch(const ForwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  CUtensorMap query, key, value;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t length, int64_t heads) {
    return EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, kHeadDim, kTile);
  };
  std::string error = encode(&query, params.query, shape.query_length(), shape.heads);
  if (error.empty()) error = encode(&key, params.key, shape.key_length(), shape.kv_heads);
  if (error.empty()) error = encode(&value, params.value, shape.key_length(), shape.kv_heads);
  if (!error.empty()) return error;
  const auto groups = [](int64_t rows) { return (rows + kConsumers - 1) / kConsumers; };
  const int64_t items = shape.batch * shape.heads * (groups(shape.num_dense_rows) + groups(shape.rows()));
  const Arguments args{shape,
                       params.pairs,
                       static_cast<float>(params.scale * kLog2E),
                       params.out,
                       static_cast<float*>(params.lse),
                       static_cast<int*>(params.workspace),
                       static_cast<int>(items)};
  return LaunchPersistent(forward<T, kHeadDim>, 1, kThreads, sizeof(Shared<kHeadDim>), args.items, args.ticket, 1, stream,
                          args, query, key, value);
}

}  // namespace

std::string Forward64(const ForwardParams& params, cudaStream_t stream) {
  const bool wide = params.shape.head_dim == 128;
  if (params.shape.dtype == DType::kFloat16) {
    return wide ? Launch<__half, 128>(params, stream) : Launch<__half, 64>(params, stream);
  }
  return wide ? Launch<__nv_bfloat16, 128>(params, stream) : Launch<__nv_bfloat16, 64>(params, stream);
}

}  // namespace vsa::sm90
