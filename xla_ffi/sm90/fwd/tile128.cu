// Forward for tiles of 128 and 256 tokens: 128 query rows of one tile share one list.
//
// CTA: 3 warpgroups, persistent, one per SM.
//   warpgroup 0  producer: warp 0 takes tickets, walks lists and issues every TMA load; 24 registers
//   warpgroup 1  consumer of rows 0..63   240 registers: S 64, O 64, P 32
//   warpgroup 2  consumer of rows 64..127
//
// A step is 128 keys. A consumer has the product of the next step and the P V of this one in flight while it
// computes exponentials, also across the end of an item (128 query rows of one head):
//
//   producer             consumer 1                          consumer 2
//   K(g+1) -> slot       S(g+1) = Q K(g+1), O += P(g) V(g)   softmax(g)
//   V(g)   -> slot       softmax(g+1)                        S(g+1) = Q K(g+1), O += P(g) V(g)
//   K(g+2) -> slot       S(g+2) ...                          softmax(g+1)
//
// Barriers        arrivals                 meaning (waiter)
//   full[slot]    producer + bytes         K or V of a step is there (consumers)
//   empty[slot]   one lane of 8 warps      both consumers have read it (producer)
//   q_full[2]     producer + bytes         Q of an item is there (consumers)
//   q_empty[2]    one thread a consumer    O, staged in Q's place, has been stored (producer)
//   turn[1..2]    named, 256 threads       consumers issue matrix products in turns
//   own[1..2]     named, 128 threads       one consumer's threads
//
// Shared memory at H = 128: two Q buffers of 32 KB, five K or V slots of 32 KB, 224 KB; then barriers and notes.
#include "forward.h"

#include "../launch.cuh"
#include "../lists.cuh"
#include "../ptx.cuh"
#include "../softmax.cuh"
#include "../tensor_map.h"
#include "../wgmma.cuh"

namespace vsa::sm90 {
namespace {

constexpr int kRows = 128;       // query rows of an item
constexpr int kKeys = 128;       // keys of a step
constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerRows = kRows / kConsumers;
constexpr int kQueryBuffers = 2;

struct Arguments {
  Shape shape;
  Pairs pairs;
  float scale_log2;
  float* lse;
  int* ticket;  // 0 at launch
  int items;
};

// What the producer says of a step.
struct Step {
  int keys;    // valid rows of K and V; 0: the item has no keys, and the slots hold nothing
  bool first;  // of its item
  bool last;
  bool end;  // no step: the work is over
};

struct Item {
  int batch, head, token;  // token: of its first row, within the batch
  int valid;               // rows that count; the rest give 0
};

template <int kHeadDim>
struct Shared {
  static constexpr int kSlots = kHeadDim == 128 ? 5 : 8;
  static constexpr int kColumnBlocks = kHeadDim / kSwizzleColumns;
  static constexpr int kQueryBlockBytes = kConsumerRows * 128;
  static constexpr int kKeyBlockBytes = kKeys * 128;
  // [buffer][consumer][column block][row of 128 bytes]
  uint8_t query[kQueryBuffers][kConsumers][kColumnBlocks][kQueryBlockBytes];
  uint8_t slots[kSlots][kColumnBlocks][kKeyBlockBytes];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t q_full[kQueryBuffers], q_empty[kQueryBuffers];
  Step steps[kSlots];  // of the slots that hold K
  Item items[kQueryBuffers];
};

// A place in a ring, and how often the ring was gone round.
template <int kCount>
struct Cursor {
  int at = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++at == kCount) {
      at = 0;
      parity ^= 1;
    }
  }
};

template <class T, int kHeadDim>
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
      smem_.steps[slot_.at] = {0, false, false, true};
      mbarrier_arrive(shared_address(&smem_.full[slot_.at]));
    }
    slot_.advance();
    if (previous_.tile >= 0) load_value();
  }

 private:
  struct Keys {
    int tile;   // -1: none yet
    int half;   // which 128 rows of the tile
    int count;  // valid rows; 0: nothing to load
    int batch, head;
  };

  // The steps of one item. A step waits in `waiting` until it is known whether another follows.
  __device__ void item(int ticket) {
    const Shape& shape = args_.shape;
    const int halves = static_cast<int>(shape.tile_size) / kRows;
    const int blocks = static_cast<int>(shape.query_tiles) * halves;
    const int block = ticket % blocks;
    const int batch_head = ticket / blocks;
    const int heads = static_cast<int>(shape.heads);
    const int batch = batch_head / heads, head = batch_head % heads;
    const int tile = block / halves;
    const int size = args_.pairs.query_sizes[batch * shape.query_tiles + tile];
    const int valid = min(max(size - block % halves * kRows, 0), kRows);
    load_query({batch, head, block * kRows, valid});

    const int kv_head = head / static_cast<int>(shape.groups());
    Keys waiting{-1, 0, 0, batch, kv_head};
    bool first = true;
    auto visit = [&](int tile, int keys) {
      for (int half = 0; half < halves && half * kKeys < keys; ++half) {
        if (waiting.tile >= 0) {
          step(waiting, first, false);
          first = false;
        }
        waiting = {tile, half, min(keys - half * kKeys, kKeys), batch, kv_head};
      }
    };
    if (valid > 0) for_each_key_tile(shape, args_.pairs, batch, head, tile, visit);
    step({max(waiting.tile, 0), waiting.half, waiting.count, batch, kv_head}, first, true);
  }

  __device__ void load_query(const Item& item) {
    const int buffer = buffer_.at;
    mbarrier_wait(shared_address(&smem_.q_empty[buffer]), buffer_.parity ^ 1);
    if (lane_ == 0) {
      const uint32_t full = shared_address(&smem_.q_full[buffer]);
      smem_.items[buffer] = item;
      mbarrier_arrive_expect_tx(full, sizeof(smem_.query[buffer]));
      const int token = item.batch * static_cast<int>(args_.shape.query_length()) + item.token;
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        for (int block = 0; block < Smem::kColumnBlocks; ++block) {
          tma_load(shared_address(smem_.query[buffer][consumer][block]), query_, full,
                   block * kSwizzleColumns, item.head, token + consumer * kConsumerRows);
        }
      }
    }
    buffer_.advance();
  }

  // K of this step, then V of the step before: the order in which consumers use them.
  __device__ void step(const Keys& keys, bool first, bool last) {
    acquire();
    if (lane_ == 0) smem_.steps[slot_.at] = {keys.count, first, last, false};
    load(key_, keys);
    if (previous_.tile >= 0) load_value();
    previous_ = keys;
  }

  __device__ void load_value() {
    acquire();
    load(value_, previous_);
  }

  __device__ void acquire() {
    mbarrier_wait(shared_address(&smem_.empty[slot_.at]), slot_.parity ^ 1);
  }

  __device__ void load(const CUtensorMap* map, const Keys& keys) {
    if (lane_ == 0) {
      const uint32_t full = shared_address(&smem_.full[slot_.at]);
      if (keys.count == 0) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect_tx(full, sizeof(smem_.slots[0]));
        const int token = keys.batch * static_cast<int>(args_.shape.key_length()) +
                          keys.tile * static_cast<int>(args_.shape.tile_size) + keys.half * kKeys;
        for (int block = 0; block < Smem::kColumnBlocks; ++block) {
          tma_load(shared_address(smem_.slots[slot_.at][block]), map, full, block * kSwizzleColumns,
                   keys.head, token);
        }
      }
    }
    slot_.advance();
  }

  Smem& smem_;
  const Arguments& args_;
  const CUtensorMap *query_, *key_, *value_;
  const int lane_ = threadIdx.x % 32;
  Cursor<Smem::kSlots> slot_;
  Cursor<kQueryBuffers> buffer_;
  Keys previous_{-1, 0, 0, 0, 0};
};

template <class T, int kHeadDim>
class Consumer {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Consumer(Smem& smem, const Arguments& args, const CUtensorMap* out, int index)
      : smem_(smem), args_(args), out_map_(out), index_(index) {}

  __device__ void run() {
    if (index_ == 1) named_barrier_arrive(kTurn, kTurnThreads);  // consumer 0 begins
    Step step = wait_step();
    if (step.end) return;
    mbarrier_wait(shared_address(&smem_.q_full[0]), 0);
    take_turn();
    wgmma_fence();
    multiply_query_key(slot_.at, 0);
    give_turn();
    wgmma_wait<0>();
    pin(logits_);
    release(slot_.at);
    slot_.advance();
    rows_.reset();
    rows_.update(logits_, step.keys, args_.scale_log2);
    pack_weights();

    while (true) {  // weights_ are those of `step`; next in the ring: K of the next step, V of this one
      free_query();
      const Step next = wait_step();
      const int key_slot = slot_.at;
      slot_.advance();
      wait_value(step.keys);
      if (next.end) break;
      Cursor<kQueryBuffers> next_buffer = buffer_;
      if (next.first) {
        next_buffer.advance();
        mbarrier_wait(shared_address(&smem_.q_full[next_buffer.at]), next_buffer.parity);
      }

      take_turn();
      pin(logits_);
      pin(out_);
      wgmma_fence();
      multiply_query_key(key_slot, next_buffer.at);
      multiply_weights_value(slot_.at, step.first);
      give_turn();
      wgmma_wait<1>();
      pin(logits_);
      release(key_slot);
      if (step.last) {
        wgmma_wait<0>();
        pin(out_);
        release(slot_.at);
        store(step.keys > 0);
        rows_.reset();
        rows_.update(logits_, next.keys, args_.scale_log2);
      } else {
        rows_.update(logits_, next.keys, args_.scale_log2);
        wgmma_wait<0>();
        pin(out_);
        release(slot_.at);
        rows_.rescale(out_);
      }
      pack_weights();
      slot_.advance();
      buffer_ = next_buffer;
      step = next;
    }

    take_turn();
    pin(out_);
    wgmma_fence();
    multiply_weights_value(slot_.at, step.first);
    if (index_ == 0) give_turn();
    wgmma_wait<0>();
    pin(out_);
    store(step.keys > 0);
    if (leads()) tma_store_wait();
  }

 private:
  static constexpr int kTurn = 1, kOwn = 3;  // named barriers, one a consumer each
  static constexpr int kTurnThreads = kConsumers * kWarpgroup;

  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

  __device__ void take_turn() { named_barrier_sync(kTurn + index_, kTurnThreads); }
  __device__ void give_turn() { named_barrier_arrive(kTurn + 1 - index_, kTurnThreads); }

  // The step whose K is at slot_.
  __device__ Step wait_step() {
    mbarrier_wait(shared_address(&smem_.full[slot_.at]), slot_.parity);
    return smem_.steps[slot_.at];
  }

  // V is at slot_; rows past `keys` become 0, since 0 * NaN is NaN. Both consumers write the zeros.
  __device__ void wait_value(int keys) {
    mbarrier_wait(shared_address(&smem_.full[slot_.at]), slot_.parity);
    if (keys == kKeys) return;
    const int thread = threadIdx.x % kWarpgroup;
    for (int block = 0; block < Smem::kColumnBlocks; ++block) {
      for (int row = keys + thread / 8; row < kKeys; row += kWarpgroup / 8) {
        *reinterpret_cast<int4*>(&smem_.slots[slot_.at][block][row * 128 + thread % 8 * 16]) = int4{};
      }
    }
    fence_proxy_async();
    named_barrier_sync(kOwn + index_, kWarpgroup);
  }

  __device__ void release(int slot) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&smem_.empty[slot]));
  }

  __device__ void multiply_query_key(int slot, int buffer) {
    const uint32_t query = shared_address(smem_.query[buffer][index_]);
    const uint32_t key = shared_address(smem_.slots[slot]);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      wgmma<T, Major::kK, Major::kK>(logits_, k_major(query, k, Smem::kQueryBlockBytes),
                                     k_major(key, k, Smem::kKeyBlockBytes), k > 0);
    }
    wgmma_commit();
  }

  __device__ void multiply_weights_value(int slot, bool first) {
    const uint32_t value = shared_address(smem_.slots[slot]);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      wgmma<T, Major::kMN>(out_, weights_ + 4 * k, mn_major(value, k, Smem::kKeyBlockBytes),
                           k > 0 || !first);
    }
    wgmma_commit();
  }

  __device__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights_[i] = pack<T>(logits_[2 * i], logits_[2 * i + 1]);
  }

  // out_ of the item in buffer_, normalised, staged where its Q was, then stored by TMA; and its LSE.
  __device__ void store(bool any_keys) {
    const Item item = smem_.items[buffer_.at];
    const int first_row = index_ * kConsumerRows;
    uint8_t* stage = smem_.query[buffer_.at][index_][0];
    const Shape& shape = args_.shape;
    float* lse = args_.lse + (item.batch * shape.heads + item.head) * shape.query_length() + item.token + first_row;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = accumulator_row(2 * pair);
      const bool valid = first_row + row < item.valid;
      float norm, row_lse;
      rows_.finish(pair, any_keys, args_.scale_log2, &norm, &row_lse);
      if (threadIdx.x % 4 == 0) lse[row] = valid ? row_lse : -INFINITY;
#pragma unroll
      for (int i = 2 * pair; i < kHeadDim / 2; i += 4) {
        const int column = accumulator_column(i);
        const uint32_t packed = valid ? pack<T>(out_[i] * norm, out_[i + 1] * norm) : 0;
        uint8_t* block = stage + column / kSwizzleColumns * Smem::kQueryBlockBytes;
        const int byte = column % kSwizzleColumns * 2 ^ row % 8 * 16;
        *reinterpret_cast<uint32_t*>(block + row * 128 + byte) = packed;
      }
    }
    fence_proxy_async();
    named_barrier_sync(kOwn + index_, kWarpgroup);
    if (leads()) {
      const int token = item.batch * static_cast<int>(shape.query_length()) + item.token + first_row;
      for (int block = 0; block < Smem::kColumnBlocks; ++block) {
        tma_store(out_map_, shared_address(stage + block * Smem::kQueryBlockBytes), block * kSwizzleColumns, item.head, token);
      }
      tma_store_commit();
    }
    stored_ = buffer_.at;
  }

  // Gives the buffer of a stored item back, a step later: by then the store has read it.
  __device__ void free_query() {
    if (stored_ >= 0 && leads()) {
      tma_store_wait_read();
      mbarrier_arrive(shared_address(&smem_.q_empty[stored_]));
    }
    stored_ = -1;
  }

  Smem& smem_;
  const Arguments& args_;
  const CUtensorMap* out_map_;
  const int index_;
  Cursor<Smem::kSlots> slot_;
  Cursor<kQueryBuffers> buffer_;
  int stored_ = -1;
  RowStatistics rows_;
  float logits_[kKeys / 2];
  float out_[kHeadDim / 2];
  uint32_t weights_[kKeys / 4];
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap query,
            const __grid_constant__ CUtensorMap key, const __grid_constant__ CUtensorMap value,
            const __grid_constant__ CUtensorMap out) {
  using Smem = Shared<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  Smem& smem = *reinterpret_cast<Smem*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Smem::kSlots; ++i) {
      mbarrier_init(shared_address(&smem.full[i]), 1);
      mbarrier_init(shared_address(&smem.empty[i]), kConsumers * kWarpgroup / 32);
    }
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(shared_address(&smem.q_full[i]), 1);
      mbarrier_init(shared_address(&smem.q_empty[i]), kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    setmaxnreg_dec<24>();
    if (threadIdx.x < 32) Producer<T, kHeadDim>(smem, args, &query, &key, &value).run();
  } else {
    setmaxnreg_inc<240>();
    Consumer<T, kHeadDim>(smem, args, &out, warpgroup - 1).run();
  }
}

template <class T, int kHeadDim>
std::string Launch(const ForwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  CUtensorMap query, key, value, out;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t length, int64_t heads, int box) {
    return EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, kHeadDim, box);
  };
  std::string error = encode(&query, params.query, shape.query_length(), shape.heads, kConsumerRows);
  if (error.empty()) error = encode(&out, params.out, shape.query_length(), shape.heads, kConsumerRows);
  if (error.empty()) error = encode(&key, params.key, shape.key_length(), shape.kv_heads, kKeys);
  if (error.empty()) error = encode(&value, params.value, shape.key_length(), shape.kv_heads, kKeys);
  if (!error.empty()) return error;
  const Arguments args{shape,
                       params.pairs,
                       static_cast<float>(params.scale * kLog2E),
                       static_cast<float*>(params.lse),
                       static_cast<int*>(params.workspace),
                       static_cast<int>(shape.batch * shape.heads * (shape.query_length() / kRows))};
  return LaunchPersistent(forward<T, kHeadDim>, kThreads, sizeof(Shared<kHeadDim>), args.items, args.ticket, stream,
                          args, query, key, value, out);
}

}  // namespace

std::string Forward128(const ForwardParams& params, cudaStream_t stream) {
  const bool wide = params.shape.head_dim == 128;
  if (params.shape.dtype == DType::kFloat16) {
    return wide ? Launch<__half, 128>(params, stream) : Launch<__half, 64>(params, stream);
  }
  return wide ? Launch<__nv_bfloat16, 128>(params, stream) : Launch<__nv_bfloat16, 64>(params, stream);
}

}  // namespace vsa::sm90
