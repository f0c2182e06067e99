// Forward for tiles of 128 tokens: a CTA takes two query tiles of a head, each with its own list, so that the tensor cores work
// for the one while the softmax of the other runs.
//
// CTA: 16 warps, one per SM. Which tiles it takes the hardware says: its own, then those of CTAs that it cancels before they start.
//   warps 0-3, 4-7  softmax of query tile 0, 1: a row a thread    192 registers
//   warps 8-11      correction: scales and reads the outputs        80
//   warp 12         products: one lane issues them                  48
//   warp 13         stores outputs
//   warp 14         loads
//   warp 15         scheduler: takes work, walks both lists, tells all others step by step what is next
//
// A step is a key tile for each query tile; where they are the same, it is loaded once. Of item, step and query tile:
//
//   tensor cores  S0(r+1)=Q0 K'  | O1 += P1(r) V | S1(r+1)=Q1 K'  | O0 += P0(r+1) V | S0(r+2) ...
//   softmax 0                      max, alpha, P0(r+1)                                max ...
//   softmax 1      P1(r)                           max, alpha, P1(r+1)
//   correction     O1 *= alpha     O0 *= alpha ...
//
// Tensor memory, columns: S0 0..127, S1 128..255, O0 256..383, O1 384..511. P, 64 columns, replaces the S it was made of.
//
// Barriers             arrivals              meaning (waiter)
//   messages: full[16]  scheduler            there is a message (14 warps)
//   messages: empty[16] a lane of 14 warps   all have read it (scheduler)
//   kv_full[slot]       loader + bytes       K or V of a key tile is there (products)
//   kv_empty[slot]      commit               its last product is done (loader)
//   q_full[i]           loader + bytes       Q of a query tile is there (products)
//   q_empty[i]          commit               its last S is done (loader)
//   s_full[i]           commit               S of a step is there (softmax)
//   p_head[i]           a lane of 8 warps    three quarters of P are there, and O is scaled, or in an item's first step free
//                                            (products)
//   p_tail[i]           a lane of 4 warps    the rest of P is there (products)
//   stat_full[i]        a lane of 4 warps    alpha, or at an item's end the norm, of every row (correction)
//   stat_empty[i]       a lane of 4 warps    has been read (softmax)
//   o_full[i]           commit               the last product of O is done (correction)
//   out_full[i]         a lane of 4 warps    the output, rounded, is in shared memory (storing warp)
//   out_empty[i]        storing warp         it has been read (correction)
//   work_full           scheduler + 16 bytes what try_cancel answers (scheduler)
//
// Shared memory: Q 64 KB, three K or V slots 96 KB, outputs 64 KB; then messages, statistics and barriers.
//
// Rows of V past a tile's size are made 0 before their product, since 0 * NaN is NaN. Those of K may hold anything: their logits
// are replaced.
//
// Source: FastVideo's block_sparse_kernel_sm100a for the roles, the order of products and the split of P. Not run on a
// Blackwell yet: ../README.md says what was proved how, and what to expect.
#include "forward.h"

#include "../../sm90/launch.cuh"
#include "../../sm90/lists.cuh"
#include "../../sm90/ring.cuh"
#include "../../sm90/tensor_map.h"
#include "../mma.cuh"
#include "../ptx.cuh"
#include "../softmax.cuh"

namespace vsa::sm100 {
namespace {

constexpr int kTile = 128;
constexpr int kHeadDim = 128;
constexpr int kQueries = 2;  // tiles of a CTA
constexpr int kThreads = 512;
constexpr int kSlots = 3;
constexpr int kBlocks = kHeadDim / kSwizzleColumns;
constexpr int kBlockBytes = kTile * 128;
constexpr int kMessages = 16;
constexpr int kReaders = 14 + 1;
constexpr int kTmemColumns = 512;

constexpr int kCorrectionWarp = 8, kProductWarp = 12, kStoreWarp = 13, kLoadWarp = 14, kSchedulerWarp = 15;

// Columns of tensor memory.
__device__ constexpr int Logits(int query) { return query * kTile; }
__device__ constexpr int Weights(int query) { return Logits(query); }
__device__ constexpr int Sums(int query) { return kQueries * kTile + query * kHeadDim; }

struct Arguments {
  Shape shape;
  Pairs pairs;
  float scale_log2;
  float* lse;
  const int32_t* order;
};

// For each query tile: a tile, -1 where there is none, and how many of its slots are valid.
struct Tiles {
  int tile[kQueries], size[kQueries];
  // Whether both have the same.
  __device__ bool shared() const { return tile[0] >= 0 && tile[0] == tile[1]; }
};

// What the scheduler tells everybody.
struct Message {
  enum Kind { kItemBegins, kStep, kItemEnds, kWorkEnds };
  int kind;
  Tiles tiles;          // kItemBegins: query tiles. kStep: key tiles
  int batch, head, token;  // kItemBegins; token: of the batch's first query
};
constexpr Tiles kNoTiles = {{-1, -1}, {0, 0}};

struct Shared {
  uint8_t query[kQueries][kBlocks][kBlockBytes];
  uint8_t slots[kSlots][kBlocks][kBlockBytes];
  uint8_t out[kQueries][kBlocks][kBlockBytes];
  uint4 response;  // of try_cancel
  float statistics[kQueries][kTile];
  Messages<Message, kMessages, kReaders> messages;
  uint64_t kv_full[kSlots], kv_empty[kSlots];
  uint64_t q_full[kQueries], q_empty[kQueries], s_full[kQueries], p_head[kQueries], p_tail[kQueries];
  uint64_t stat_full[kQueries], stat_empty[kQueries], o_full[kQueries], out_full[kQueries], out_empty[kQueries];
  uint64_t work_full;
  uint32_t tmem;

  // One thread; then __syncthreads.
  __device__ void init() {
    const auto make = [](uint64_t& barrier, int count) { mbarrier_init(shared_address(&barrier), count); };
    messages.init();
    for (int slot = 0; slot < kSlots; ++slot) {
      make(kv_full[slot], 1);
      make(kv_empty[slot], 1);
    }
    for (int i = 0; i < kQueries; ++i) {
      make(q_full[i], 1);
      make(q_empty[i], 1);
      make(s_full[i], 1);
      make(p_head[i], 8 * kWarpArrivals);
      make(p_tail[i], 4 * kWarpArrivals);
      make(stat_full[i], 4 * kWarpArrivals);
      make(stat_empty[i], 4 * kWarpArrivals);
      make(o_full[i], 1);
      make(out_full[i], 4 * kWarpArrivals);
      make(out_empty[i], 1);
    }
    make(work_full, 1);
    fence_mbarrier_init();
  }
};

// A barrier, waited for phase after phase.
struct Phase {
  uint32_t parity = 0;
  // Until the next phase is over.
  __device__ void wait(const uint64_t& barrier) {
    mbarrier_wait(shared_address(&barrier), parity);
    parity ^= 1;
  }
  // For who is one phase ahead: a fresh barrier counts as one whose phase is over.
  static __device__ Phase Ahead() { return {1}; }
};

// All lanes have done what comes before.
__device__ __forceinline__ void warp_arrive(uint64_t& barrier) {
  __syncwarp();
  if (arrives()) mbarrier_arrive(shared_address(&barrier));
}

// The reading end of the messages, with what they say known to be the same in all lanes.
class Inbox {
 public:
  __device__ explicit Inbox(Shared& smem) : smem_(smem) {}
  __device__ Message next() {
    Message message = smem_.messages.read(place_);
    message.kind = uniform(message.kind);
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      message.tiles.tile[i] = uniform(message.tiles.tile[i]);
      message.tiles.size[i] = uniform(message.tiles.size[i]);
    }
    return message;
  }

 private:
  Shared& smem_;
  Messages<Message, kMessages, kReaders>::Place place_;
};

// In which order slots are filled and used between two steps: V of the one, K of the next, first of query tile 0, then of 1. visit(is V,
// query tile, the step it belongs to, whether this is the first and the last use of the slot).
template <class Visit>
__device__ void for_uses(const Tiles& previous, const Tiles& next, Visit visit) {
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    if (previous.tile[i] >= 0) visit(true, i, previous, !(i > 0 && previous.shared()), !(i == 0 && previous.shared()));
    if (next.tile[i] >= 0) visit(false, i, next, !(i > 0 && next.shared()), !(i == 0 && next.shared()));
  }
}

__device__ void schedule(Shared& smem, const Arguments& args) {
  const Shape& shape = args.shape;
  const int pairs = static_cast<int>(shape.query_tiles + kQueries - 1) / kQueries;
  Messages<Message, kMessages, kReaders>::Place place;
  for (uint32_t parity = 0, work = blockIdx.x;; parity ^= 1) {
    // Asked for now: by the time this item has been told, the answer is there.
    if (elect()) {
      mbarrier_arrive_expect_tx(shared_address(&smem.work_full), sizeof(smem.response));
      try_cancel(shared_address(&smem.response), shared_address(&smem.work_full));
    }
    __syncwarp();

    const int batch_head = work / pairs, first = work % pairs * kQueries;
    const int batch = batch_head / static_cast<int>(shape.heads), head = batch_head % static_cast<int>(shape.heads);
    Tiles queries = kNoTiles;
    KeyTiles keys[kQueries];
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (first + i >= shape.query_tiles) continue;
      queries.tile[i] = args.order[batch_head * shape.query_tiles + first + i];
      queries.size[i] = args.pairs.query_sizes[batch * shape.query_tiles + queries.tile[i]];
      if (queries.size[i] > 0) keys[i] = KeyTiles(shape, args.pairs, batch, head, queries.tile[i]);
    }
    smem.messages.write(place, {Message::kItemBegins, queries, batch, head, batch * static_cast<int>(shape.query_length())});
    while (true) {
      Tiles step = kNoTiles;
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (keys[i].tile() == KeyTiles::kNone) continue;
        step.tile[i] = keys[i].tile();
        step.size[i] = keys[i].size();
        keys[i].next();
      }
      if (step.tile[0] < 0 && step.tile[1] < 0) break;
      smem.messages.write(place, {Message::kStep, step, 0, 0, 0});
    }
    smem.messages.write(place, {Message::kItemEnds, kNoTiles, 0, 0, 0});

    mbarrier_wait(shared_address(&smem.work_full), parity);
    const int next = cancelled_cta(shared_address(&smem.response));
    fence_proxy_async();  // it will be overwritten: not before all lanes have read it
    __syncwarp();
    if (next < 0) break;
    work = uniform(next);
  }
  smem.messages.write(place, {Message::kWorkEnds, kNoTiles, 0, 0, 0});
}

__device__ void load(Shared& smem, const Arguments& args, const CUtensorMap* query, const CUtensorMap* key,
                     const CUtensorMap* value) {
  Inbox inbox(smem);
  Cursor<kSlots> slot;
  Phase q_empty[kQueries] = {Phase::Ahead(), Phase::Ahead()};
  Message item{};
  Tiles previous = kNoTiles;
  int kv_head = 0, first_key = 0;
  bool loaded[kQueries] = {};  // Q
  for (Message message; (message = inbox.next()).kind != Message::kWorkEnds; previous = message.tiles) {
    if (message.kind == Message::kItemBegins) {
      item = message;
      item.head = uniform(message.head);
      kv_head = item.head / static_cast<int>(args.shape.groups());
      first_key = uniform(message.batch) * static_cast<int>(args.shape.key_length());
      message.tiles = kNoTiles;
      loaded[0] = loaded[1] = false;
    }
    for_uses(previous, message.tiles, [&](bool is_value, int i, const Tiles& step, bool first, bool) {
      if (!first) return;
      mbarrier_wait(shared_address(&smem.kv_empty[slot.at]), slot.parity ^ 1);
      if (elect()) {
        const uint32_t full = shared_address(&smem.kv_full[slot.at]);
        mbarrier_arrive_expect_tx(full, sizeof(smem.slots[0]));
        tma_load(shared_address(smem.slots[slot.at]), is_value ? value : key, full, kv_head,
                 first_key + step.tile[i] * kTile);
      }
      __syncwarp();
      slot.advance();
    });
    if (message.kind != Message::kStep) continue;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {  // behind K, which need not wait for the item before
      if (message.tiles.tile[i] < 0 || loaded[i]) continue;
      loaded[i] = true;
      q_empty[i].wait(smem.q_empty[i]);
      if (elect()) {
        const uint32_t full = shared_address(&smem.q_full[i]);
        mbarrier_arrive_expect_tx(full, sizeof(smem.query[0]));
        tma_load(shared_address(smem.query[i]), query, full, item.head, item.token + item.tiles.tile[i] * kTile);
      }
      __syncwarp();
    }
  }
}

template <class T>
__device__ void multiply(Shared& smem, uint32_t tmem) {
  constexpr uint32_t kScores = Instruction<T>(kTile, kTile, Major::kK, Major::kK);
  constexpr uint32_t kOutputs = Instruction<T>(kTile, kHeadDim, Major::kK, Major::kMN);
  constexpr int kSteps = kTile / 16, kHeadSteps = kSteps * 3 / 4;
  const bool leads = elect();  // the same lane for products and commits
  const int lane = threadIdx.x % 32;
  Inbox inbox(smem);
  Cursor<kSlots> slot;
  Phase q_full[kQueries], p_head[kQueries], p_tail[kQueries];
  Tiles previous = kNoTiles;
  bool any[kQueries] = {};   // S of the item yet
  bool adds[kQueries] = {};  // to O
  int slot_of[2] = {};       // V's and K's, until their last use
  const auto commit = [&](uint64_t& barrier) {
    if (leads) tcgen05_commit(shared_address(&barrier));
    __syncwarp();
  };
  for (Message message; (message = inbox.next()).kind != Message::kWorkEnds; previous = message.tiles) {
    const bool ends = message.kind == Message::kItemEnds;
    if (message.kind == Message::kItemBegins) {
      message.tiles = kNoTiles;
      any[0] = any[1] = adds[0] = adds[1] = false;
    }
#pragma unroll
    for (int i = 0; i < kQueries && ends; ++i) {
      if (any[i]) commit(smem.q_empty[i]);
    }
    for_uses(previous, message.tiles, [&](bool is_value, int i, const Tiles& step, bool first, bool last) {
      if (is_value) p_head[i].wait(smem.p_head[i]);
      else if (!any[i]) q_full[i].wait(smem.q_full[i]);
      if (first) {
        slot_of[is_value] = slot.at;
        mbarrier_wait(shared_address(&smem.kv_full[slot.at]), slot.parity);
        slot.advance();
        if (is_value && step.size[i] < kTile) {
          auto* const rows = reinterpret_cast<int4*>(smem.slots[slot_of[1]]);
          constexpr int kChunks = 128 / sizeof(int4);  // of a row
          for (int at = step.size[i] * kChunks + lane; at < kTile * kChunks; at += 32) {
            for (int block = 0; block < kBlocks; ++block) rows[block * kTile * kChunks + at] = int4{};
          }
          fence_proxy_async();
          __syncwarp();
        }
      }
      tcgen05_fence_after_sync();
      const uint32_t keys = shared_address(smem.slots[slot_of[is_value]]);
      if (is_value) {
        const auto products = [&](int begin, int end) {
          for (int k = begin; k < end && leads; ++k) {
            tcgen05_mma(tmem + Sums(i), tmem + Weights(i) + k * 8, mn_major(keys, kBlockBytes, k), kOutputs, adds[i] || k > 0);
          }
          __syncwarp();
        };
        products(0, kHeadSteps);
        p_tail[i].wait(smem.p_tail[i]);
        tcgen05_fence_after_sync();
        products(kHeadSteps, kSteps);
        adds[i] = true;
        if (ends) commit(smem.o_full[i]);
      } else {
        const uint32_t rows = shared_address(smem.query[i]);
        for (int k = 0; k < kHeadDim / 16 && leads; ++k) {
          tcgen05_mma(tmem + Logits(i), k_major(rows, kBlockBytes, k), k_major(keys, kBlockBytes, k), kScores, k > 0);
        }
        any[i] = true;
        commit(smem.s_full[i]);
      }
      if (last) commit(smem.kv_empty[slot_of[is_value]]);
    });
#pragma unroll
    for (int i = 0; i < kQueries && ends; ++i) {
      if (any[i] && previous.tile[i] < 0) commit(smem.o_full[i]);  // its last product was before
    }
  }
}

template <class T>
__device__ void softmax(Shared& smem, const Arguments& args, uint32_t tmem, int i) {
  const int row = threadIdx.x % kTile;
  const uint32_t lanes = tmem + (static_cast<uint32_t>(row / 32 * 32) << 16);
  Inbox inbox(smem);
  Phase s_full, stat_empty = Phase::Ahead();
  int tile = -1, size = 0;  // of the item
  float* lse = nullptr;     // of its head
  RowStatistics statistics;
  bool any = false;
  const auto tell = [&](float statistic) {
    stat_empty.wait(smem.stat_empty[i]);
    smem.statistics[i][row] = statistic;
    warp_arrive(smem.stat_full[i]);
  };
  for (Message message; (message = inbox.next()).kind != Message::kWorkEnds;) {
    const int this_tile = i == 0 ? message.tiles.tile[0] : message.tiles.tile[1];
    const int this_size = i == 0 ? message.tiles.size[0] : message.tiles.size[1];
    if (message.kind == Message::kItemBegins) {
      tile = this_tile;
      size = this_size;
      lse = args.lse + (int64_t{message.batch} * args.shape.heads + message.head) * args.shape.query_length();
      statistics = RowStatistics();
      any = false;
    } else if (message.kind == Message::kStep && this_tile >= 0) {
      s_full.wait(smem.s_full[i]);
      tcgen05_fence_after_sync();
      RowBits logits;
#pragma unroll
      for (int part = 0; part < kParts; ++part) tmem_load(logits[part], lanes + Logits(i) + part * kPartColumns);
      tmem_wait_load(logits);
      const float factor = statistics.see(logits, this_size, args.scale_log2);
      if (any) tell(factor);
      any = true;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t words[kPartColumns / 2];
        statistics.weigh<T>(logits, part, args.scale_log2, words);
        tmem_store(lanes + Weights(i) + part * (kPartColumns / 2), words);
        if (part < kParts - 2) continue;
        tmem_wait_store();
        tcgen05_fence_before_sync();
        warp_arrive(part == kParts - 1 ? smem.p_tail[i] : smem.p_head[i]);
      }
      statistics.add(logits);
    } else if (message.kind == Message::kItemEnds && tile >= 0) {
      float norm, row_lse;
      statistics.finish(any, args.scale_log2, &norm, &row_lse);
      const bool valid = row < size;
      tell(valid ? norm : 0);
      lse[tile * kTile + row] = valid ? row_lse : -INFINITY;
    }
  }
}

template <class T>
__device__ void correct(Shared& smem, uint32_t tmem) {
  constexpr int kLoads = 2, kCount = 16, kAtOnce = kLoads * kCount;  // columns; more would not fit into the registers
  const int row = threadIdx.x % kTile;
  const uint32_t lanes = tmem + (static_cast<uint32_t>(row / 32 * 32) << 16);
  Inbox inbox(smem);
  Phase stat_full[kQueries], o_full[kQueries], out_empty[kQueries] = {Phase::Ahead(), Phase::Ahead()};
  Tiles queries = kNoTiles;
  bool any[kQueries] = {};
  const auto statistic = [&](int i) {
    stat_full[i].wait(smem.stat_full[i]);
    const float x = smem.statistics[i][row];
    warp_arrive(smem.stat_empty[i]);
    return x;
  };
  for (Message message; (message = inbox.next()).kind != Message::kWorkEnds;) {
    if (message.kind == Message::kItemBegins) {
      queries = message.tiles;
      any[0] = any[1] = false;
    } else if (message.kind == Message::kStep) {
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (message.tiles.tile[i] < 0) continue;
        const float factor = any[i] ? statistic(i) : 1;  // at first there is nothing to scale, and what was there has been read
        any[i] = true;
        if (__any_sync(kWholeWarp, factor != 1)) {
          tcgen05_fence_after_sync();
#pragma unroll 1
          for (int at = 0; at < kHeadDim; at += kAtOnce) {
            uint32_t sums[kLoads][kCount];
#pragma unroll
            for (int part = 0; part < kLoads; ++part) tmem_load(sums[part], lanes + Sums(i) + at + part * kCount);
            tmem_wait_load(sums);
#pragma unroll
            for (int part = 0; part < kLoads; ++part) {
#pragma unroll
              for (int j = 0; j < kCount; ++j) {
                sums[part][j] = static_cast<uint32_t>(__float_as_int(__int_as_float(static_cast<int>(sums[part][j])) * factor));
              }
              tmem_store(lanes + Sums(i) + at + part * kCount, sums[part]);
            }
          }
          tmem_wait_store();
        }
        tcgen05_fence_before_sync();
        warp_arrive(smem.p_head[i]);
      }
    } else if (message.kind == Message::kItemEnds) {
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (queries.tile[i] < 0) continue;
        const float norm = statistic(i);
        if (any[i]) o_full[i].wait(smem.o_full[i]);  // else nobody speaks of it
        tcgen05_fence_after_sync();
        out_empty[i].wait(smem.out_empty[i]);
#pragma unroll 1
        for (int at = 0; at < kHeadDim; at += kAtOnce) {
          uint32_t sums[kLoads][kCount];
#pragma unroll
          for (int part = 0; part < kLoads; ++part) tmem_load(sums[part], lanes + Sums(i) + at + part * kCount);
          tmem_wait_load(sums);
          uint8_t* const to = smem.out[i][at / kSwizzleColumns] + row * 128;
#pragma unroll
          for (int chunk = 0; chunk < kAtOnce / 8; ++chunk) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const uint32_t* const pair = &sums[chunk * 8 / kCount][chunk * 8 % kCount + 2 * j];
              const auto normal = [&](uint32_t sum) { return __int_as_float(static_cast<int>(sum)) * norm; };
              words[j] = norm == 0 ? 0 : pack<T>(normal(pair[0]), normal(pair[1]));  // 0: the sums are of something else, if any
            }
            const int place = at % kSwizzleColumns / 8 + chunk;
            *reinterpret_cast<uint4*>(to + (place ^ row % 8) * 16) = make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
        fence_proxy_async();
        tcgen05_fence_before_sync();
        warp_arrive(smem.out_full[i]);
      }
    }
  }
}

__device__ void store(Shared& smem, const CUtensorMap* out) {
  Inbox inbox(smem);
  Phase out_full[kQueries];
  Message item{};
  for (Message message; (message = inbox.next()).kind != Message::kWorkEnds;) {
    if (message.kind == Message::kItemBegins) item = message;
    if (message.kind != Message::kItemEnds) continue;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (item.tiles.tile[i] < 0) continue;
      out_full[i].wait(smem.out_full[i]);
      if (elect()) {
        tma_store(out, shared_address(smem.out[i]), 0, item.head, item.token + item.tiles.tile[i] * kTile);
        tma_store_commit();
        tma_store_wait_read();
        mbarrier_arrive(shared_address(&smem.out_empty[i]));
      }
      __syncwarp();
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    forward_tile128(const __grid_constant__ Arguments args, const __grid_constant__ CUtensorMap query,
                    const __grid_constant__ CUtensorMap key, const __grid_constant__ CUtensorMap value,
                    const __grid_constant__ CUtensorMap out) {
  static_assert(sizeof(Shared) <= 227 * 1024);
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_shared());
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) smem.init();
  if (warp == 0) tmem_alloc(shared_address(&smem.tmem), kTmemColumns);
  tcgen05_fence_before_sync();
  __syncthreads();
  tcgen05_fence_after_sync();
  const uint32_t tmem = smem.tmem;
  if (warp < kCorrectionWarp) {
    setmaxnreg_inc<192>();
    softmax<T>(smem, args, tmem, warp / 4);
  } else if (warp < kProductWarp) {
    setmaxnreg_dec<80>();
    correct<T>(smem, tmem);
  } else {
    setmaxnreg_dec<48>();
    if (warp == kProductWarp) multiply<T>(smem, tmem);
    if (warp == kStoreWarp) store(smem, &out);
    if (warp == kLoadWarp) load(smem, args, &query, &key, &value);
    if (warp == kSchedulerWarp) schedule(smem, args);
  }
  tcgen05_fence_before_sync();
  __syncthreads();
  tcgen05_fence_after_sync();
  if (warp == 0) tmem_dealloc(tmem, kTmemColumns);
}

template <class T>
std::string LaunchTile(const ForwardParams& params, const int32_t* order, cudaStream_t stream) {
  const Shape& shape = params.shape;
  CUtensorMap query, key, value, out;
  const auto encode = [&](CUtensorMap* map, const void* x, int64_t length, int64_t heads) {
    return EncodeTokens(map, shape.dtype, x, shape.batch * length, heads, kHeadDim, kTile, kBlocks);
  };
  std::string error = encode(&query, params.query, shape.query_length(), shape.heads);
  if (error.empty()) error = encode(&key, params.key, shape.key_length(), shape.kv_heads);
  if (error.empty()) error = encode(&value, params.value, shape.key_length(), shape.kv_heads);
  if (error.empty()) error = encode(&out, params.out, shape.query_length(), shape.heads);
  if (!error.empty()) return error;
  const Arguments args{shape, params.pairs, static_cast<float>(params.scale * kLog2E), static_cast<float*>(params.lse), order};
  const int64_t items = shape.batch * shape.heads * ((shape.query_tiles + kQueries - 1) / kQueries);
  const cudaError_t set = cudaFuncSetAttribute(forward_tile128<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(sizeof(Shared)));
  if (set != cudaSuccess) return Said(set);
  return Said(Launch(forward_tile128<T>, items, 1, kThreads, sizeof(Shared), stream, args, query, key, value, out));
}

}  // namespace

std::string Forward128(const ForwardParams& params, const int32_t* order, cudaStream_t stream) {
  return params.shape.dtype == DType::kFloat16 ? LaunchTile<__half>(params, order, stream)
                                               : LaunchTile<__nv_bfloat16>(params, order, stream);
}

}  // namespace vsa::sm100
