// The query tiles of every head in the order of how many key tiles they keep, the most first: two that stand beside each other
// share a CTA, and the longer list is what the CTA takes. Tiles that keep as many stay in their order.
//
// A warp a head, a counting sort: how many tiles keep how many, where each such group begins, and then the places. Lists are
// counted as they are given, whatever their ids. Where there are more key tiles than groups, a group is of similar counts.
#include "forward.h"

#include "../../sm90/launch.cuh"
#include "../ptx.cuh"

namespace vsa::sm100 {
namespace {

constexpr int kGroups = 2048;

struct Arguments {
  Shape shape;
  Pairs pairs;
  int32_t* order;
};

__global__ void __launch_bounds__(32) order_query_tiles(const __grid_constant__ Arguments args) {
  const Shape& shape = args.shape;
  const int tiles = static_cast<int>(shape.query_tiles), most = static_cast<int>(shape.key_tiles);
  const int lane = threadIdx.x % 32, batch = blockIdx.x / static_cast<int>(shape.heads);
  int* const places = reinterpret_cast<int*>(dynamic_shared());  // of each group: its size, then where its next tile goes
  const auto group_of = [&](int tile) {
    int kept = 0;
    const int dense = static_cast<int>(shape.num_dense_rows);
    if (tile < dense) {
      kept = most;
    } else {
      const int count = args.pairs.counts[int64_t{blockIdx.x} * shape.rows() + tile - dense];
      kept = static_cast<int>(shape.num_prefix_tiles) + min(max(count, 0), static_cast<int>(shape.width));
    }
    if (args.pairs.query_sizes[batch * shape.query_tiles + tile] == 0) kept = 0;
    return static_cast<int>(int64_t{most - min(kept, most)} * (kGroups - 1) / max(most, 1));
  };
  // All tiles, 32 at a time, each with the next place of its group: visit(tile, place).
  const auto walk = [&](auto visit) {
    for (int base = 0; base < tiles; base += 32) {
      const int tile = base + lane, group = tile < tiles ? group_of(tile) : -1;
      const unsigned alike = __match_any_sync(kWholeWarp, group);
      const int before = __popc(alike & ((1u << lane) - 1)), place = group < 0 ? 0 : places[group] + before;
      __syncwarp();
      if (group >= 0) visit(tile, place);
      if (group >= 0 && before == 0) places[group] = place + __popc(alike);
      __syncwarp();
    }
  };
  for (int i = lane; i < kGroups; i += 32) places[i] = 0;
  __syncwarp();
  walk([](int, int) {});
  int sum = 0;  // of the groups so far
  for (int base = 0; base < kGroups; base += 32) {
    const int size = places[base + lane];
    int upto = size;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kWholeWarp, upto, distance);
      if (lane >= distance) upto += other;
    }
    places[base + lane] = sum + upto - size;
    sum += __shfl_sync(kWholeWarp, upto, 31);
  }
  __syncwarp();
  walk([&](int tile, int place) { args.order[int64_t{blockIdx.x} * tiles + place] = tile; });
}

}  // namespace

std::string Order(const Shape& shape, const Pairs& pairs, int32_t* order, cudaStream_t stream) {
  return Said(Launch(order_query_tiles, shape.batch * shape.heads, 1, 32, kGroups * sizeof(int), stream,
                     Arguments{shape, pairs, order}));
}

}  // namespace vsa::sm100
