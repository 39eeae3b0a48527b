// Where a thread's part of the state of the later splits waits while its CTA works on an earlier
// one: as much as fits in shared memory, the rest in the CTA's own rows of the output, which are
// written last. A thread reads only what it wrote.
#pragma once

#include "block_info.h"  // upstream
#include "row_block.h"
#include "state_room.h"

namespace fad {

template <typename Traits>
struct WaitingState {
  using F = Fragment<Traits>;
  static constexpr StateRoom kRoom = state_room(Traits::kHeadDim, Traits::kBlockM, Traits::kBlockN);
  static_assert(kRoom.tile_bytes == Traits::kSmemSize && 2 * kRoom.columns >= F::kMmaN);
  static constexpr int kBytes = kRoom.bytes - kRoom.tile_bytes;
  static constexpr bool kUsesOut = kRoom.columns < F::kMmaN;

  // A note of the CTA's rows of the output, in shared memory: they take two divisions and, for
  // packed sequences, loads to find, and would take registers to keep.
  struct OutputRows {
    char* first;
    int count;
  };

  float4* shared;
  char* out = nullptr;
  int64_t row_bytes = 0;
  int rows = 0;

  // is_first: this is the first split whose state waits. All threads pass the same value.
  template <typename Params>
  __device__ __forceinline__ WaitingState(const Params& params, bool is_first) {
    extern __shared__ char smem[];
    const int thread = read_thread();
    char* const room = smem + Traits::kSmemSize;
    shared = reinterpret_cast<float4*>(room) + 1 + thread;
    if constexpr (kUsesOut) {
      volatile OutputRows& note = *reinterpret_cast<volatile OutputRows*>(room);
      static_assert(sizeof(OutputRows) <= sizeof(float4));
      if (is_first && thread == 0) {
        const auto [bidb, bidh, m_block] = place_of<Traits::kBlockM>(params, read_cta());
        const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
        const int64_t row = m_block * Traits::kBlockM;
        note.first = static_cast<char*>(params.o_ptr) +
                     2 * (info.q_offset(params.o_batch_stride, params.o_row_stride, bidb) +
                          bidh * params.o_head_stride + row * params.o_row_stride);
        note.count = info.actual_seqlen_q - static_cast<int>(row);
      }
      if (is_first) {
        __syncthreads();
      }
      const int row = thread_row();
      rows = note.count - row;
      row_bytes = params.o_row_stride * 2;
      out = note.first + thread % 4 * sizeof(float2) + row * row_bytes;
    }
  }

  // Row maximum and sum, of the upper and of the lower row.
  __device__ __forceinline__ float4& state(int mi) const { return slot(mi, kRoom.columns); }

  template <typename Params>
  __device__ __forceinline__ void store(const Params& params, int mi, int nj, float4 value) const {
    if (nj < kRoom.columns) {
      slot(mi, nj) = value;
    } else if (in_out(params, nj)) {
      if (mi * F::kRowStep < rows) {
        *pair(mi, 0, nj) = make_float2(value.x, value.y);
      }
      if (mi * F::kRowStep + 8 < rows) {
        *pair(mi, 1, nj) = make_float2(value.z, value.w);
      }
    }
  }

  template <typename Params>
  __device__ __forceinline__ float4 load(const Params& params, int mi, int nj) const {
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
    if (nj < kRoom.columns) {
      value = slot(mi, nj);
    } else if (in_out(params, nj)) {
      if (mi * F::kRowStep < rows) {
        const float2 upper = *pair(mi, 0, nj);
        value.x = upper.x;
        value.y = upper.y;
      }
      if (mi * F::kRowStep + 8 < rows) {
        const float2 lower = *pair(mi, 1, nj);
        value.z = lower.x;
        value.w = lower.y;
      }
    }
    return value;
  }

 private:
  __device__ __forceinline__ float4& slot(int mi, int nj) const {
    return shared[(mi * (kRoom.columns + 1) + nj) * Traits::kNThreads];
  }

  template <typename Params>
  __device__ __forceinline__ static bool in_out(const Params& params, int nj) {
    return Traits::kEvenHeadDim || nj < params.d / 8;
  }

  __device__ __forceinline__ float2* pair(int mi, int half, int nj) const {
    return reinterpret_cast<float2*>(out + (mi * F::kRowStep + 8 * half) * row_bytes +
                                     (nj - kRoom.columns) * 32);
  }
};

}  // namespace fad
