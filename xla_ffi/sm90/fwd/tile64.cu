// Forward for tiles of 64 tokens: three neighbouring query tiles share the loads of the key tiles they have in common.
//
// CTA: 4 warpgroups, persistent, one per SM.
//   warpgroup 0     producers, 32 registers: warp 0 takes tickets and merges three lists, warp 1 loads Q and K, warp 2
//                   loads V
//   warpgroups 1-3  consumers, a query tile each; 160 registers: O 64, S 32, Q 32, P 16
//
// A step is a key tile of the union of the three lists. Each consumer has a queue of its own, which names a slot with
// its query tile, the slots of the steps it keeps, and a slot for its output, from where TMA stores that; so it never
// meets the others. For those who do not keep a tile the loaders give its slot back.
// There is no overlap of products within a consumer (P V beside the next S does not fit in 160 registers): three hide
// each other's softmax, and since they skip independently, they take no turns.
//
//   producers              consumer 1 (keeps g)   consumer 2 (keeps g)   consumer 3 (does not)
//   K(g), V(g) -> slots    S = Q K                (g-1) O += P V         (g-1) softmax
//   K(g+1), V(g+1)         softmax                S = Q K                (g-1) O += P V
//   ...                    O += P V               softmax                S = Q K(g+1)
//
// The merge takes the smallest of the three lists' next entries. On ascending lists that is the union; on others it
// still walks each list in its order, only with fewer loads shared.
//
// Barriers                    arrivals                    meaning (waiter)
//   keys, values: full[7]     producer + bytes            the slot's tile is there, or place for an output (consumers)
//   keys, values: empty[7]    12: one lane of each warp   nobody needs the slot (its producer)
//                             that keeps it, and the
//                             loader for the others
//   queued[3][16]             producer                    the entry is there (its consumer)
//   jobs: full[16], empty     warp 0; warps 1 and 2       what is to be loaded is there; has been read
//   own[1..3]                 named, 128 threads          one consumer's threads
//
// Shared memory at H = 128: seven slots for Q, K and outputs and seven for V of 16 KB, 224 KB; then barriers and queues.
// A queue's 16 entries are enough since each but the end holds a slot of K until its consumer has read it.
#include <cstddef>

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
constexpr int kWarps = kWarpgroup / 32;   // of a consumer
constexpr int kWarpRows = kTile / kWarps;
constexpr int kEntries = 16, kJobs = 16;

struct Arguments {
  Shape shape;
  Pairs pairs;
  float scale_log2;
  float* lse;
  int* ticket;  // 0 at launch
  int items;    // three query tiles of one head
};

// What a consumer finds in its queue, in one word: a query tile to begin with, the steps it keeps, a slot for its output.
class Entry {
 public:
  __device__ Entry() : word_(0) {}  // none
  template <int kSlots>
  __device__ static Entry Query(const Cursor<kSlots>& slot) {
    return Entry(slot.at << 8 | slot.parity << 16 | kQuery);
  }
  // any_keys: whether there were steps.
  template <int kSlots>
  __device__ static Entry Output(const Cursor<kSlots>& slot, bool any_keys) {
    return Entry(any_keys | slot.at << 8 | slot.parity << 16 | kOutput);
  }
  template <int kSlots>
  __device__ static Entry Keys(int count, const Cursor<kSlots>& key, const Cursor<kSlots>& value) {
    return Entry(count | key.at << 8 | value.at << 12 | key.parity << 16 | value.parity << 17);
  }
  __device__ static Entry End() { return Entry(kEnd); }  // the work is over
  __device__ explicit Entry(int word) : word_(word) {}

  __device__ int word() const { return word_; }
  __device__ bool none() const { return word_ == 0; }
  __device__ int keys() const { return word_ & 0xff; }  // valid slots of the key tile
  __device__ bool any_keys() const { return word_ & 0xff; }
  __device__ int key_slot() const { return word_ >> 8 & 0xf; }
  __device__ int value_slot() const { return word_ >> 12 & 0xf; }
  __device__ uint32_t key_parity() const { return word_ >> 16 & 1; }
  __device__ uint32_t value_parity() const { return word_ >> 17 & 1; }
  __device__ bool output() const { return word_ & kOutput; }
  __device__ bool end() const { return word_ & kEnd; }

 private:
  static constexpr int kQuery = 1 << 18, kOutput = 1 << 19, kEnd = 1 << 20;
  int word_;
};

struct QueryTile {
  int batch, head, tile;
  int valid;  // rows that count; the rest give 0
};

// What the walker tells the loaders.
struct Job {
  enum Kind { kQueries, kKeys, kEnd } kind;
  int batch, head, tile;  // of the first query tile; or of a key tile, which is counted over batches
  int sizes;              // valid slots: 8 bits a query tile; or of the key tile
  unsigned consumers;     // that have a query tile; or that keep the key tile
  unsigned ended;         // whose query tiles have no keys beyond

  __device__ QueryTile query_tile(int consumer) const {
    return {batch, head, tile + consumer, sizes >> 8 * consumer & 0xff};
  }
};

template <int kHeadDim>
struct Shared {
  static constexpr int kSlots = kHeadDim == 128 ? 7 : 14;
  static constexpr int kColumnBlocks = kHeadDim / kSwizzleColumns;
  using Tile = uint8_t[kColumnBlocks][kBlockBytes];  // rows of 128 bytes
  struct Ring {
    uint64_t full[kSlots], empty[kSlots];
  };
  Tile key_tiles[kSlots], value_tiles[kSlots];  // a query tile takes a slot of K for a moment, its output another
  Ring keys, values;
  struct Queue {
    uint64_t queued[kEntries];
    int entries[kEntries];
  };
  Queue queues[kConsumers];
  Messages<Job, kJobs, 2> jobs;
  QueryTile query_tiles[kSlots];  // of the slots that hold Q, or take an output
};

// The three query tiles of an item. Dense rows are grouped with dense rows alone: beside a listed row one would keep its
// warpgroup idle.
struct Group {
  int batch, head, first_tile, limit;  // limit: tiles from here on are not of this group
  __device__ Group(const Shape& shape, int ticket) {
    const int dense = static_cast<int>(shape.num_dense_rows), heads = static_cast<int>(shape.heads);
    const int dense_groups = (dense + kConsumers - 1) / kConsumers;
    const int groups = dense_groups + (static_cast<int>(shape.rows()) + kConsumers - 1) / kConsumers;
    const int group = ticket % groups;
    head = ticket / groups % heads;
    batch = ticket / groups / heads;
    const bool is_dense = group < dense_groups;
    first_tile = is_dense ? group * kConsumers : dense + (group - dense_groups) * kConsumers;
    limit = is_dense ? dense : static_cast<int>(shape.query_tiles);
  }
};

// Takes tickets and merges lists, some steps ahead of the loads: those that begin a list depend on each other.
template <int kHeadDim>
class Walker {
 public:
  __device__ Walker(Shared<kHeadDim>& smem, const Arguments& args) : smem_(smem), args_(args) {}

  __device__ void run() {
    for (int ticket = blockIdx.x; ticket < args_.items;) {
      int next = 0;
      if (lane_ == 0) next = gridDim.x + atomicAdd(args_.ticket, 1);
      item(ticket);
      ticket = uniform(next);
    }
    smem_.jobs.write(job_, {Job::kEnd});
  }

 private:
  __device__ void item(int ticket) {
    const Shape& shape = args_.shape;
    const Group group(shape, ticket);
    // Lane i's query tile, -1 where there is none, and its size, then 0.
    const int mine = lane_ < kConsumers && group.first_tile + lane_ < group.limit ? group.first_tile + lane_ : -1;
    const int size = mine < 0 ? 0 : args_.pairs.query_sizes[group.batch * shape.query_tiles + mine];
    MergedKeyTiles<kConsumers> keys(shape, args_.pairs, group.batch, group.head, mine, size);
    int sizes = 0;
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) sizes |= __shfl_sync(kWholeWarp, size, i) << 8 * i;
    smem_.jobs.write(job_, {Job::kQueries, group.batch, group.head, group.first_tile, sizes,
                            __ballot_sync(kWholeWarp, mine >= 0), ~keys.with_more()});
    const int kv_head = group.head / static_cast<int>(shape.groups());
    const int first_tile = group.batch * static_cast<int>(shape.key_tiles);
    while (keys.left()) {
      const int tile = first_tile + keys.tile(), valid = keys.size();
      const unsigned consumers = keys.with_tile();
      keys.next();
      smem_.jobs.write(job_, {Job::kKeys, group.batch, kv_head, tile, valid, consumers, ~keys.with_more()});
    }
  }

  Shared<kHeadDim>& smem_;
  const Arguments& args_;
  const int lane_ = threadIdx.x % 32;
  Cursor<kJobs> job_;
};

// What both loaders do: fill a ring.
template <int kHeadDim>
class Loader {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Loader(Smem& smem, typename Smem::Ring& ring, typename Smem::Tile* tiles)
      : smem_(smem), full_(opaque(shared_address(ring.full))), empty_(opaque(shared_address(ring.empty))),
        tiles_(opaque(shared_address(tiles))) {}

 protected:
  __device__ Job next_job() {
    Job job = smem_.jobs.read(job_);
    job.kind = static_cast<Job::Kind>(uniform(job.kind));
    job.consumers = uniform(job.consumers);
    return job;
  }

  // The next slot, for those consumers in `mask`.
  __device__ void acquire(unsigned mask) {
    const uint32_t empty = empty_ + slot_.at * 8;
    mbarrier_wait(empty, slot_.parity ^ 1);
    const int others = kConsumers - __popc(mask);
    if (others > 0 && elect()) mbarrier_arrive_for(empty, others * kWarps * kWarpArrivals);
  }
  // By one lane. tile: counts over batches.
  __device__ void load(const CUtensorMap* map, int head, int tile) {
    const uint32_t full = full_ + slot_.at * 8;
    mbarrier_arrive_expect_tx(full, sizeof(typename Smem::Tile));
    tma_load(tiles_ + slot_.at * sizeof(typename Smem::Tile), map, full, head, tile * kTile);
  }

  Smem& smem_;
  const uint32_t full_, empty_, tiles_;
  Cursor<kJobs> job_;
  Cursor<Smem::kSlots> slot_;
};

template <int kHeadDim>
class KeyLoader : Loader<kHeadDim> {
 public:
  using Base = Loader<kHeadDim>;
  using typename Base::Smem;

  __device__ KeyLoader(Smem& smem, int query_tiles, const CUtensorMap* query, const CUtensorMap* key)
      : Base(smem, smem.keys, smem.key_tiles), query_tiles_(query_tiles), query_(query), key_(key) {}

  __device__ void run() {
    Job queries{}, job;
    while ((job = next_job()).kind != Job::kEnd) {
      if (job.kind == Job::kQueries) {
        queries = job;
        for (int i = 0; i < kConsumers; ++i) {
          if (job.consumers >> i & 1) begin(queries, i);
        }
      } else {
        load_keys(job);
        for (unsigned ended = uniform(job.consumers & job.ended); ended; ended &= ended - 1) {
          give_output(queries, __ffs(ended) - 1, true);
        }
      }
    }
    push((1 << kConsumers) - 1, Entry::End());
  }

 private:
  using Base::acquire, Base::full_, Base::load, Base::next_job, Base::slot_, Base::smem_;

  __device__ void begin(const Job& queries, int consumer) {
    const bool any_keys = !(queries.ended >> consumer & 1);
    const QueryTile tile = queries.query_tile(consumer);
    acquire(1 << consumer);
    if (elect()) {
      smem_.query_tiles[slot_.at] = tile;
      if (any_keys) load(query_, tile.head, tile.batch * query_tiles_ + tile.tile);
      else mbarrier_arrive(full_ + slot_.at * 8);
    }
    push(1 << consumer, Entry::Query(slot_));
    slot_.advance();
    if (!any_keys) give_output(queries, consumer, false);
  }

  __device__ void load_keys(const Job& job) {
    acquire(job.consumers);
    if (elect()) load(key_, job.head, job.tile);
    // A consumer told sooner could take the round before of V's slot, if that is still to come, for this one.
    mbarrier_wait(shared_address(&smem_.values.empty[value_slot_.at]), value_slot_.parity ^ 1);
    push(job.consumers, Entry::Keys(job.sizes, slot_, value_slot_));
    slot_.advance();
    value_slot_.advance();
  }

  // A slot for the output of a consumer.
  __device__ void give_output(const Job& queries, int consumer, bool any_keys) {
    acquire(1 << consumer);
    if (elect()) {
      smem_.query_tiles[slot_.at] = queries.query_tile(consumer);
      mbarrier_arrive(full_ + slot_.at * 8);
    }
    push(1 << consumer, Entry::Output(slot_, any_keys));
    slot_.advance();
  }

  // Lane i puts an entry into the queue of consumer i of `mask`.
  __device__ void push(unsigned mask, Entry entry) {
    const int lane = threadIdx.x % 32;
    if (mask >> lane & 1) {
      const int at = pushed_++ % kEntries;
      smem_.queues[lane].entries[at] = entry.word();
      mbarrier_arrive(shared_address(&smem_.queues[lane].queued[at]));
    }
    __syncwarp();
  }

  const int query_tiles_;
  const CUtensorMap *query_, *key_;
  Cursor<Smem::kSlots> value_slot_;
  unsigned pushed_ = 0;  // into this lane's queue
};

template <int kHeadDim>
class ValueLoader : Loader<kHeadDim> {
 public:
  using Base = Loader<kHeadDim>;
  using typename Base::Smem;

  __device__ ValueLoader(Smem& smem, const CUtensorMap* value)
      : Base(smem, smem.values, smem.value_tiles), value_(value) {}

  __device__ void run() {
    for (Job job; (job = this->next_job()).kind != Job::kEnd;) {
      if (job.kind != Job::kKeys) continue;
      this->acquire(job.consumers);
      if (elect()) this->load(value_, job.head, job.tile);
      this->slot_.advance();
    }
  }

 private:
  const CUtensorMap* value_;
};

template <class T, int kHeadDim>
class Consumer {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Consumer(Smem& smem, const Arguments& args, const CUtensorMap* out, int index)
      : smem_(smem), args_(args), out_map_(out), index_(index), queue_(opaque(shared_address(&smem.queues[index]))),
        key_ring_(opaque(shared_address(&smem.keys))) {}

  __device__ void run() {
    // Without this ptxas 13.0 lets `weights` overwrite query_: it is loaded under a condition, and read in a loop.
    for (uint32_t& word : query_) word = 0;
    for (Entry entry; !(entry = take_entry()).end();) {
      take_query(entry);
      rows_.reset();
      for (float& x : out_) x = 0;
      while (!(entry = take_entry()).output()) attend(entry);
      store(entry);
    }
  }

 private:
  static constexpr int kOwn = 1;  // named barriers, one a consumer
  static constexpr int kEmpty = offsetof(typename Smem::Ring, empty);  // full comes first
  static constexpr int kQueueEntries = offsetof(typename Smem::Queue, entries);

  __device__ uint32_t value_ring() const { return key_ring_ + sizeof(typename Smem::Ring); }

  __device__ __forceinline__ void read_entry() {
    next_ = Entry(load_shared(queue_ + kQueueEntries + entry_.at * 4));
    entry_.advance();
  }
  __device__ __forceinline__ Entry take_entry() {
    if (next_.none()) {
      mbarrier_wait(queue_ + entry_.at * 8, entry_.parity);
      read_entry();
    }
    const Entry entry = next_;
    next_ = Entry();
    return entry;
  }
  // If it is there.
  __device__ __forceinline__ void look_ahead() {
    if (mbarrier_test_wait(queue_ + entry_.at * 8, entry_.parity)) read_entry();
  }

  __device__ __forceinline__ void release(uint32_t ring, int slot) {
    __syncwarp();
    if (arrives()) mbarrier_arrive(ring + kEmpty + slot * 8);
    __syncwarp();  // else the compiler takes the lanes of a loop that this ends to be apart
  }

  __device__ void take_query(Entry entry) {
    const int slot = entry.key_slot();
    mbarrier_wait(key_ring_ + slot * 8, entry.key_parity());
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) load_a<kBlockBytes>(query_ + 4 * k, smem_.key_tiles[slot], k);
    clear_a(query_, smem_.query_tiles[slot].valid);
    fence_proxy_async();  // an arrival alone does not wait for the loads, and TMA writes there next
    release(key_ring_, slot);
  }

  // One key tile.
  __device__ __forceinline__ void attend(Entry entry) {
    const int key_slot = entry.key_slot(), value_slot = entry.value_slot(), keys = entry.keys();
    mbarrier_wait(key_ring_ + key_slot * 8, entry.key_parity());
    const KMajor<kBlockBytes> key(smem_.key_tiles[key_slot]);
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

    if (!rows_.update(logits, keys, args_.scale_log2)) {
      multiply_in_warp<T, kBlockBytes, kHeadDim / 16>(logits, query_, smem_.key_tiles[key_slot]);
      rows_.update(logits, keys, args_.scale_log2, true);
    }
    release(key_ring_, key_slot);
    uint32_t weights[kTile / 4];
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) weights[i] = pack<T>(logits[2 * i], logits[2 * i + 1]);
    rows_.rescale(out_);

    mbarrier_wait(value_ring() + value_slot * 8, entry.value_parity());
    if (keys < kTile) clear_rows<Smem::kColumnBlocks, kTile>(smem_.value_tiles[value_slot][0], keys, kOwn + index_);
    const MNMajor<kBlockBytes> value(smem_.value_tiles[value_slot]);
    pin(out_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      wgmma<T, Major::kMN>(out_, weights + 4 * k, value.step(k), 1);
    }
    wgmma_commit();
    look_ahead();  // in the shade of the product
    wgmma_wait<0>();
    pin(out_);
    release(value_ring(), value_slot);
  }

  __device__ void store(Entry entry) {
    const Shape& shape = args_.shape;
    const int slot = entry.key_slot();
    mbarrier_wait(key_ring_ + slot * 8, entry.key_parity());
    const auto [batch, head, tile, valid_rows] = smem_.query_tiles[slot];
    float* const lse = args_.lse + (batch * shape.heads + head) * shape.query_length() + tile * kTile;
    float norm[2];
    bool valid[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = accumulator_row(2 * pair);
      float row_lse;
      rows_.finish(pair, entry.any_keys(), &norm[pair], &row_lse);
      valid[pair] = row < valid_rows;
      if (threadIdx.x % 4 == 0) lse[row] = valid[pair] ? row_lse : -INFINITY;
    }
    const int token = (batch * static_cast<int>(shape.query_tiles) + tile) * kTile;
    store_rows_by_tma<T, kBlockBytes>(out_map_, smem_.key_tiles[slot][0], head, token, out_, norm, valid);
    if (threadIdx.x % 32 == 0) tma_store_wait_read();
    release(key_ring_, slot);
  }

  Smem& smem_;
  const Arguments& args_;
  const CUtensorMap* const out_map_;
  const int index_;
  const uint32_t queue_, key_ring_;
  Cursor<kEntries> entry_;
  Entry next_;  // none until it is known
  RowStatistics rows_;
  float out_[kHeadDim / 2];
  uint32_t query_[kHeadDim / 4];
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap query,
            const __grid_constant__ CUtensorMap key, const __grid_constant__ CUtensorMap value,
            const __grid_constant__ CUtensorMap out) {
  using Smem = Shared<kHeadDim>;
  static_assert(sizeof(Smem) <= 227 * 1024);
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_shared());
  if (threadIdx.x == 0) {
    for (typename Smem::Ring* ring : {&smem.keys, &smem.values}) {
      for (int i = 0; i < Smem::kSlots; ++i) {
        mbarrier_init(shared_address(&ring->full[i]), 1);
        mbarrier_init(shared_address(&ring->empty[i]), kConsumers * kWarps * kWarpArrivals);
      }
    }
    for (auto& queue : smem.queues) {
      for (uint64_t& entry : queue.queued) mbarrier_init(shared_address(&entry), 1);
    }
    smem.jobs.init();
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    setmaxnreg_dec<32>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) Walker<kHeadDim>(smem, args).run();
    if (warp == 1) KeyLoader<kHeadDim>(smem, static_cast<int>(args.shape.query_tiles), &query, &key).run();
    if (warp == 2) ValueLoader<kHeadDim>(smem, &value).run();
  } else {
    setmaxnreg_inc<160>();
    Consumer<T, kHeadDim>(smem, args, &out, warpgroup - 1).run();
  }
}

template <class T, int kHeadDim>
std::string Launch(const ForwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  constexpr int kBlocks = kHeadDim / kSwizzleColumns;
  CUtensorMap query, key, value, out;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t length, int64_t heads, int tokens, int blocks) {
    return EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, kHeadDim, tokens, blocks);
  };
  std::string error = encode(&query, params.query, shape.query_length(), shape.heads, kTile, kBlocks);
  if (error.empty()) error = encode(&key, params.key, shape.key_length(), shape.kv_heads, kTile, kBlocks);
  if (error.empty()) error = encode(&value, params.value, shape.key_length(), shape.kv_heads, kTile, kBlocks);
  if (error.empty()) error = encode(&out, params.out, shape.query_length(), shape.heads, kWarpRows, 1);
  if (!error.empty()) return error;
  const auto groups = [](int64_t rows) { return (rows + kConsumers - 1) / kConsumers; };
  const int64_t items = shape.batch * shape.heads * (groups(shape.num_dense_rows) + groups(shape.rows()));
  const Arguments args{shape,
                       params.pairs,
                       static_cast<float>(params.scale * kLog2E),
                       static_cast<float*>(params.lse),
                       static_cast<int*>(params.workspace),
                       static_cast<int>(items)};
  return LaunchPersistent(forward<T, kHeadDim>, 1, kThreads, sizeof(Shared<kHeadDim>), args.items, args.ticket, 1, stream,
                          args, query, key, value, out);
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
