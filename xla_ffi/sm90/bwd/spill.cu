// dK, dV and dQ in one launch, every logit's gradient computed once: the keys stay, and what dQ needs of a step, dS
// rounded, is kept in global memory until all keys of its head are done; then the queries stay and sum dS K.
//
// Key items: see keys.cuh. Query items: dQ += dS K over the kept pairs of 128 query rows (or a tile of 64) in list
// order. Five matrix products where the plain pair (dkdv.cu, dq.cu) has seven, for 2 bytes written and read a score.
//
// CTA: 3 warpgroups, persistent, one per SM.
//   warpgroup 0     producers: warp 0, with two streams warp 1 too, takes tickets, walks lists and issues every load;
//                   warps 2 and 3 store what consumers 1 and 2 stage, and say so when an item is done
//   warpgroup 1, 2  consumers of 64 keys or queries each
//
// Tickets: key items, head after head; from `lag` key items on, query items of the heads before between them, so that
// the loads of the one and the products of the other run beside each other. The kept gradients of a kv head lie in
// one of `buffers` places.
//
//   key items      head 0    head 1           head 2           head 3 ...
//   query items              (lag)   head 0           head 1            ...
//   buffer         0         1       reads 0  2       reads 1  0
//
// Two counters per kv head say how many consumers are done with its key items and with its query items. Every wait
// is for earlier tickets, which running CTAs hold: no deadlock.
//
// Ring: Q with lse, dO with delta; or K, dS. A step's dS is staged in shared memory, two stages a consumer, and goes
// out by bulk copies that leave the L2 first. An item's gradients go through the same stages, 64 columns each.
//
// Barriers beside those of pipeline.cuh
//   stage_full[2][2]   one lane of 4 warps   a stage is filled, or says more in its note (storing warp)
//   stage_empty[2][2]  storing warp          its bytes have been read (consumer)
//
// Shared memory: K and V 64 KB, ring of eight 16 KB slots 128 KB, dS 32 KB, row values 2 KB.
//
// Invariants: what is kept is finite or a NaN that dense attention gives too: rows of padded keys and columns of
// padded queries are 0. Blocks of query rows without valid rows are never written; what is read there reaches only
// rows of dQ that are written as 0.
//
// Bound: power, and the L2 (160 KB a pair of tiles of 128; 67 % busy in a profiled run). Measured (as in dkdv.cu, but
// 2026-12-01, 5 products counted, transposing included): tiles of 128 6.58 ms, 551 TFLOP/s; 256 6.56 ms, 552; 64 7.30 ms,
// 496. ../README.md has how it came to that.
#include <algorithm>

#include "../launch.cuh"
#include "../lists.cuh"
#include "keys.cuh"
#include "maps.cuh"
#include "parts.h"
#include "pipeline.cuh"
#include "query_tiles.cuh"

namespace vsa::sm90 {
namespace {

constexpr int kHeadDim = 128;
constexpr int kStages = 2;  // of dS, a consumer

// What a stage's note says: the number of a kept block; or that the work ends; or which 64 columns of which gradient the
// stage has; or which counter to raise.
constexpr int kBlocks = kHeadDim / kSwizzleColumns;  // of 64 columns
constexpr int kStoringEnds = -1;
constexpr int kFirstGradient = kStoringEnds - 1;                      // block b of gradient g: this - g * kBlocks - b
constexpr int kFirstCounter = kFirstGradient - kGradients * kBlocks;  // counter i: this - i

// Which item a ticket stands for.
struct Schedule {
  int heads;        // B * K
  int key_items;    // of a kv head
  int query_items;  // of a kv head
  int ratio;        // query places after each key item
  int lag;          // key items before the first query place
  int buffers;
  int all_key_items, places, tickets;  // products of the above: of all heads, of a kv head, of all

  struct Entry {
    bool keys, none;
    int head, item;
  };
  __device__ Entry at(int ticket) const {
    int index = ticket, place = 0;
    if (ticket >= lag) {
      index = lag + (ticket - lag) / (1 + ratio);
      place = (ticket - lag) % (1 + ratio);
    }
    if (place == 0) return {true, index >= all_key_items, index / key_items, index % key_items};
    const int query = (index - lag) * ratio + place - 1;
    return {false, query % places >= query_items, query / places, query % places};
  }
};

struct Arguments {
  Shape shape;
  Pairs pairs;
  Transposed transposed;
  Schedule schedule;
  float scale, scale_log2;
  const float* lse;
  const float* delta;
  uint8_t* kept;
  int pairs_of_head;
  int* tickets;
  int* done;  // [2, B * K]: consumers that are done with key items, with query items
};

struct Stages {
  uint8_t stages[kConsumers][kStages][kKeptBytes];  // first: TMA swizzles by the address
};

template <int kStreams>
struct Memory : Stages, Shared<kHeadDim, kStreams, 8> {
  uint64_t stage_full[kConsumers][kStages], stage_empty[kConsumers][kStages];
  int stage_notes[kConsumers][kStages];
  int2 stage_rows[kConsumers][kStages];  // of a gradient: its head, and its first token, over batches

  __device__ void init() {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(shared_address(&stage_full[consumer][i]), kWarpgroup / 32 * kWarpArrivals);
        mbarrier_init(shared_address(&stage_empty[consumer][i]), kWarpArrivals);
      }
    }
    Shared<kHeadDim, kStreams, 8>::init();
  }
};

// The kept pairs of a query head: the dense rows', then the lists'.
int64_t PairsOfHead(const Shape& shape) {
  return shape.num_dense_rows * shape.key_tiles + shape.rows() * (shape.num_prefix_tiles + shape.width);
}

// The first pair of a query tile. What is kept is [buffer, query head of the kv head, pair, key block, query block].
__device__ int FirstPair(const Arguments& args, int kv, int head, int query_tile) {
  const Shape& shape = args.shape;
  const int groups = static_cast<int>(shape.groups());
  const int dense = min(query_tile, static_cast<int>(shape.num_dense_rows));
  const int before = kv % args.schedule.buffers * groups + head % groups;
  return before * args.pairs_of_head + dense * static_cast<int>(shape.key_tiles) +
         (query_tile - dense) * static_cast<int>(shape.num_prefix_tiles + shape.width);
}

template <class Smem>
class Producer {
 public:
  __device__ Producer(Smem& smem, const Arguments& args, const Maps& maps, int stream)
      : loader_(smem, stream), args_(args), maps_(maps) {}

  __device__ void run() {
    loader_.run(args_.tickets, args_.schedule.tickets, [&](int ticket) {
      const Schedule::Entry entry = args_.schedule.at(ticket);
      if (entry.none) return false;
      if (entry.keys) keys(entry.head, entry.item);
      else queries(entry.head, entry.item);
      return true;
    });
  }

 private:
  __device__ void keys(int kv, int item) {
    const int blocks = static_cast<int>(args_.shape.tile_size) / kBlockRows;
    const int key_block = item * Smem::kItemRows / kBlockRows % blocks;
    const auto await = [&] {
      const int before = kv - args_.schedule.buffers;
      if (before >= 0) await_all(args_.done + args_.schedule.heads + before, args_.schedule.query_items);
    };
    const auto kept = [&](int head, int query_tile, int place) {
      return ((FirstPair(args_, kv, head, query_tile) + place) * blocks + key_block) * blocks;
    };
    load_key_item(loader_, args_, maps_, kv, item, await, kept);
  }

  __device__ void queries(int kv, int item) {
    const Shape& shape = args_.shape;
    const int tile_size = static_cast<int>(shape.tile_size), blocks = tile_size / kBlockRows;
    const int items = static_cast<int>(shape.query_length()) / Smem::kItemRows;
    const int batch = kv / static_cast<int>(shape.kv_heads), kv_head = kv % static_cast<int>(shape.kv_heads);
    const int head = kv_head * static_cast<int>(shape.groups()) + item / items;
    const int token = item % items * Smem::kItemRows, query_tile = token / tile_size;
    const int valid = valid_rows(args_.pairs.query_sizes[batch * shape.query_tiles + query_tile], token);
    KeyTiles tiles(shape, args_.pairs, batch, head, query_tile);
    if (valid == 0) tiles = KeyTiles();
    await_all(args_.done + kv, args_.schedule.key_items);
    const int first_block = FirstPair(args_, kv, head, query_tile) * blocks * blocks + token % tile_size / kBlockRows;
    const auto kept = [&](int step) { return args_.kept + (first_block + int64_t{step} * blocks) * kKeptBytes; };
    loader_.announce({batch, ~head, token, valid});
    for (; tiles.tile() != KeyTiles::kNone; tiles.next()) {
      int step = tiles.place() * blocks;
#pragma unroll 1
      for (int at = 0; at < tiles.size(); at += kBlockRows, ++step) {
        const int over_batches = batch * static_cast<int>(shape.key_length()) + tiles.tile() * tile_size + at;
        loader_.load(&maps_.key, kv_head, over_batches, min(tiles.size() - at, kBlockRows));
        loader_.load_kept(kept(step));
      }
    }
  }

  __device__ int valid_rows(int size, int token) {
    return min(max(size - token % static_cast<int>(args_.shape.tile_size), 0), Smem::kItemRows);
  }

  // All consumers are done with that many items.
  __device__ void await_all(const int* counter, int items) {
    await(counter, items * (kConsumers / Smem::kStreams));
  }

  Loader<Smem> loader_;
  const Arguments& args_;
  const Maps& maps_;
};

// A consumer's side of its stages.
template <class Smem>
class Keeper {
 public:
  __device__ Keeper(Smem& smem, const Reader<Smem>& reader, const Arguments& args, int consumer)
      : smem_(smem), reader_(reader), args_(args), consumer_(consumer) {}

  // Gradients [64 keys, 64 queries] as A of wgmma; rows past `valid` become 0.
  __device__ void keep(const uint32_t (&d_logits)[kBlockRows / 4], int slot, int valid) {
    const int block = reader_.kept(slot) + reader_.row_block() * static_cast<int>(args_.shape.tile_size / kBlockRows);
    wait();
    const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    const uint32_t stage = shared_address(smem_.stages[consumer_][stage_.at]);
    const bool low = accumulator_row(0) < valid, high = accumulator_row(2) < valid;
#pragma unroll
    for (int k = 0; k < kBlockRows / 16; ++k) {
      const uint32_t* x = d_logits + 4 * k;
      stmatrix(stage + row * 128 + ((2 * k + lane / 16) ^ row % 8) * 16, low ? x[0] : 0, high ? x[1] : 0,
               low ? x[2] : 0, high ? x[3] : 0);
    }
    say(block);
  }

  // Rows of a gradient [64, H]; those past `valid` become 0. first_token: over batches.
  template <class T>
  __device__ void store(Gradient gradient, int head, int first_token, const float (&rows)[kHeadDim / 2], float scale,
                        int valid) {
    const float factor[2] = {scale, scale};
    const bool counts[2] = {accumulator_row(0) < valid, accumulator_row(2) < valid};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      wait();
      stage_rows<T>(shared_address(smem_.stages[consumer_][stage_.at]), rows, block, factor, counts);
      if (threadIdx.x % kWarpgroup == 0) smem_.stage_rows[consumer_][stage_.at] = {head, first_token};
      say(kFirstGradient - (gradient * kBlocks + block));
    }
  }

  // This consumer is done with an item; or with all.
  __device__ void raise(int counter) {
    wait();
    say(kFirstCounter - counter);
  }
  __device__ void end() {
    wait();
    say(kStoringEnds);
  }

 private:
  __device__ void wait() {
    mbarrier_wait(shared_address(&smem_.stage_empty[consumer_][stage_.at]), stage_.parity ^ 1);
  }

  __device__ void say(int note) {
    if (threadIdx.x % kWarpgroup == 0) smem_.stage_notes[consumer_][stage_.at] = note;
    __syncwarp();
    if (arrives()) mbarrier_arrive(shared_address(&smem_.stage_full[consumer_][stage_.at]));
    stage_.advance();
  }

  Smem& smem_;
  const Reader<Smem>& reader_;
  const Arguments& args_;
  const int consumer_;
  Cursor<kStages> stage_;
};

// The storing warp of one consumer.
template <class Smem>
__device__ void store_stages(Smem& smem, const Arguments& args, const Maps& maps, int consumer) {
  for (Cursor<kStages> stage;; stage.advance()) {
    mbarrier_wait(shared_address(&smem.stage_full[consumer][stage.at]), stage.parity);
    const int note = uniform(smem.stage_notes[consumer][stage.at]);
    if (note == kStoringEnds) return;
    if (elect()) {
      // Of what the consumer wrote. Here, not there, where it would wait for the writes: the memory model wants it anywhere
      // between them and the copy, in the same CTA.
      fence_proxy_async();
      const uint32_t from = shared_address(smem.stages[consumer][stage.at]);
      if (note <= kFirstCounter) {
        tma_store_wait();
        publish(args.done + kFirstCounter - note);
      } else if (note <= kFirstGradient) {
        const int which = kFirstGradient - note;
        const int2 rows = smem.stage_rows[consumer][stage.at];
        tma_store(&maps.gradients[which / kBlocks], from, which % kBlocks, rows.x, rows.y);
      } else {
        bulk_store_once(args.kept + int64_t{note} * kKeptBytes, from, kKeptBytes);
      }
      tma_store_commit();
      tma_store_wait_read();
    }
    __syncwarp();
    if (arrives()) mbarrier_arrive(shared_address(&smem.stage_empty[consumer][stage.at]));
    __syncwarp();
  }
}

// dQ of the queries of one item.
template <class T, class Smem>
__device__ void sum_kept(Reader<Smem>& reader, int keys, float (&d_query)[kHeadDim / 2]) {
  reader.release_resident();
  pin(d_query);
  for (; keys != kItemEnds; keys = reader.wait()) {
    const int key_slot = reader.take();
    reader.clear_rows(key_slot, keys);
    reader.wait();
    const int kept_slot = reader.take();
    const MNMajor<kKeptBytes> d_logits(reader.operand(kept_slot) + reader.row_block() * kKeptBytes);
    const MNMajor<kColumnBlockBytes> key(reader.operand(key_slot));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockRows / 16; ++k) {
      wgmma<T, Major::kMN, Major::kMN>(d_query, d_logits.step(k), key.step(k), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();  // at once: the loads are what takes time, and need the slots
    pin(d_query);
    reader.release(key_slot);
    reader.release(kept_slot);
  }
  reader.release(reader.take());
}

template <class T, class Smem>
__device__ void consume(Smem& smem, const Arguments& args, int index) {
  Reader<Smem> reader(smem, index);
  Keeper<Smem> keeper(smem, reader, args, index);
  const Shape& shape = args.shape;
  for (int rows; (rows = reader.wait()) != kWorkEnds;) {
    const Item item = reader.wait_resident();
    const int valid = item.valid - reader.first_row(), first_row = item.token + reader.first_row();
    const auto store = [&](Gradient gradient, int head, int64_t length, const auto& sums, float scale) {
      keeper.template store<T>(gradient, head, item.batch * static_cast<int>(length) + first_row, sums, scale, valid);
    };
    const bool queries = item.head < 0;
    const int kv_heads = static_cast<int>(shape.kv_heads), groups = static_cast<int>(shape.groups());
    if (queries) {
      float d_query[kHeadDim / 2] = {};
      sum_kept<T>(reader, rows, d_query);
      store(kDQuery, ~item.head, shape.query_length(), d_query, args.scale);
      keeper.raise(args.schedule.heads + item.batch * kv_heads + ~item.head / groups);
    } else {
      KeyConsumer<T, Smem> consumer(reader, args.scale_log2);
      consumer.accumulate(rows, [&](const auto& d_logits, int slot) { keeper.keep(d_logits, slot, valid); });
      store(kDValue, item.head, shape.key_length(), consumer.d_value(), 1);
      store(kDKey, item.head, shape.key_length(), consumer.d_key(), args.scale);
      keeper.raise(item.batch * kv_heads + item.head);
    }
  }
  keeper.end();
}

template <class T, int kStreams>
__global__ void __launch_bounds__(kThreads, 1)
    all_gradients(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
  using Smem = Memory<kStreams>;
  static_assert(sizeof(Smem) <= 227 * 1024);
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_shared());
  if (threadIdx.x == 0) smem.init();
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kWarpgroup / 32) {
    setmaxnreg_dec<24>();
    if (warp < kStreams) Producer<Smem>(smem, args, maps, kStreams == 1 ? 0 : warp).run();
    if (warp >= 2) store_stages(smem, args, maps, warp - 2);
  } else {
    setmaxnreg_inc<240>();
    consume<T>(smem, args, warp / (kWarpgroup / 32) - 1);
  }
}

template <int kStreams>
Schedule MakeSchedule(const Shape& shape) {
  constexpr int kLagItems = 400;  // three a processor: by then the last of a head have finished
  constexpr int kRows = Memory<kStreams>::kItemRows;
  Schedule schedule;
  schedule.heads = static_cast<int>(shape.batch * shape.kv_heads);
  schedule.key_items = static_cast<int>(shape.key_length() / kRows);
  schedule.query_items = static_cast<int>(shape.groups() * (shape.query_length() / kRows));
  schedule.ratio = (schedule.query_items + schedule.key_items - 1) / schedule.key_items;
  schedule.lag = schedule.key_items + kLagItems * kStreams;
  // By the time a buffer comes round, the query items that read it are a processor's item behind.
  const int late = (kLagItems + 132) * kStreams;
  schedule.buffers = std::min(schedule.heads, 2 + (late + schedule.key_items - 1) / schedule.key_items);
  schedule.all_key_items = schedule.heads * schedule.key_items;
  schedule.places = schedule.key_items * schedule.ratio;
  schedule.tickets = schedule.lag + schedule.all_key_items * (1 + schedule.ratio);
  return schedule;
}

bool SharesStream(const Shape& shape) { return shape.tile_size % (kBlockRows * kConsumers) == 0; }

Schedule ScheduleOf(const Shape& shape) {
  return SharesStream(shape) ? MakeSchedule<1>(shape) : MakeSchedule<2>(shape);
}

template <class T, int kStreams>
std::string Launch(const BackwardParams& params, const Transposed& transposed, void* kept, int* counters,
                   cudaStream_t stream) {
  const Shape& shape = params.shape;
  Maps maps;
  const std::string error = Encode(params, &maps);
  if (!error.empty()) return error;
  const Schedule schedule = ScheduleOf(shape);
  const Arguments args{shape,
                       params.pairs,
                       transposed,
                       schedule,
                       static_cast<float>(params.scale),
                       static_cast<float>(params.scale * kLog2E),
                       static_cast<const float*>(params.lse),
                       static_cast<const float*>(params.delta),
                       static_cast<uint8_t*>(kept),
                       static_cast<int>(PairsOfHead(shape)),
                       counters,
                       counters + 1};
  return LaunchPersistent(all_gradients<T, kStreams>, 1, kThreads, sizeof(Memory<kStreams>), schedule.tickets, counters,
                          SpillCounters(shape), stream, args, maps);
}

template <class T>
std::string LaunchFor(const BackwardParams& params, const Transposed& transposed, void* kept, int* counters,
                      cudaStream_t stream) {
  return SharesStream(params.shape) ? Launch<T, 1>(params, transposed, kept, counters, stream)
                                    : Launch<T, 2>(params, transposed, kept, counters, stream);
}

}  // namespace

int64_t SpillBytes(const Shape& shape) {
  if (shape.head_dim != kHeadDim || shape.tile_size % kBlockRows != 0) return 0;
  return ScheduleOf(shape).buffers * shape.groups() * PairsOfHead(shape) * shape.tile_size *
         shape.tile_size * 2;
}

int64_t SpillCounters(const Shape& shape) { return 1 + 2 * shape.batch * shape.kv_heads; }

std::string AllGradients(const BackwardParams& params, const Transposed& transposed, void* kept, int* counters,
                         cudaStream_t stream) {
  return params.shape.dtype == DType::kFloat16 ? LaunchFor<__half>(params, transposed, kept, counters, stream)
                                               : LaunchFor<__nv_bfloat16>(params, transposed, kept, counters, stream);
}

}  // namespace vsa::sm90
