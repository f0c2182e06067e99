// A consumer's steps over one key item, for the kernels that make dK and dV.
//
//   S^T = K Q^T    P^T = exp2(scale_log2 S^T - lse)     dV += P^T dO
//   dP^T = V dO^T  dS^T = P^T (dP^T - delta)            dK += dS^T Q, times scale at the end
//
//   tensor cores of a consumer   S(i+1)   dP(i+1)        dV(i+1)      dK(i+1)   S(i+2) ...
//   its other units                       P = exp2(...)  dS = P(...)
//
// Only what is shown above each other overlaps; the other consumer fills the rest. Registers at H = 128: dK 64, dV 64,
// S 32, dP 32, P and dS rounded 16 + 16.
//
// Invariants: padded rows of Q and dO are cleared in their slots and their P is 0; padded keys reach only their own
// rows of dK and dV, which are written as 0.
#pragma once

#include "maps.cuh"
#include "parts.h"
#include "pipeline.cuh"
#include "query_tiles.cuh"

namespace vsa::sm90 {

// Items start evenly spread over their walks, each about where those before it have come to by then: all that run at a time
// read the same part of Q and dO, which stays in the L2. Where an item starts depends on its number alone, so sums have one
// order. About this many run at a time, since a fifth of the SMs sum dQ; another number costs time only.
template <class Smem>
constexpr int kItemsAtOnce = 100 * Smem::kStreams;

// The loads of a key item, `item` of kv head `kv` (of B * K). await() is called before its keys are loaded;
// kept(query head, query tile, place) says where the gradients of the first blocks of a pair are kept.
template <class Smem, class Arguments, class Await, class Kept>
__device__ void load_key_item(Loader<Smem>& loader, const Arguments& args, const Maps& maps, int kv, int item,
                              Await await, Kept kept) {
  const Shape& shape = args.shape;
  const int tile_size = static_cast<int>(shape.tile_size), token = item * Smem::kItemRows, key_tile = token / tile_size;
  const int batch = kv / static_cast<int>(shape.kv_heads), kv_head = kv % static_cast<int>(shape.kv_heads);
  const int size = args.pairs.key_sizes[batch * shape.key_tiles + key_tile];
  const int valid = min(max(size - token % tile_size, 0), Smem::kItemRows);
  const int groups = static_cast<int>(shape.groups());
  const int start = item % kItemsAtOnce<Smem> * (QueryTiles::kWhole * groups / kItemsAtOnce<Smem>);
  const int first_group = start / QueryTiles::kWhole, from = start % QueryTiles::kWhole;
  for (int part = 0; part <= groups; ++part) {  // the last is what the first has left out
    const int head = kv_head * groups + (first_group + part) % groups;
    const int64_t row = batch * shape.heads + head;
    QueryTiles tiles(shape, args.pairs, batch, args.transposed.offsets + row * (shape.key_tiles + 1),
                     args.transposed.entries + row * shape.rows() * shape.width, key_tile, part == 0 ? from : 0,
                     part == groups ? from : QueryTiles::kWhole);
    if (part == 0) {  // not sooner: the loads that begin a list depend on each other
      await();
      loader.load_resident(&maps.key, &maps.value, {batch, kv_head, token, valid},
                           batch * static_cast<int>(shape.key_length()) + token);
      if (valid == 0) return;
    }
    for (; tiles.left(); tiles.next()) {
      const int query_tile = tiles.tile(), query_size = tiles.size(), first_kept = kept(head, query_tile, tiles.place());
#pragma unroll 1
      for (int at = 0; at < query_size; at += kBlockRows) {
        const int query = query_tile * tile_size + at;
        const int over_batches = batch * static_cast<int>(shape.query_length()) + query;
        const int64_t value = row * shape.query_length() + query;
        const int queries = min(query_size - at, kBlockRows);
        loader.load(&maps.query, head, over_batches, queries, args.lse + value, first_kept + at / kBlockRows);
        loader.load(&maps.d_out, head, over_batches, queries, args.delta + value);
      }
    }
  }
}

// Made anew for every item.
template <class T, class Smem>
class KeyConsumer {
 public:
  __device__ KeyConsumer(Reader<Smem>& reader, float scale_log2) : reader_(reader), scale_log2_(scale_log2) {}

  // The steps of an item and the mark at its end. `queries` is the note that has arrived: of the first step, or the
  // mark. keep(gradients of the logits, slot of Q) is called in every step; the product that reads them may still run.
  template <class Keep>
  __device__ void accumulate(int queries, Keep keep) {
    if (queries == kItemEnds) {
      reader_.release(reader_.take());
      reader_.release_resident();
      return;
    }
    const uint8_t *key = reader_.resident(0), *value = reader_.resident(1);
    int query_slot = reader_.take();
    reader_.clear_rows(query_slot, queries);
    pin(d_value_);
    pin(d_key_);
    ColumnValues lse(reader_.row_values(query_slot));
    wgmma_fence();
    multiply_columns<T, kHeadDim>(logits_, key, reader_.operand(query_slot));
    while (true) {  // the logits of this step are under way
      reader_.wait();
      const int d_out_slot = reader_.take();
      reader_.clear_rows(d_out_slot, queries);
      pin(d_weights_);
      wgmma_fence();
      multiply_columns<T, kHeadDim>(d_weights_, value, reader_.operand(d_out_slot));

      wgmma_wait<1>();
      pin(logits_);
      weigh(lse, queries);
      pack_all<T>(weights_, logits_);
      wgmma_fence();
      multiply_rows<T, kHeadDim>(d_value_, weights_, reader_.operand(d_out_slot));

      wgmma_wait<1>();
      pin(d_weights_);
      differentiate(ColumnValues(reader_.row_values(d_out_slot)));  // before the wait there are no registers for it
      pack_all<T>(d_logits_, d_weights_);
      wgmma_fence();
      multiply_rows<T, kHeadDim>(d_key_, d_logits_, reader_.operand(query_slot));
      keep(d_logits_, query_slot);

      const int next = reader_.wait();
      const int next_slot = reader_.take();
      if (next == kItemEnds) {
        reader_.release(next_slot);
        reader_.release_resident();
        wgmma_wait<0>();
        pin(d_value_);
        pin(d_key_);
        reader_.release(query_slot);
        reader_.release(d_out_slot);
        return;
      }
      reader_.clear_rows(next_slot, next);
      lse = ColumnValues(reader_.row_values(next_slot));  // loads would not pass the waits by themselves
      pin(logits_);
      wgmma_fence();
      multiply_columns<T, kHeadDim>(logits_, key, reader_.operand(next_slot));
      wgmma_wait<1>();
      pin(d_value_);
      pin(d_key_);
      reader_.release(query_slot);
      reader_.release(d_out_slot);
      query_slot = next_slot;
      queries = next;
    }
  }

  // The sums of an item, all that its rows get but for d_key's scale.
  __device__ const auto& d_key() const { return d_key_; }
  __device__ const auto& d_value() const { return d_value_; }

 private:
  static constexpr int kHeadDim = Smem::kHeadDim;

  // Of values for 64 columns, those that this thread needs.
  struct ColumnValues {
    float2 of[kBlockRows / 8];  // of accumulators 4 * i .. 4 * i + 3
    __device__ __forceinline__ explicit ColumnValues(const float* values) {
#pragma unroll
      for (int i = 0; i < kBlockRows / 8; ++i) {
        of[i] = *reinterpret_cast<const float2*>(values + accumulator_column(4 * i));
      }
    }
  };

  // Logits become weights.
  __device__ void weigh(const ColumnValues& lse, int queries) {
#pragma unroll
    for (int i = 0; i < kBlockRows / 2; i += 4) {
      const float2 offset = lse.of[i / 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        logits_[i + j] = exp2_approx(fmaf(logits_[i + j], scale_log2_, -(j % 2 ? offset.y : offset.x)));
      }
    }
    if (queries < kBlockRows) {
#pragma unroll
      for (int i = 0; i < kBlockRows / 2; ++i) {
        if (accumulator_column(i) >= queries) logits_[i] = 0;
      }
    }
  }

  // The gradients of the weights become those of the logits.
  __device__ void differentiate(const ColumnValues& delta) {
#pragma unroll
    for (int i = 0; i < kBlockRows / 2; i += 4) {
      const float2 mean = delta.of[i / 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) d_weights_[i + j] = logits_[i + j] * (d_weights_[i + j] - (j % 2 ? mean.y : mean.x));
    }
  }

  Reader<Smem>& reader_;
  const float scale_log2_;
  float logits_[kBlockRows / 2];     // then weights
  float d_weights_[kBlockRows / 2];  // then gradients of the logits
  float d_key_[kHeadDim / 2] = {}, d_value_[kHeadDim / 2] = {};
  uint32_t weights_[kBlockRows / 4], d_logits_[kBlockRows / 4];  // rounded
};

}  // namespace vsa::sm90
