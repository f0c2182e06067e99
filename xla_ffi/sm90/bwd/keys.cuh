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

#include "pipeline.cuh"

namespace vsa::sm90 {

// Made anew for every item.
template <class T, class Smem>
class KeyConsumer {
 public:
  __device__ KeyConsumer(Reader<Smem>& reader, float scale, float scale_log2)
      : reader_(reader), scale_(scale), scale_log2_(scale_log2) {}

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
    wgmma_fence();
    multiply_columns<T, kHeadDim>(logits_, key, reader_.operand(query_slot));
    while (true) {  // the logits of this step are under way
      reader_.wait();
      const int d_out_slot = reader_.take();
      reader_.clear_rows(d_out_slot, queries);
      pin(d_weights_);
      wgmma_fence();
      multiply_columns<T, kHeadDim>(d_weights_, value, reader_.operand(d_out_slot));

      const ColumnValues lse(reader_.row_values(query_slot));  // loads would not pass the wait by themselves
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

  // The gradients of the item; 0 for rows past the valid ones.
  __device__ void store(const Shape& shape, const Item& item, void* d_key, void* d_value) {
    const int first_row = reader_.first_row();
    const int valid = item.valid - first_row;
    const int64_t token = item.batch * shape.key_length() + item.token + first_row;
    const int64_t stride = shape.kv_heads * kHeadDim;
    const int64_t to = token * stride + item.head * kHeadDim;
    store_rows(static_cast<T*>(d_key) + to, stride, d_key_, scale_, valid);
    store_rows(static_cast<T*>(d_value) + to, stride, d_value_, 1, valid);
  }

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
  const float scale_, scale_log2_;
  float logits_[kBlockRows / 2];     // then weights
  float d_weights_[kBlockRows / 2];  // then gradients of the logits
  float d_key_[kHeadDim / 2] = {}, d_value_[kHeadDim / 2] = {};
  uint32_t weights_[kBlockRows / 4], d_logits_[kBlockRows / 4];  // rounded
};

}  // namespace vsa::sm90
