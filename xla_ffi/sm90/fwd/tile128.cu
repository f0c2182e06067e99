// Forward for tiles of 128 and 256 tokens: 128 query rows of one tile share one list.
//
// CTA: 3 warpgroups, persistent, one per SM.
//   warpgroup 0  producers, 40 registers: warp 0 takes tickets and walks lists, warp 1 issues every TMA load
//   warpgroup 1  consumer of rows 0..63   232 registers: S 64, O 64, P 32, Q 32
//   warpgroup 2  consumer of rows 64..127
//
// A step is 128 keys. A consumer has the product of the next step and the P V of this one in flight while it
// computes exponentials, also across the end of an item (128 query rows of one head), whose output it stores after the
// first weights of the next:
//
//   producer             consumer 1                          consumer 2
//   K(g+1) -> slot       S(g+1) = Q K(g+1), O += P(g) V(g)   softmax(g)
//   V(g)   -> slot       softmax(g+1)                        S(g+1) = Q K(g+1), O += P(g) V(g)
//   K(g+2) -> slot       S(g+2) ...                          softmax(g+1)
//
// Barriers          arrivals                 meaning (waiter)
//   full[slot]      loader + bytes           K or V of a step is there (consumers)
//   empty[slot]     one lane of 8 warps      both consumers have read it (loader); in a cluster, those of both CTAs
//   q_full          loader + bytes           Q of an item is there (consumers)
//   q_empty         one lane of 8 warps      its place is free: they have it in registers, and the output of the item
//                                            before, which went out through that place, has been read (loader)
//   jobs: full[8]   walker                   a step to load is there (loader)
//   jobs: empty[8]  one lane of the loader   has been read (walker)
//   mail_full[16]   walker + bytes           a ticket from the cluster's first CTA (the second's walker)
//   turn[1..2]      named, 256 threads       consumers issue matrix products in turns
//   own[1..2]       named, 128 threads       one consumer's threads
//
// Shared memory at H = 128: Q, then O 32 KB, six K or V slots of 32 KB, 224 KB; then barriers, steps, items and mails.
//
// Tiles of 256: a cluster of two CTAs takes a tile, 128 rows each; each loads half of every K and V for both.
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

constexpr int kRows = 128;       // query rows of an item
constexpr int kKeys = 128;       // keys of a step
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerRows = kRows / kConsumers;
constexpr int kWarpRows = kConsumerRows / 4;
constexpr int kJobs = 8, kMails = 16;

struct Arguments {
  Shape shape;
  Pairs pairs;
  float scale_log2;
  float* lse;
  int* ticket;  // 0 at launch
  int items;  // 128 rows for each CTA of a cluster
};

// What the producer says of a step, in one word.
class Step {
 public:
  Step() = default;
  // keys: valid rows of K and V; 0: the item has no keys, and the slots hold nothing. first, last: of its item.
  __device__ Step(int keys, bool first, bool last) : word_(keys | first << 16 | last << 17) {}
  __device__ static Step End() {  // no step: the work is over
    Step step;
    step.word_ = 1 << 18;
    return step;
  }
  // The same, known to be so in all lanes.
  __device__ Step uniform() const {
    Step step;
    step.word_ = sm90::uniform(word_);
    return step;
  }
  __device__ int keys() const { return word_ & 0xffff; }
  __device__ bool first() const { return word_ >> 16 & 1; }
  __device__ bool last() const { return word_ >> 17 & 1; }
  __device__ bool end() const { return word_ >> 18; }

 private:
  int word_;
};

struct Item {
  int batch, head, token;  // token: of its first row, within the batch
  int valid;               // rows that count; the rest give 0
};

// A step, for the loader.
struct Job {
  Item item;
  int token;  // of the first of 128 rows of K and V, over batches; -1: nothing to load
  Step step;
};

template <int kHeadDim>
struct Shared {
  static constexpr int kSlots = kHeadDim == 128 ? 6 : 12;
  static constexpr int kColumnBlocks = kHeadDim / kSwizzleColumns;
  static constexpr int kQueryBlockBytes = kConsumerRows * 128;
  static constexpr int kKeyBlockBytes = kKeys * 128;
  // [consumer][column block][row of 128 bytes]
  uint8_t query[kConsumers][kColumnBlocks][kQueryBlockBytes];
  uint8_t slots[kSlots][kColumnBlocks][kKeyBlockBytes];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t q_full, q_empty;
  Messages<Job, kJobs> jobs;
  uint64_t mail_full[kMails];
  int mails[kMails];  // tickets, from the cluster's first CTA
  Step steps[kSlots];  // of the slots that hold K
  Item items[4];       // the last ones whose Q was loaded, in turns
};

// Takes tickets and walks lists, some steps ahead: the loads that begin a list depend on each other.
template <int kHeadDim, int kCluster>
class Walker {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Walker(Smem& smem, const Arguments& args) : smem_(smem), args_(args) {}

  __device__ void run() {
    for (int ticket = blockIdx.x / kCluster; ticket < args_.items;) {
      int next = 0;
      if (lane_ == 0 && rank_ == 0) next = gridDim.x / kCluster + atomicAdd(args_.ticket, 1);
      item(ticket);
      ticket = uniform(next);
      if (kCluster > 1) ticket = share(ticket);
    }
    smem_.jobs.write(job_, {{}, 0, Step::End()});
  }

 private:
  // The first CTA's ticket, in every CTA. A mail is not overwritten before it is read: the loaders, who share the ring
  // of K and V, are less than a ring apart, and a walker is less than its jobs ahead of its loader.
  __device__ int share(int ticket) {
    static_assert(Smem::kSlots / 2 + kJobs + 2 <= kMails);
    const uint32_t mail = shared_address(&smem_.mails[mail_.at]);
    const uint32_t full = shared_address(&smem_.mail_full[mail_.at]);
    if (rank_ == 0) {
      if (lane_ == 0) {
        for (int rank = 1; rank < kCluster; ++rank) store_async(address_in(rank, mail), ticket, address_in(rank, full));
      }
    } else {
      if (lane_ == 0) mbarrier_arrive_expect_tx(full, sizeof(int));
      mbarrier_wait(full, mail_.parity);
      ticket = load_shared(mail);
    }
    mail_.advance();
    return ticket;
  }

  // The steps of one item: 128 rows of a tile for each CTA of the cluster.
  __device__ void item(int ticket) {
    const Shape& shape = args_.shape;
    const int halves = static_cast<int>(shape.tile_size) / kRows;
    const int blocks = static_cast<int>(shape.query_tiles) * halves;
    const int row_block = (ticket * kCluster + rank_) % blocks;
    const int batch_head = (ticket * kCluster + rank_) / blocks;
    const int heads = static_cast<int>(shape.heads);
    const int batch = batch_head / heads, head = batch_head % heads;
    const int tile = row_block / halves;
    const int size = args_.pairs.query_sizes[batch * shape.query_tiles + tile];
    const Item item{batch, head, row_block * kRows, min(max(size - row_block % halves * kRows, 0), kRows)};

    KeyTiles keys(shape, args_.pairs, batch, head, tile);
    if (size == 0) keys = KeyTiles();
    if (keys.tile() == KeyTiles::kNone) smem_.jobs.write(job_, {item, -1, Step(0, true, true)});
    for (bool first = true; keys.tile() != KeyTiles::kNone;) {
      int token = (batch * static_cast<int>(shape.key_tiles) + keys.tile()) * static_cast<int>(shape.tile_size);
      int left = keys.size();
      keys.next();
      for (; left > 0; left -= kKeys, token += kKeys) {
        const bool last = left <= kKeys && keys.tile() == KeyTiles::kNone;
        smem_.jobs.write(job_, {item, token, Step(min(left, kKeys), first, last)});
        first = false;
      }
    }
  }

  Smem& smem_;
  const Arguments& args_;
  const int lane_ = threadIdx.x % 32;
  const int rank_ = kCluster == 1 ? 0 : cluster_rank();
  Cursor<kJobs> job_;
  Cursor<kMails> mail_;
};

// Issues every load.
template <int kHeadDim, int kCluster>
class Loader {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Loader(Smem& smem, const Shape& shape, const CUtensorMap* query, const CUtensorMap* key,
                    const CUtensorMap* value)
      : smem_(smem), shape_(shape), query_(query), key_(key), value_(value) {}

  __device__ void run() {
    for (Cursor<kJobs> place;;) {
      const Job job = smem_.jobs.read(place);
      const Step step = job.step.uniform();
      // K of this step, then V of the step before: the order in which consumers use them.
      acquire();
      if (elect()) smem_.steps[slot_.at] = step;
      const Keys keys{uniform(job.item.head) / static_cast<int>(shape_.groups()), uniform(job.token)};
      if (step.end()) {
        if (elect()) mbarrier_arrive(shared_address(&smem_.full[slot_.at]));
        slot_.advance();
      } else {
        load(key_, keys);
      }
      if (previous_.head >= 0) {
        acquire();
        load(value_, previous_);
      }
      if (step.end()) return;
      previous_ = keys;
      // Not before: its place becomes free when the item two before is stored, for which K and V up to here are needed.
      if (step.first()) load_query(job.item);
    }
  }

 private:
  struct Keys {
    int head;   // -1: none yet
    int token;  // of the first of 128 rows, over batches; -1: nothing to load
  };

  __device__ void load_query(const Item& item) {
    mbarrier_wait(shared_address(&smem_.q_empty), (items_ & 1) ^ 1);
    if (elect()) {
      const uint32_t full = shared_address(&smem_.q_full);
      smem_.items[items_ % 4] = item;
      mbarrier_arrive_expect_tx(full, sizeof(smem_.query));
      const int token = item.batch * static_cast<int>(shape_.query_length()) + item.token;
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        tma_load(shared_address(smem_.query[consumer]), query_, full, item.head, token + consumer * kConsumerRows);
      }
    }
    ++items_;
  }

  __device__ void acquire() {
    mbarrier_wait(shared_address(&smem_.empty[slot_.at]), slot_.parity ^ 1);
  }

  // Each CTA loads its share of the rows, for all.
  __device__ void load(const CUtensorMap* map, const Keys& keys) {
    if (elect()) {
      const uint32_t full = shared_address(&smem_.full[slot_.at]);
      if (keys.token < 0) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect_tx(full, sizeof(smem_.slots[0]));
        const uint32_t to = shared_address(smem_.slots[slot_.at]);
        if (kCluster == 1) {
          tma_load(to, map, full, keys.head, keys.token);
        } else {
          const int first = cluster_rank() * (kKeys / kCluster);
          for (int block = 0; block < Smem::kColumnBlocks; ++block) {
            tma_load_multicast(to + block * Smem::kKeyBlockBytes + first * 128, map, full, block, keys.head,
                               keys.token + first, (1 << kCluster) - 1);
          }
        }
      }
    }
    slot_.advance();
  }

  Smem& smem_;
  const Shape& shape_;
  const CUtensorMap *query_, *key_, *value_;
  Cursor<Smem::kSlots> slot_;
  uint32_t items_ = 0;  // whose Q was asked for
  Keys previous_{-1, 0};
};

template <class T, int kHeadDim, int kCluster>
class Consumer {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Consumer(Smem& smem, const Arguments& args, const CUtensorMap* out, int index)
      : smem_(smem), args_(args), out_map_(out), index_(index) {}

  __device__ void run() {
    if (index_ == 1) named_barrier_arrive(kTurn, kTurnThreads);  // consumer 0 begins
    mbarrier_wait(full(slot_), slot_.parity);
    step_ = smem_.steps[slot_.at];
    if (step_.end()) return;
    take_query();
    take_turn();
    wgmma_fence();
    multiply_query_key(slot_.at);
    give_turn();
    wgmma_wait<0>();  // advance() leaves one product running, that of a step before
    pin(logits_);
    key_slot_ = slot_.at;
    slot_.advance();
    rows_.reset();
    while (advance()) {
    }
    if (threadIdx.x % 32 == 0) tma_store_wait_read();
  }

 private:
  static constexpr int kTurn = 1, kOwn = 3;  // named barriers, one a consumer each
  static constexpr int kTurnThreads = kConsumers * kWarpgroup;

  __device__ void take_turn() { named_barrier_sync(kTurn + index_, kTurnThreads); }
  __device__ void give_turn() { named_barrier_arrive(kTurn + 1 - index_, kTurnThreads); }

  __device__ uint32_t full(const Cursor<Smem::kSlots>& slot) const { return shared_address(&smem_.full[slot.at]); }

  // Waits for K of the step after step_, and for V of step_.
  __device__ void look_ahead() {
    const Cursor<Smem::kSlots> key_slot = slot_;
    slot_.advance();
    mbarrier_wait_both(full(key_slot), key_slot.parity, full(slot_), slot_.parity);
    key_slot_ = key_slot.at;
    next_ = smem_.steps[key_slot_];
    next_value_slot_ = slot_.at;
    if (step_.keys() < kKeys) {
      clear_rows<Smem::kColumnBlocks, kKeys>(smem_.slots[slot_.at][0], step_.keys(), kOwn + index_);
    }
    slot_.advance();
  }

  // On entry the logits of step_ are under way, and the output of the step before. Makes the weights, and issues their
  // product with V and the logits of the next step. False: there was no next step, and all is stored.
  __device__ __forceinline__ bool advance() {
    const int key_slot = key_slot_;
    look_ahead();  // in the shade of the products
    wgmma_wait<1>();
    pin(logits_);
    if (previous_.last()) {
      finish(previous_.keys() > 0);
      rows_.reset();
    }
    if (!rows_.update(logits_, step_.keys(), args_.scale_log2)) {
      multiply_in_warp<T, Smem::kKeyBlockBytes, kHeadDim / 16>(logits_, query_, smem_.slots[key_slot]);
      rows_.update(logits_, step_.keys(), args_.scale_log2, true);
    }
    release(key_slot);

    wgmma_wait<0>();
    pin(out_);
    if (value_slot_ >= 0) release(value_slot_);
    value_slot_ = next_value_slot_;
    if (!step_.first()) rows_.rescale(out_);
    else if (items_stored_ + 1 < items_taken_) store();  // the item before: its product ended in the shade of the weights
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights_[i] = pack<T>(logits_[2 * i], logits_[2 * i + 1]);
    if (next_.end()) {
      if (holds_query_) release_query();
      take_turn();
      pin(out_);
      wgmma_fence();
      multiply_weights_value(step_.first());
      if (index_ == 0) give_turn();
      wgmma_wait<0>();
      pin(out_);
      finish(step_.keys() > 0);
      store();
      return false;
    }
    if (next_.first()) take_query();

    take_turn();
    pin(logits_);
    pin(out_);
    wgmma_fence();
    multiply_query_key(key_slot_);
    multiply_weights_value(step_.first());
    give_turn();
    previous_ = step_;
    step_ = next_;
    if (holds_query_) release_query();
    return true;
  }

  // The next item's Q, into registers. Its place then takes the output of the item before, and only after that goes
  // back; that of the first item at once.
  __device__ void take_query() {
    if (holds_query_) release_query();
    mbarrier_wait(shared_address(&smem_.q_full), items_taken_ & 1);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      load_a<Smem::kQueryBlockBytes>(query_ + 4 * k, smem_.query[index_], k);
    }
    clear_a(query_, smem_.items[items_taken_ % 4].valid - index_ * kConsumerRows);
    fence_proxy_async();  // an arrival alone does not wait for the loads, and TMA writes there next
    __syncwarp();
    if (items_taken_++ == 0) release_query();
  }

  __device__ void release_query() {
    holds_query_ = false;
    if (threadIdx.x % 32 == 0) tma_store_wait_read();
    if (arrives()) mbarrier_arrive(shared_address(&smem_.q_empty));
    __syncwarp();
  }

  __device__ void release(int slot) {
    const uint32_t empty = shared_address(&smem_.empty[slot]);
    const int lane = threadIdx.x % 32;
    __syncwarp();
    if (kCluster == 1) {
      if (arrives()) mbarrier_arrive(empty);
    } else if (kWarpArrivals == 1) {
      if (lane < kCluster) mbarrier_arrive_in_cluster(address_in(lane, empty));
    } else {
      for (int rank = 0; rank < kCluster; ++rank) mbarrier_arrive_in_cluster(address_in(rank, empty));
    }
    __syncwarp();  // else the compiler takes the lanes of the loop that this ends to be apart
  }

  __device__ void multiply_query_key(int slot) {
    const KMajor<Smem::kKeyBlockBytes> key(smem_.slots[slot]);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      wgmma<T, Major::kK>(logits_, query_ + 4 * k, key.step(k), k > 0);
    }
    wgmma_commit();
  }

  __device__ void multiply_weights_value(bool first) {
    const MNMajor<Smem::kKeyBlockBytes> value(smem_.slots[value_slot_]);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      wgmma<T, Major::kMN>(out_, weights_ + 4 * k, value.step(k), k > 0 || !first);
    }
    wgmma_commit();
  }

  // Of the oldest item not stored: the LSE, and what its output is still to be multiplied by.
  __device__ void finish(bool any_keys) {
    const Item item = smem_.items[items_stored_ % 4];
    const Shape& shape = args_.shape;
    float* const lse = args_.lse + (item.batch * shape.heads + item.head) * shape.query_length() + item.token;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = index_ * kConsumerRows + accumulator_row(2 * pair);
      float row_lse;
      rows_.finish(pair, any_keys, &norm_[pair], &row_lse);
      if (threadIdx.x % 4 == 0) lse[row] = row < item.valid ? row_lse : -INFINITY;
    }
  }

  // Its output.
  __device__ void store() {
    const Item item = smem_.items[items_stored_ % 4];
    ++items_stored_;
    bool valid[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) valid[pair] = index_ * kConsumerRows + accumulator_row(2 * pair) < item.valid;
    const int token = item.batch * static_cast<int>(args_.shape.query_length()) + item.token + index_ * kConsumerRows;
    store_rows_by_tma<T, Smem::kQueryBlockBytes>(out_map_, smem_.query[index_][0], item.head, token, out_, norm_, valid);
    holds_query_ = true;
    __syncwarp();
  }

  Smem& smem_;
  const Arguments& args_;
  const CUtensorMap* const out_map_;
  const int index_;
  Cursor<Smem::kSlots> slot_;
  uint32_t items_taken_ = 0, items_stored_ = 0;
  bool holds_query_ = false;  // an output lies in Q's place
  Step previous_{0, false, false}, step_, next_;
  int key_slot_;              // K of next_
  int value_slot_ = -1;       // V of the step whose product may be running; -1: none
  int next_value_slot_;       // V of step_
  RowStatistics rows_;
  float norm_[2];  // of the oldest item not stored, once all its weights are made
  float logits_[kKeys / 2];
  float out_[kHeadDim / 2];
  uint32_t query_[kHeadDim / 4], weights_[kKeys / 4];
};

template <class T, int kHeadDim, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap query,
            const __grid_constant__ CUtensorMap key, const __grid_constant__ CUtensorMap value,
            const __grid_constant__ CUtensorMap out) {
  using Smem = Shared<kHeadDim>;
  static_assert(sizeof(Smem) <= 227 * 1024);
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_shared());
  if (threadIdx.x == 0) {
    for (int i = 0; i < Smem::kSlots; ++i) {
      mbarrier_init(shared_address(&smem.full[i]), 1);
      mbarrier_init(shared_address(&smem.empty[i]), kCluster * kConsumers * kWarpgroup / 32 * kWarpArrivals);
    }
    smem.jobs.init();
    mbarrier_init(shared_address(&smem.q_full), 1);
    mbarrier_init(shared_address(&smem.q_empty), kConsumers * kWarpgroup / 32 * kWarpArrivals);
    for (int i = 0; i < kMails; ++i) mbarrier_init(shared_address(&smem.mail_full[i]), 1);
    fence_mbarrier_init();
  }
  if (kCluster == 1) __syncthreads();
  else cluster_sync();
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) Walker<kHeadDim, kCluster>(smem, args).run();
    if (warp == 1) Loader<kHeadDim, kCluster>(smem, args.shape, &query, &key, &value).run();
  } else {
    setmaxnreg_inc<232>();
    Consumer<T, kHeadDim, kCluster>(smem, args, &out, warpgroup - 1).run();
  }
  if (kCluster > 1) cluster_sync();  // nobody leaves while others may write to it
}

template <class T, int kHeadDim, int kCluster>
std::string Launch(const ForwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  constexpr int kBlocks = kHeadDim / kSwizzleColumns;
  constexpr int kKeyBlocks = kCluster == 1 ? kBlocks : 1;  // a share of a slot's rows does not adjoin over blocks
  CUtensorMap query, key, value, out;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t length, int64_t heads, int tokens, int blocks) {
    return EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, kHeadDim, tokens, blocks);
  };
  std::string error = encode(&query, params.query, shape.query_length(), shape.heads, kConsumerRows, kBlocks);
  if (error.empty()) error = encode(&key, params.key, shape.key_length(), shape.kv_heads, kKeys / kCluster, kKeyBlocks);
  if (error.empty()) error = encode(&value, params.value, shape.key_length(), shape.kv_heads, kKeys / kCluster, kKeyBlocks);
  if (error.empty()) error = encode(&out, params.out, shape.query_length(), shape.heads, kWarpRows, 1);
  if (!error.empty()) return error;
  const Arguments args{shape,
                       params.pairs,
                       static_cast<float>(params.scale * kLog2E),
                       static_cast<float*>(params.lse),
                       static_cast<int*>(params.workspace),
                       static_cast<int>(shape.batch * shape.heads * (shape.query_length() / kRows / kCluster))};
  return LaunchPersistent(forward<T, kHeadDim, kCluster>, kCluster, kThreads, sizeof(Shared<kHeadDim>), args.items,
                          args.ticket, 1, stream, args, query, key, value, out);
}

template <class T, int kHeadDim>
std::string LaunchTile(const ForwardParams& params, cudaStream_t stream) {
  return params.shape.tile_size == kRows ? Launch<T, kHeadDim, 1>(params, stream)
                                         : Launch<T, kHeadDim, 2>(params, stream);
}

}  // namespace

std::string Forward128(const ForwardParams& params, cudaStream_t stream) {
  const bool wide = params.shape.head_dim == 128;
  if (params.shape.dtype == DType::kFloat16) {
    return wide ? LaunchTile<__half, 128>(params, stream) : LaunchTile<__half, 64>(params, stream);
  }
  return wide ? LaunchTile<__nv_bfloat16, 128>(params, stream) : LaunchTile<__nv_bfloat16, 64>(params, stream);
}

}  // namespace vsa::sm90
