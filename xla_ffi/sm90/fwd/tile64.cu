// Forward for tiles of 64 tokens: three neighbouring query tiles share the loads of the key tiles they have in common.
//
// CTA: 4 warpgroups, persistent, one per SM.
//   warpgroup 0     producers, 32 registers: warp 0 takes tickets, merges three lists and loads Q and K; warp 1 merges them
//                   too and loads V
//   warpgroups 1-3  consumers, a query tile each; 160 registers: O 64, S 32, Q 32, P 16
//
// A step is a key tile of the union of the three lists. Each consumer has a queue of its own, which names the slots of
// the steps it keeps, so it never meets the others; for those who do not keep a tile the producer gives its slot back.
// There is no overlap of products within a consumer (P V beside the next S does not fit in 160 registers): three hide each
// other's softmax, and since they skip independently, they take no turns.
//
//   producers              consumer 1 (keeps g)   consumer 2 (keeps g)   consumer 3 (does not)
//   K(g), V(g) -> slots    S = Q K                (g-1) O += P V         (g-1) softmax
//   K(g+1), V(g+1)         softmax                S = Q K                (g-1) O += P V
//   ...                    O += P V               softmax                S = Q K(g+1)
//
// The merge takes the smallest of the three lists' next entries. On ascending lists that is the union; on others it still
// walks each list in its order, only with fewer loads shared.
//
// Barriers                    arrivals                    meaning (waiter)
//   keys, values: full[7]     producer + bytes            the slot's tile is there (consumers)
//   keys, values: empty[7]    12: one lane of each warp   nobody needs the slot (its producer)
//                             that keeps it, and the
//                             producer for the others
//   queued[3][16]             producer                    the entry is there (its consumer)
//   mail_full[4], _empty[4]   a producer                  a ticket from warp 0 is there, was read (warps 1, 0)
//   own[1..3]                 named, 128 threads          one consumer's threads
//
// Shared memory at H = 128: seven slots for Q and K and seven for V of 16 KB, 224 KB; then barriers and queues. A queue's 16
// entries are enough since each but the end holds a slot of K until its consumer has read it.
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
constexpr int kEntries = 16, kMails = 4;

struct Arguments {
  Shape shape;
  Pairs pairs;
  float scale_log2;
  void* out;
  float* lse;
  int* ticket;  // 0 at launch
  int items;    // three query tiles of one head
};

// What a consumer finds in its queue, in one word: a query tile to begin with, then the steps it keeps.
class Entry {
 public:
  __device__ Entry() : word_(0) {}  // none
  template <int kSlots>
  __device__ static Entry Query(const Cursor<kSlots>& slot) {
    return Entry(slot.at << 8 | slot.parity << 16 | kQuery);
  }
  template <int kSlots>
  __device__ static Entry Keys(int count, const Cursor<kSlots>& key, const Cursor<kSlots>& value) {
    return Entry(count | key.at << 8 | value.at << 12 | key.parity << 16 | value.parity << 17);
  }
  __device__ static Entry End() { return Entry(kEnd); }  // the work is over
  __device__ explicit Entry(int word) : word_(word) {}

  __device__ Entry as_last() const { return Entry(word_ | kLast); }
  __device__ int word() const { return word_; }
  __device__ bool none() const { return word_ == 0; }
  __device__ int keys() const { return word_ & 0xff; }  // valid slots of the key tile
  __device__ int key_slot() const { return word_ >> 8 & 0xf; }
  __device__ int value_slot() const { return word_ >> 12 & 0xf; }
  __device__ uint32_t key_parity() const { return word_ >> 16 & 1; }
  __device__ uint32_t value_parity() const { return word_ >> 17 & 1; }
  __device__ bool query() const { return word_ & kQuery; }
  __device__ bool last() const { return word_ & kLast; }  // of its query tile: that itself where it has no keys
  __device__ bool end() const { return word_ & kEnd; }

 private:
  static constexpr int kQuery = 1 << 18, kLast = 1 << 19, kEnd = 1 << 20;
  int word_;
};

struct QueryTile {
  int batch, head, tile;
  int valid;  // rows that count; the rest give 0
};

template <int kHeadDim>
struct Shared {
  static constexpr int kSlots = kHeadDim == 128 ? 7 : 14;
  static constexpr int kColumnBlocks = kHeadDim / kSwizzleColumns;
  using Tile = uint8_t[kColumnBlocks][kBlockBytes];  // rows of 128 bytes
  struct Ring {
    uint64_t full[kSlots], empty[kSlots];
  };
  Tile key_tiles[kSlots], value_tiles[kSlots];  // a query tile takes a slot of K for a moment
  Ring keys, values;
  uint64_t queued[kConsumers][kEntries];
  uint64_t mail_full[kMails], mail_empty[kMails];
  int queues[kConsumers][kEntries];
  QueryTile query_tiles[kSlots];  // of the slots that hold Q
  int mails[kMails];
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

// What both producers do: walk the items' merged lists, and fill one ring.
template <int kHeadDim>
class Producer {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Producer(Smem& smem, const Arguments& args, typename Smem::Ring& ring, typename Smem::Tile* tiles)
      : smem_(smem), args_(args), full_(opaque(shared_address(ring.full))), empty_(opaque(shared_address(ring.empty))),
        tiles_(opaque(shared_address(tiles))) {}

 protected:
  // Lane i's query tile, -1 where there is none, and its size, then 0.
  __device__ int tile_of_lane(const Group& group) const {
    const int tile = group.first_tile + lane_;
    return lane_ < kConsumers && tile < group.limit ? tile : -1;
  }
  __device__ int size_of_lane(const Group& group) const {
    const int tile = tile_of_lane(group);
    return tile < 0 ? 0 : args_.pairs.query_sizes[group.batch * args_.shape.query_tiles + tile];
  }
  __device__ MergedKeyTiles<kConsumers> merged(const Group& group, int size) const {
    return {args_.shape, args_.pairs, group.batch, group.head, tile_of_lane(group), size};
  }
  // Of a key tile: its head, and its first token, over batches.
  __device__ int kv_head(const Group& group) const { return group.head / static_cast<int>(args_.shape.groups()); }
  __device__ int token(const Group& group, int key_tile) const {
    return (group.batch * static_cast<int>(args_.shape.key_tiles) + key_tile) * kTile;
  }

  // The next slot, for those consumers in `mask`.
  __device__ void acquire(unsigned mask) {
    const uint32_t empty = empty_ + slot_.at * 8;
    mbarrier_wait(empty, slot_.parity ^ 1);
    const int others = kConsumers - __popc(mask);
    if (others > 0 && elect()) mbarrier_arrive_for(empty, others * kWarps);
  }
  // By one lane.
  __device__ void load(const CUtensorMap* map, int head, int token) {
    const uint32_t full = full_ + slot_.at * 8;
    mbarrier_arrive_expect_tx(full, sizeof(typename Smem::Tile));
    tma_load(tiles_ + slot_.at * sizeof(typename Smem::Tile), map, full, head, token);
  }

  Smem& smem_;
  const Arguments& args_;
  const uint32_t full_, empty_, tiles_;
  const int lane_ = threadIdx.x % 32;
  Cursor<Smem::kSlots> slot_;
  Cursor<kMails> mail_;
};

template <int kHeadDim>
class KeyProducer : Producer<kHeadDim> {
 public:
  using Base = Producer<kHeadDim>;
  using typename Base::Smem;

  __device__ KeyProducer(Smem& smem, const Arguments& args, const CUtensorMap* query, const CUtensorMap* key)
      : Base(smem, args, smem.keys, smem.key_tiles), query_(query), key_(key) {}

  __device__ void run() {
    for (int ticket = blockIdx.x;;) {
      tell(ticket);
      if (ticket >= args_.items) break;
      int next = 0;
      if (lane_ == 0) next = gridDim.x + atomicAdd(args_.ticket, 1);
      item(ticket);
      ticket = __shfl_sync(kWholeWarp, next, 0);
    }
    push((1 << kConsumers) - 1, Entry::End(), 0);
  }

 private:
  using Base::acquire, Base::args_, Base::full_, Base::kv_head, Base::lane_, Base::load, Base::mail_, Base::merged;
  using Base::size_of_lane, Base::slot_, Base::smem_, Base::token;

  // The other producer of a ticket.
  __device__ void tell(int ticket) {
    mbarrier_wait(shared_address(&smem_.mail_empty[mail_.at]), mail_.parity ^ 1);
    if (elect()) {
      smem_.mails[mail_.at] = ticket;
      mbarrier_arrive(shared_address(&smem_.mail_full[mail_.at]));
    }
    mail_.advance();
  }

  __device__ void item(int ticket) {
    const Group group(args_.shape, ticket);
    const int size = size_of_lane(group);
    auto keys = merged(group, size);
    const unsigned listed = keys.with_more();
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      const int tile = group.first_tile + i;
      if (tile >= group.limit) break;
      const bool any = listed >> i & 1;
      const int valid = __shfl_sync(kWholeWarp, size, i);
      acquire(1 << i);
      if (elect()) {
        smem_.query_tiles[slot_.at] = {group.batch, group.head, tile, valid};
        if (any) load(query_, group.head, (group.batch * static_cast<int>(args_.shape.query_tiles) + tile) * kTile);
        else mbarrier_arrive(full_ + slot_.at * 8);
      }
      push(1 << i, Entry::Query(slot_), ~listed);
      slot_.advance();
    }
    const int head = kv_head(group);
    while (keys.left()) {
      const int first = token(group, keys.tile()), count = keys.size();
      const unsigned mask = keys.with_tile();
      keys.next();
      acquire(mask);
      if (elect()) load(key_, head, first);
      // A consumer told sooner could take the round before of V's slot, if that is still to come, for this one.
      mbarrier_wait(shared_address(&smem_.values.empty[value_slot_.at]), value_slot_.parity ^ 1);
      push(mask, Entry::Keys(count, slot_, value_slot_), ~keys.with_more());
      slot_.advance();
      value_slot_.advance();
    }
  }

  // Lane i puts an entry into the queue of consumer i of `mask`, for those of `ends` as the last of their query tile.
  __device__ void push(unsigned mask, Entry entry, unsigned ends) {
    if (mask >> lane_ & 1) {
      const int at = pushed_++ % kEntries;
      smem_.queues[lane_][at] = (ends >> lane_ & 1 ? entry.as_last() : entry).word();
      mbarrier_arrive(shared_address(&smem_.queued[lane_][at]));
    }
    __syncwarp();
  }

  const CUtensorMap *query_, *key_;
  Cursor<Smem::kSlots> value_slot_;
  unsigned pushed_ = 0;  // into this lane's queue
};

template <int kHeadDim>
class ValueProducer : Producer<kHeadDim> {
 public:
  using Base = Producer<kHeadDim>;
  using typename Base::Smem;

  __device__ ValueProducer(Smem& smem, const Arguments& args, const CUtensorMap* value)
      : Base(smem, args, smem.values, smem.value_tiles), value_(value) {}

  __device__ void run() {
    for (int ticket = next_ticket(); ticket < args_.items; ticket = next_ticket()) {
      const Group group(args_.shape, ticket);
      auto keys = merged(group, size_of_lane(group));
      const int head = kv_head(group);
      for (; keys.left(); keys.next()) {
        acquire(keys.with_tile());
        if (elect()) load(value_, head, token(group, keys.tile()));
        slot_.advance();
      }
    }
  }

 private:
  using Base::acquire, Base::args_, Base::kv_head, Base::load, Base::mail_, Base::merged, Base::size_of_lane;
  using Base::slot_, Base::smem_, Base::token;

  __device__ int next_ticket() {
    mbarrier_wait(shared_address(&smem_.mail_full[mail_.at]), mail_.parity);
    const int ticket = load_shared(shared_address(&smem_.mails[mail_.at]));
    __syncwarp();
    if (elect()) mbarrier_arrive(shared_address(&smem_.mail_empty[mail_.at]));
    mail_.advance();
    return ticket;
  }

  const CUtensorMap* value_;
};

template <class T, int kHeadDim>
class Consumer {
 public:
  using Smem = Shared<kHeadDim>;

  __device__ Consumer(Smem& smem, const Arguments& args, int index)
      : smem_(smem), args_(args), index_(index), queued_(opaque(shared_address(smem.queued[index]))),
        queue_(opaque(shared_address(smem.queues[index]))), key_ring_(opaque(shared_address(&smem.keys))),
        value_ring_(opaque(shared_address(&smem.values))) {}

  __device__ void run() {
    bool any_keys = false;
    // Without this ptxas 13.0 lets `weights` overwrite query_: it is loaded under a condition, and read in a loop.
    for (uint32_t& word : query_) word = 0;
    while (true) {
      if (next_.none()) wait_entry();
      const Entry entry = next_;
      next_ = Entry();
      if (entry.end()) return;
      if (entry.query()) {
        take_query(entry);
        rows_.reset();
        any_keys = false;
      } else {
        attend(entry, !any_keys);
        any_keys = true;
      }
      if (entry.last()) store(any_keys);
    }
  }

 private:
  static constexpr int kOwn = 1;  // named barriers, one a consumer
  static constexpr int kEmpty = offsetof(typename Smem::Ring, empty);  // full comes first

  __device__ __forceinline__ void read_entry() {
    next_ = Entry(load_shared(queue_ + entry_.at * 4));
    entry_.advance();
  }
  __device__ __forceinline__ void wait_entry() {
    mbarrier_wait(queued_ + entry_.at * 8, entry_.parity);
    read_entry();
  }
  // If it is there.
  __device__ __forceinline__ void look_ahead() {
    if (mbarrier_test_wait(queued_ + entry_.at * 8, entry_.parity)) read_entry();
  }

  __device__ __forceinline__ void release(uint32_t ring, int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring + kEmpty + slot * 8);
    __syncwarp();  // else the compiler takes the lanes of a loop that this ends to be apart
  }

  __device__ void take_query(Entry entry) {
    const int slot = entry.key_slot();
    mbarrier_wait(key_ring_ + slot * 8, entry.key_parity());
    query_tile_ = smem_.query_tiles[slot];
    if (!entry.last()) {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) load_a<kBlockBytes>(query_ + 4 * k, smem_.key_tiles[slot], k);
      clear_a(query_, query_tile_.valid);
      fence_proxy_async();  // an arrival alone does not wait for the loads, and TMA writes there next
    }
    release(key_ring_, slot);
  }

  // One key tile. first: out_ holds nothing yet.
  __device__ __forceinline__ void attend(Entry entry, bool first) {
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
      rows_.update(logits, keys, args_.scale_log2);
    }
    release(key_ring_, key_slot);
    uint32_t weights[kTile / 4];
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) weights[i] = pack<T>(logits[2 * i], logits[2 * i + 1]);
    if (!first) rows_.rescale(out_);

    mbarrier_wait(value_ring_ + value_slot * 8, entry.value_parity());
    if (keys < kTile) clear_rows<Smem::kColumnBlocks, kTile>(smem_.value_tiles[value_slot][0], keys, kOwn + index_);
    const MNMajor<kBlockBytes> value(smem_.value_tiles[value_slot]);
    pin(out_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      wgmma<T, Major::kMN>(out_, weights + 4 * k, value.step(k), k > 0 || !first);
    }
    wgmma_commit();
    look_ahead();  // in the shade of the product
    wgmma_wait<0>();
    pin(out_);
    release(value_ring_, value_slot);
  }

  __device__ void store(bool any_keys) {
    const Shape& shape = args_.shape;
    const auto [batch, head, tile, valid_rows] = query_tile_;
    T* const out = static_cast<T*>(args_.out) + head * kHeadDim;
    float* const lse = args_.lse + (batch * shape.heads + head) * shape.query_length() + tile * kTile;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = accumulator_row(2 * pair);
      const bool valid = row < valid_rows && any_keys;
      float norm, row_lse;
      rows_.finish(pair, any_keys, &norm, &row_lse);
      if (threadIdx.x % 4 == 0) lse[row] = valid ? row_lse : -INFINITY;
      const int64_t token = batch * shape.query_length() + tile * kTile + row;
      store_row(out + token * shape.heads * kHeadDim, out_, pair, norm, valid);
    }
  }

  Smem& smem_;
  const Arguments& args_;
  const int index_;
  const uint32_t queued_, queue_, key_ring_, value_ring_;
  Cursor<kEntries> entry_;
  Entry next_;  // none until it is known
  QueryTile query_tile_;
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
    for (typename Smem::Ring* ring : {&smem.keys, &smem.values}) {
      for (int i = 0; i < Smem::kSlots; ++i) {
        mbarrier_init(shared_address(&ring->full[i]), 1);
        mbarrier_init(shared_address(&ring->empty[i]), kConsumers * kWarps);
      }
    }
    for (auto& queue : smem.queued) {
      for (uint64_t& entry : queue) mbarrier_init(shared_address(&entry), 1);
    }
    for (int i = 0; i < kMails; ++i) {
      mbarrier_init(shared_address(&smem.mail_full[i]), 1);
      mbarrier_init(shared_address(&smem.mail_empty[i]), 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    setmaxnreg_dec<32>();
    const int warp = __shfl_sync(kWholeWarp, threadIdx.x / 32, 0);
    if (warp == 0) KeyProducer<kHeadDim>(smem, args, &query, &key).run();
    else if (warp == 1) ValueProducer<kHeadDim>(smem, args, &value).run();
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
    return EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, kHeadDim, kTile, kHeadDim / kSwizzleColumns);
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
