// dQ: the query rows stay, the key tiles they keep pass by in list order.
//
//   S = Q K^T    P = exp2(scale_log2 S - lse)     dP = dO V^T    dS = P (dP - delta)    dQ += dS K, times scale
//
// CTA: 3 warpgroups, persistent, one per SM.
//   warpgroup 0     producers: a warp per stream takes tickets, walks lists and issues every TMA load; 24 registers
//   warpgroup 1, 2  consumers of 64 query rows each: dQ 64, S 32, dP 32, Q 32, dO 32, dS rounded 16; 240 registers
//
// An item is the rows of a stream: 128 of one tile, or with two streams a tile of 64. Its steps are 64 keys each.
//
//   tensor cores of a consumer   S(i+1)   dP(i+1)                      dQ(i+1)   S(i+2) ...
//   its other units                       P = exp2(...)   dS = P(...)
//
// The other consumer fills what is left. Q and dO stay in registers: as shared-memory operands of products this
// narrow they would fill the shared-memory port.
//
// Ring: K and V. V is released when dP is done, K when dQ is. The resident rows are given back once they are in
// registers, in the first step, so the next item's arrive early.
// Shared memory at H = 128: Q and dO 64 KB, ring of ten 16 KB slots 160 KB. Barriers are those of pipeline.cuh.
//
// Invariants: padded rows of K are cleared in their slots, and dS of padded keys is 0; padded query rows reach only
// their own rows of dQ, which are written as 0.
//
// Measured (as in dkdv.cu): tiles of 128 3.66 ms, 594 TFLOP/s.
#include "../launch.cuh"
#include "../lists.cuh"
#include "maps.cuh"
#include "parts.h"
#include "pipeline.cuh"

namespace vsa::sm90 {
namespace {

struct Arguments {
  Shape shape;
  Pairs pairs;
  float scale, scale_log2;
  const float* lse;
  const float* delta;
  void* d_query;
  int* tickets;
  int items;
};

template <int kHeadDim, int kStreams>
using Memory = Shared<kHeadDim, kStreams, kHeadDim == 128 ? 10 : 16>;

template <class Smem>
__device__ void produce(Smem& smem, const Arguments& args, const Maps& maps, int stream) {
  Loader<Smem> loader(smem, stream);
  loader.run(args.tickets, args.items, [&](int ticket) {
    const Shape& shape = args.shape;
    const int tile_size = static_cast<int>(shape.tile_size);
    const int blocks = static_cast<int>(shape.query_length()) / Smem::kItemRows;
    const int batch = ticket / blocks / static_cast<int>(shape.heads);
    const int head = ticket / blocks % static_cast<int>(shape.heads);
    const int token = ticket % blocks * Smem::kItemRows;
    const int query_tile = token / tile_size;
    const int size = args.pairs.query_sizes[batch * shape.query_tiles + query_tile];
    const int valid = min(max(size - token % tile_size, 0), Smem::kItemRows);
    loader.load_resident(&maps.query, &maps.d_out, {batch, head, token, valid},
                         batch * static_cast<int>(shape.query_length()) + token);
    if (valid == 0) return true;
    const int kv_head = head / static_cast<int>(shape.groups());
    for (KeyTiles tiles(shape, args.pairs, batch, head, query_tile); tiles.tile() != KeyTiles::kNone; tiles.next()) {
      for (int at = 0; at < tiles.size(); at += kBlockRows) {
        const int over_batches = batch * static_cast<int>(shape.key_length()) + tiles.tile() * tile_size + at;
        const int keys = min(tiles.size() - at, kBlockRows);
        loader.load(&maps.key, kv_head, over_batches, keys);
        loader.load(&maps.value, kv_head, over_batches, keys);
      }
    }
    return true;
  });
}

// A consumer's steps over one item; made anew for every item.
template <class T, class Smem>
class Consumer {
 public:
  __device__ Consumer(Reader<Smem>& reader, const Arguments& args, const Item& item)
      : reader_(reader), args_(args), item_(item) {}

  // `keys` is the note that has arrived: of the first step, or the mark at the item's end.
  __device__ void run(int keys) {
    if (keys == kItemEnds) {
      reader_.release_resident();
      reader_.release(reader_.take());
    } else {
      load_rows();
      accumulate(keys);
    }
    store();
  }

 private:
  static constexpr int kHeadDim = Smem::kHeadDim;

  __device__ void load_rows() {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      load_a<kColumnBlockBytes>(query_ + 4 * k, reader_.resident(0), k);
      load_a<kColumnBlockBytes>(d_out_ + 4 * k, reader_.resident(1), k);
    }
    const Shape& shape = args_.shape;
    const int64_t head = item_.batch * shape.heads + item_.head;
    const int64_t first = head * shape.query_length() + item_.token + reader_.first_row();
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      lse_[pair] = args_.lse[first + accumulator_row(2 * pair)];
      delta_[pair] = args_.delta[first + accumulator_row(2 * pair)];
    }
  }

  // The steps of an item, the first of which has arrived, and the mark at its end.
  __device__ void accumulate(int keys) {
    int key_slot = reader_.take(), previous_slot = 0;
    reader_.clear_rows(key_slot, keys);
    pin(d_query_);
    wgmma_fence();
    multiply_columns<T, kHeadDim>(logits_, query_, reader_.operand(key_slot));
    for (bool first = true;; first = false) {  // dQ of the step before and the logits of this one are under way
      reader_.wait();
      const int value_slot = reader_.take();
      pin(d_weights_);
      wgmma_fence();
      multiply_columns<T, kHeadDim>(d_weights_, d_out_, reader_.operand(value_slot));

      wgmma_wait<1>();
      pin(logits_);
      if (!first) reader_.release(previous_slot);
      weigh();
      pin(logits_);  // computed before the wait

      wgmma_wait<0>();
      pin(d_weights_);
      if (first) reader_.release_resident();  // products have read the registers, so these are loaded
      reader_.release(value_slot);
      differentiate(keys);
      pack_all<T>(d_logits_, d_weights_);
      pin(d_query_);
      wgmma_fence();
      multiply_rows<T, kHeadDim>(d_query_, d_logits_, reader_.operand(key_slot));

      const int next = reader_.wait();
      const int next_slot = reader_.take();
      if (next == kItemEnds) {
        reader_.release(next_slot);
        wgmma_wait<0>();
        pin(d_query_);
        reader_.release(key_slot);
        return;
      }
      reader_.clear_rows(next_slot, next);
      pin(logits_);
      wgmma_fence();
      multiply_columns<T, kHeadDim>(logits_, query_, reader_.operand(next_slot));
      previous_slot = key_slot;
      key_slot = next_slot;
      keys = next;
    }
  }

  // Logits become weights.
  __device__ void weigh() {
#pragma unroll
    for (int i = 0; i < kBlockRows / 2; ++i) {
      logits_[i] = exp2_approx(fmaf(logits_[i], args_.scale_log2, -lse_[i / 2 % 2]));
    }
  }

  // The gradients of the weights become those of the logits.
  __device__ void differentiate(int keys) {
#pragma unroll
    for (int i = 0; i < kBlockRows / 2; ++i) d_weights_[i] = logits_[i] * (d_weights_[i] - delta_[i / 2 % 2]);
    if (keys < kBlockRows) {
#pragma unroll
      for (int i = 0; i < kBlockRows / 2; ++i) {
        if (accumulator_column(i) >= keys) d_weights_[i] = 0;
      }
    }
  }

  __device__ void store() {
    const Shape& shape = args_.shape;
    const int first_row = reader_.first_row();
    const int64_t token = item_.batch * shape.query_length() + item_.token + first_row;
    const int64_t stride = shape.heads * kHeadDim;
    store_rows(static_cast<T*>(args_.d_query) + token * stride + item_.head * kHeadDim, stride, d_query_, args_.scale,
               item_.valid - first_row);
  }

  Reader<Smem>& reader_;
  const Arguments& args_;
  const Item item_;
  uint32_t query_[kHeadDim / 4], d_out_[kHeadDim / 4];
  float lse_[2], delta_[2];
  float logits_[kBlockRows / 2];     // then weights
  float d_weights_[kBlockRows / 2];  // then gradients of the logits
  float d_query_[kHeadDim / 2] = {};
  uint32_t d_logits_[kBlockRows / 4];  // rounded
};

template <class T, class Smem>
__device__ void consume(Smem& smem, const Arguments& args, int index) {
  Reader<Smem> reader(smem, index);
  for (int keys; (keys = reader.wait()) != kWorkEnds;) {
    Consumer<T, Smem>(reader, args, reader.wait_resident()).run(keys);
  }
}

template <class T, int kHeadDim, int kStreams>
__global__ void __launch_bounds__(kThreads, 1)
    query_gradients(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
  using Smem = Memory<kHeadDim, kStreams>;
  static_assert(sizeof(Smem) <= 227 * 1024);
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_shared());
  if (threadIdx.x == 0) smem.init();
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kWarpgroup / 32) {
    setmaxnreg_dec<24>();
    if (warp < kStreams) produce(smem, args, maps, kStreams == 1 ? 0 : warp);
  } else {
    setmaxnreg_inc<240>();
    consume<T>(smem, args, warp / (kWarpgroup / 32) - 1);
  }
}

template <class T, int kHeadDim, int kStreams>
std::string Launch(const BackwardParams& params, int* ticket, cudaStream_t stream) {
  const Shape& shape = params.shape;
  Maps maps;
  const std::string error = Encode(params, &maps);
  if (!error.empty()) return error;
  using Smem = Memory<kHeadDim, kStreams>;
  const Arguments args{shape,
                       params.pairs,
                       static_cast<float>(params.scale),
                       static_cast<float>(params.scale * kLog2E),
                       static_cast<const float*>(params.lse),
                       static_cast<const float*>(params.delta),
                       params.d_query,
                       ticket,
                       static_cast<int>(shape.batch * shape.heads * (shape.query_length() / Smem::kItemRows))};
  return LaunchPersistent(query_gradients<T, kHeadDim, kStreams>, 1, kThreads, sizeof(Smem), args.items, ticket, 1, stream,
                          args, maps);
}

template <class T>
std::string LaunchFor(const BackwardParams& params, int* ticket, cudaStream_t stream) {
  const bool shared = params.shape.tile_size % (kBlockRows * kConsumers) == 0;
  if (params.shape.head_dim == 128) {
    return shared ? Launch<T, 128, 1>(params, ticket, stream) : Launch<T, 128, 2>(params, ticket, stream);
  }
  return shared ? Launch<T, 64, 1>(params, ticket, stream) : Launch<T, 64, 2>(params, ticket, stream);
}

}  // namespace

std::string QueryGradients(const BackwardParams& params, int* ticket, cudaStream_t stream) {
  return params.shape.dtype == DType::kFloat16 ? LaunchFor<__half>(params, ticket, stream)
                                               : LaunchFor<__nv_bfloat16>(params, ticket, stream);
}

}  // namespace vsa::sm90
