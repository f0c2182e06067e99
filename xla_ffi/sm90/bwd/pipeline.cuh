// What the two gradient kernels share: resident operands, a ring of streamed ones, and the warps that load them.
//
// A kernel has two consumer warpgroups of 64 resident rows each. With one stream (tiles of 128 and 256) both read the
// same streamed rows; with two (tiles of 64) each has a list, a ring and a producer warp of its own.
//
// An operand is 64 rows of H elements, in blocks of 64 columns. A resident row block has two (K and V, or Q and dO),
// a step streams two (Q and dO, or K and V), each through a slot of the ring, and may bring 64 floats beside each.
//
// The products' gradients may be kept in global memory between kernels' parts (spill.cu): blocks of 64 keys and 64
// queries as they lie in shared memory, key rows of 128 bytes, swizzled.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../epilogue.cuh"
#include "../ptx.cuh"
#include "../ring.cuh"
#include "../softmax.cuh"
#include "../wgmma.cuh"

namespace vsa::sm90 {

constexpr int kBlockRows = 64;
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kColumnBlockBytes = kBlockRows * 128;  // of 64 rows and 64 columns
constexpr int kKeptBytes = kColumnBlockBytes;        // a kept block

// The resident rows of one stream.
struct Item {
  int batch, head;  // head: of the resident operands; ~head for an item that has none (spill.cu)
  int token;        // of its first row, within the batch
  int valid;        // rows that count; the gradients of the rest are 0
};

// What a slot's note says instead of the number of valid rows.
constexpr int kItemEnds = 0;  // the item has no more steps; the slot holds nothing
constexpr int kWorkEnds = -1;

template <int kHeadDim_, int kStreams_, int kSlotCount>
struct Shared {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kStreams = kStreams_;
  static constexpr int kSlots = kSlotCount / kStreams;
  static constexpr int kColumnBlocks = kHeadDim / kSwizzleColumns;
  static constexpr int kOperandBytes = kColumnBlocks * kColumnBlockBytes;
  static constexpr int kItemRows = kBlockRows * kConsumers / kStreams;

  uint8_t resident[kConsumers][2][kOperandBytes];
  uint8_t ring[kStreams][kSlots][kOperandBytes];
  float row_values[kStreams][kSlots][kBlockRows];
  uint64_t full[kStreams][kSlots];   // producer and bytes: a slot is filled (consumers)
  uint64_t empty[kStreams][kSlots];  // a lane of each consumer warp: it has been read (producer)
  uint64_t resident_full[kStreams];
  uint64_t resident_empty[kStreams];
  Item items[kStreams];
  int notes[kStreams][kSlots];  // valid rows of the step, in the first slot of its two; or how things end
  int kept[kStreams][kSlots];   // where the step's gradients are kept: the first consumer's block

  // One thread; then __syncthreads.
  __device__ void init() {
    constexpr int kReaders = kConsumers / kStreams * kWarpgroup / 32 * kWarpArrivals;
    for (int stream = 0; stream < kStreams; ++stream) {
      for (int slot = 0; slot < kSlots; ++slot) {
        mbarrier_init(shared_address(&full[stream][slot]), 1);
        mbarrier_init(shared_address(&empty[stream][slot]), kReaders);
      }
      mbarrier_init(shared_address(&resident_full[stream]), 1);
      mbarrier_init(shared_address(&resident_empty[stream]), kReaders);
    }
    fence_mbarrier_init();
  }
};

// The producer warp of one stream.
template <class Smem>
class Loader {
 public:
  __device__ Loader(Smem& smem, int stream) : smem_(smem), stream_(stream) {}

  // Calls item(ticket) for every ticket this stream takes, then tells the consumers that the work ends. `item`
  // returns whether the ticket stood for an item.
  template <class DoItem>
  __device__ void run(int* tickets, int items, DoItem item) {
    // Drawn, the first too: none may belong to a CTA that does not run yet, for spill.cu waits for earlier tickets.
    const auto draw = [&] { return lane_ == 0 ? atomicAdd(tickets, 1) : 0; };
    for (int ticket; (ticket = uniform(draw())) < items;) {
      if (item(ticket)) mark(kItemEnds);
    }
    mark(kWorkEnds);
  }

  // The rows of an item; `token` counts over batches.
  __device__ void load_resident(const CUtensorMap* first, const CUtensorMap* second, const Item& item, int token) {
    mbarrier_wait(shared_address(&smem_.resident_empty[stream_]), resident_parity_ ^ 1);
    resident_parity_ ^= 1;
    if (!elect()) return;
    constexpr int kRowBlocks = kConsumers / Smem::kStreams;
    const uint32_t full = shared_address(&smem_.resident_full[stream_]);
    smem_.items[stream_] = item;
    mbarrier_arrive_expect_tx(full, kRowBlocks * 2 * Smem::kOperandBytes);
    for (int i = 0; i < kRowBlocks; ++i) {
      const uint32_t to = shared_address(smem_.resident[stream_ * kRowBlocks + i]);
      tma_load(to, first, full, item.head, token + i * kBlockRows);
      tma_load(to + Smem::kOperandBytes, second, full, item.head, token + i * kBlockRows);
    }
  }

  // An item without resident rows.
  __device__ void announce(const Item& item) {
    mbarrier_wait(shared_address(&smem_.resident_empty[stream_]), resident_parity_ ^ 1);
    resident_parity_ ^= 1;
    if (!elect()) return;
    smem_.items[stream_] = item;
    mbarrier_arrive(shared_address(&smem_.resident_full[stream_]));
  }

  // One slot: 64 rows, and their values where given. note, kept: see Shared.
  __device__ void load(const CUtensorMap* map, int head, int token, int note, const float* values = nullptr,
                       int kept = -1) {
    acquire();
    if (elect()) {
      const uint32_t full = shared_address(&smem_.full[stream_][slot_.at]);
      smem_.notes[stream_][slot_.at] = note;
      if (kept >= 0) smem_.kept[stream_][slot_.at] = kept;
      constexpr int kValueBytes = kBlockRows * sizeof(float);
      mbarrier_arrive_expect_tx(full, Smem::kOperandBytes + (values == nullptr ? 0 : kValueBytes));
      tma_load(shared_address(smem_.ring[stream_][slot_.at]), map, full, head, token);
      if (values != nullptr) {
        bulk_load(shared_address(smem_.row_values[stream_][slot_.at]), values, kValueBytes, full);
      }
    }
    slot_.advance();
  }

  // One slot: the kept blocks of all consumers of the stream, which adjoin.
  __device__ void load_kept(const void* from) {
    acquire();
    if (elect()) {
      constexpr int kBytes = kConsumers / Smem::kStreams * kKeptBytes;
      static_assert(kBytes <= Smem::kOperandBytes);
      const uint32_t full = shared_address(&smem_.full[stream_][slot_.at]);
      mbarrier_arrive_expect_tx(full, kBytes);
      bulk_load_once(shared_address(smem_.ring[stream_][slot_.at]), from, kBytes, full);
    }
    slot_.advance();
  }

 private:
  __device__ void mark(int note) {
    acquire();
    if (elect()) {
      smem_.notes[stream_][slot_.at] = note;
      mbarrier_arrive(shared_address(&smem_.full[stream_][slot_.at]));
    }
    slot_.advance();
  }

  __device__ void acquire() {
    mbarrier_wait(shared_address(&smem_.empty[stream_][slot_.at]), slot_.parity ^ 1);
  }

  Smem& smem_;
  const int stream_;
  const int lane_ = threadIdx.x % 32;
  uint32_t resident_parity_ = 0;
  Cursor<Smem::kSlots> slot_;
};

// A consumer's side of its ring and of its resident rows.
template <class Smem>
class Reader {
 public:
  __device__ Reader(Smem& smem, int consumer)
      : smem_(smem), consumer_(consumer), stream_(Smem::kStreams == 1 ? 0 : consumer) {}

  // Waits for the next slot and returns its note.
  __device__ int wait() {
    mbarrier_wait(shared_address(&smem_.full[stream_][slot_.at]), slot_.parity);
    return smem_.notes[stream_][slot_.at];
  }

  // The slot waited for; the next wait is for the one after it.
  __device__ int take() {
    const int slot = uniform(slot_.at);
    slot_.advance();
    return slot;
  }

  // What all lanes have read.
  __device__ void release(int slot) {
    __syncwarp();
    if (arrives()) mbarrier_arrive(shared_address(&smem_.empty[stream_][slot]));
  }

  // The shuffles also see to it that all lanes have the item before the resident rows, and it, are given back.
  __device__ Item wait_resident() {
    mbarrier_wait(shared_address(&smem_.resident_full[stream_]), resident_parity_);
    resident_parity_ ^= 1;
    const Item item = smem_.items[stream_];
    return {uniform(item.batch), uniform(item.head), uniform(item.token), uniform(item.valid)};
  }

  __device__ void release_resident() {
    __syncwarp();
    if (arrives()) mbarrier_arrive(shared_address(&smem_.resident_empty[stream_]));
  }

  // Rows past `valid` of a slot become 0.
  __device__ void clear_rows(int slot, int valid) {
    if (valid == kBlockRows) return;
    sm90::clear_rows<Smem::kColumnBlocks, kBlockRows>(smem_.ring[stream_][slot], valid, barrier());
  }

  __device__ const uint8_t* operand(int slot) const { return smem_.ring[stream_][slot]; }
  __device__ const uint8_t* resident(int operand) const { return smem_.resident[consumer_][operand]; }
  __device__ const float* row_values(int slot) const { return smem_.row_values[stream_][slot]; }
  __device__ int kept(int slot) const { return smem_.kept[stream_][slot]; }

  // This consumer's place among those of its stream, and its first row within an item.
  __device__ int row_block() const { return Smem::kStreams == 1 ? consumer_ : 0; }
  __device__ int first_row() const { return row_block() * kBlockRows; }

  __device__ int barrier() const { return 1 + consumer_; }
  __device__ void sync() { named_barrier_sync(barrier(), kWarpgroup); }

 private:
  Smem& smem_;
  const int consumer_, stream_;
  uint32_t resident_parity_ = 0;
  Cursor<Smem::kSlots> slot_;
};

// D = A B^T over the columns of two operands of 64 rows, A in shared memory.
template <class T, int kHeadDim>
__device__ __forceinline__ void multiply_columns(float (&d)[kBlockRows / 2], const uint8_t* a, const uint8_t* b) {
  const KMajor<kColumnBlockBytes> rows(a), columns(b);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) wgmma<T, Major::kK, Major::kK>(d, rows.step(k), columns.step(k), k > 0);
  wgmma_commit();
}

// The same with A in registers, as load_a leaves it.
template <class T, int kHeadDim>
__device__ __forceinline__ void multiply_columns(float (&d)[kBlockRows / 2], const uint32_t (&a)[kHeadDim / 4],
                                                 const uint8_t* b) {
  const KMajor<kColumnBlockBytes> columns(b);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) wgmma<T, Major::kK>(d, a + 4 * k, columns.step(k), k > 0);
  wgmma_commit();
}

// D += A B, A [64, 64] in registers, B an operand of 64 rows.
template <class T, int kHeadDim>
__device__ __forceinline__ void multiply_rows(float (&d)[kHeadDim / 2], const uint32_t (&a)[kBlockRows / 4],
                                              const uint8_t* b) {
  const MNMajor<kColumnBlockBytes> rows(b);
#pragma unroll
  for (int k = 0; k < kBlockRows / 16; ++k) wgmma<T, Major::kMN>(d, a + 4 * k, rows.step(k), 1);
  wgmma_commit();
}

// Rounds accumulators into the A operand of the next product.
template <class T, int kCount>
__device__ __forceinline__ void pack_all(uint32_t (&to)[kCount / 2], const float (&from)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) to[i] = pack<T>(from[2 * i], from[2 * i + 1]);
}

// Accumulators [64, H] times `scale`, rounded, to 64 rows of `to`; rows past `valid` get 0.
template <class T, int kCount>
__device__ __forceinline__ void store_rows(T* to, int64_t row_stride, const float (&d)[kCount], float scale,
                                           int valid) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int row = accumulator_row(2 * pair);
    store_row(to + row * row_stride, d, pair, scale, row < valid);
  }
}

}  // namespace vsa::sm90
