// dK and dV: the keys stay, the query tiles that keep them pass by. keys.cuh has a consumer's steps.
//
// CTA: 3 warpgroups, persistent, one per SM.
//   warpgroup 0     producers: a warp per stream takes tickets, walks lists and issues every TMA load; 24 registers
//   warpgroup 1, 2  consumers of 64 keys each; 240 registers
//
// An item is the keys of a stream: 128 of one tile, or with two streams a tile of 64. Its steps are 64 queries each,
// over the query heads of its kv head in order, and in a head over ascending query tiles. Tickets go through the heads
// in order, in a head through ascending key tiles: the prefix tiles, which have the longest lists, first.
//
// Barriers are those of pipeline.cuh. Ring: Q with lse, dO with delta; both are released when dV and dK are done. K
// and V are given back when the last dP is done; the next item's arrive behind the last products and the stores.
// Shared memory at H = 128: K and V 64 KB, ring of ten 16 KB slots 160 KB, row values 2.5 KB.
//
// Measured (H200, 2026-11-30, 24 heads, 30720 tokens, 12.5 % kept, random lists, sustained, each product counted):
// tiles of 128 4.61 ms, 629 TFLOP/s.
#include "../launch.cuh"
#include "../lists.cuh"
#include "keys.cuh"
#include "maps.cuh"
#include "parts.h"
#include "pipeline.cuh"
#include "query_tiles.cuh"

namespace vsa::sm90 {
namespace {

struct Arguments {
  Shape shape;
  Pairs pairs;
  Transposed transposed;
  float scale, scale_log2;
  const float* lse;
  const float* delta;
  void* d_key;
  void* d_value;
  int* tickets;
  int items;
};

template <int kHeadDim, int kStreams>
using Memory = Shared<kHeadDim, kStreams, kHeadDim == 128 ? 10 : 16>;

template <class Smem>
__device__ void produce(Smem& smem, const Arguments& args, const Maps& maps, int stream) {
  Loader<Smem> loader(smem, stream);
  loader.run(args.tickets, args.items, [&](int ticket) {
    const int items = static_cast<int>(args.shape.key_length()) / Smem::kItemRows;
    load_key_item(loader, args, maps, ticket / items, ticket % items, [] {}, [](int, int, int) { return 0; });
    return true;
  });
}

template <class T, class Smem>
__device__ void consume(Smem& smem, const Arguments& args, int index) {
  Reader<Smem> reader(smem, index);
  for (int queries; (queries = reader.wait()) != kWorkEnds;) {
    const Item item = reader.wait_resident();
    KeyConsumer<T, Smem> consumer(reader, args.scale_log2);
    consumer.accumulate(queries, [](const auto&, int) {});
    const int valid = item.valid - reader.first_row();
    const int64_t token = item.batch * args.shape.key_length() + item.token + reader.first_row();
    const int64_t stride = args.shape.kv_heads * Smem::kHeadDim, to = token * stride + item.head * Smem::kHeadDim;
    store_rows(static_cast<T*>(args.d_key) + to, stride, consumer.d_key(), args.scale, valid);
    store_rows(static_cast<T*>(args.d_value) + to, stride, consumer.d_value(), 1, valid);
  }
}

template <class T, int kHeadDim, int kStreams>
__global__ void __launch_bounds__(kThreads, 1)
    key_gradients(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
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
std::string Launch(const BackwardParams& params, const Transposed& transposed, int* ticket, cudaStream_t stream) {
  const Shape& shape = params.shape;
  Maps maps;
  const std::string error = Encode(params, &maps);
  if (!error.empty()) return error;
  using Smem = Memory<kHeadDim, kStreams>;
  const Arguments args{shape,
                       params.pairs,
                       transposed,
                       static_cast<float>(params.scale),
                       static_cast<float>(params.scale * kLog2E),
                       static_cast<const float*>(params.lse),
                       static_cast<const float*>(params.delta),
                       params.d_key,
                       params.d_value,
                       ticket,
                       static_cast<int>(shape.batch * shape.kv_heads * (shape.key_length() / Smem::kItemRows))};
  return LaunchPersistent(key_gradients<T, kHeadDim, kStreams>, 1, kThreads, sizeof(Smem), args.items, ticket, 1, stream,
                          args, maps);
}

template <class T>
std::string LaunchFor(const BackwardParams& params, const Transposed& transposed, int* ticket, cudaStream_t stream) {
  const bool shared = params.shape.tile_size % (kBlockRows * kConsumers) == 0;
  if (params.shape.head_dim == 128) {
    return shared ? Launch<T, 128, 1>(params, transposed, ticket, stream)
                  : Launch<T, 128, 2>(params, transposed, ticket, stream);
  }
  return shared ? Launch<T, 64, 1>(params, transposed, ticket, stream)
                : Launch<T, 64, 2>(params, transposed, ticket, stream);
}

}  // namespace

std::string KeyGradients(const BackwardParams& params, const Transposed& transposed, int* ticket, cudaStream_t stream) {
  return params.shape.dtype == DType::kFloat16 ? LaunchFor<__half>(params, transposed, ticket, stream)
                                               : LaunchFor<__nv_bfloat16>(params, transposed, ticket, stream);
}

}  // namespace vsa::sm90
