// Attention of a few rows (decode): one CTA takes up to 16, 32 or 64 rows (row_group.cuh) and one
// split. Upstream's body gives each warp its own rows, most of which would be empty in decode; here
// the warps of 16 rows divide the keys of a block among them for q k^T, the columns of the head dim
// for P V. Latency and shared memory limit a decode, not arithmetic: q k^T of the next block is
// computed together with P V of this one.
//
// The bits are those of upstream's patched body: it sees the same blocks of 64 keys in the same
// order, each element of q k^T and P V is the same chain of the same tensor core instructions, and
// what lies between goes through the same functions.
#pragma once

#include <type_traits>

#include "few_rows_copy.cuh"
#include "few_rows_end.cuh"
#include "few_rows_fragments.cuh"
#include "few_rows_traits.h"
#include "sm80/row_group.cuh"
#include "tree/softmax_steps.h"

namespace fad {

// This thread's part of the state. Maximum and rescale factor are those of the rows lane / 4 and 8
// below, of its warp's 16. The sum of a row is that of four threads, each of which takes every
// fourth pair of columns; every second warp sums the same eight rows, and the first two write them.
template <typename Traits>
struct FewRowsState {
  float row_max[2] = {-INFINITY, -INFINITY};
  float rescale[2];
  float row_sum = 0.f;
  float acc[Traits::kColumns / 8][4] = {};
};

template <typename Traits>
using FewRowsScores = float[Traits::kWarpKeys / 8][4];

// The maximum of each row over this warp's keys, to shared memory.
template <typename Traits>
__device__ __forceinline__ void write_maxima(const FewRowsScores<Traits>& scores, float* maxima) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < Traits::kWarpKeys / 8; ++tile) {
      most = fmaxf(most, fmaxf(scores[tile][2 * half], scores[tile][2 * half + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    if (lane % 4 == 0) {
      const int row = warp_row<Traits>() + lane / 4 + 8 * half;
      maxima[row * Traits::kSharers + sharer<Traits>()] = most;
    }
  }
}

// The running maximum, with this block's.
template <typename Traits>
__device__ __forceinline__ float raised_max(const float* maxima, int half, float row_max) {
  const int row = warp_row<Traits>() + threadIdx.x % 32 / 4 + 8 * half;
#pragma unroll
  for (int w = 0; w < Traits::kSharers; w += 2) {
    const float2 two = *reinterpret_cast<const float2*>(maxima + row * Traits::kSharers + w);
    row_max = fmaxf(row_max, fmaxf(two.x, two.y));
  }
  return row_max;
}

// Probabilities to shared memory: fp32 for the row sums, 16 bit for P V.
template <typename Traits>
__device__ __forceinline__ void write_probs(const FewRowsScores<Traits>& scores, float scale,
                                            const float (&new_max)[2], FewRowsState<Traits>& state,
                                            float* probs, typename Traits::Element* probs16) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row<Traits>() + lane / 4 + 8 * half;
    const bool empty = new_max[half] == -INFINITY;
    state.rescale[half] = rescale_factor(state.row_max[half], empty ? 0.f : new_max[half], scale);
    state.row_max[half] = new_max[half];
    const float max_scaled = empty ? 0.f : scaled_max(new_max[half], scale);
#pragma unroll
    for (int tile = 0; tile < Traits::kWarpKeys / 8; ++tile) {
      const float first = scaled_exp2(scores[tile][2 * half], scale, max_scaled);
      const float second = scaled_exp2(scores[tile][2 * half + 1], scale, max_scaled);
      const int at = row * Traits::kProbsStride + sharer<Traits>() * Traits::kWarpKeys + tile * 8 +
                     lane % 4 * 2;
      *reinterpret_cast<float2*>(probs + at) = make_float2(first, second);
      cutlass::Array<typename Traits::Element, 2> two;
      two[0] = static_cast<typename Traits::Element>(first);
      two[1] = static_cast<typename Traits::Element>(second);
      *reinterpret_cast<uint32_t*>(probs16 + at) = reinterpret_cast<const uint32_t&>(two);
    }
  }
}

// This thread's share of a row's sum, over all keys of the block, in the order in which a thread of
// upstream's body adds.
template <typename Traits>
__device__ __forceinline__ void add_to_sum(const float* probs, FewRowsState<Traits>& state) {
  const int lane = threadIdx.x % 32;
  const int half = threadIdx.x / 32 % 2;
  const int row = warp_row<Traits>() + lane / 4 + 8 * half;
  state.row_sum = rescaled_sum(state.row_sum, half == 0 ? state.rescale[0] : state.rescale[1]);
#pragma unroll
  for (int pair = 0; pair < Traits::kKeys / 8; ++pair) {
    const float2 two = *reinterpret_cast<const float2*>(probs + row * Traits::kProbsStride +
                                                        pair * 8 + lane % 4 * 2);
    state.row_sum = __fadd_rn(state.row_sum, two.x);
    state.row_sum = __fadd_rn(state.row_sum, two.y);
  }
}

template <typename Traits>
__device__ __forceinline__ void rescale_acc(FewRowsState<Traits>& state) {
#pragma unroll
  for (int tile = 0; tile < Traits::kColumns / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.acc[tile][i] = rescaled_acc(state.acc[tile][i], state.rescale[i / 2]);
    }
  }
}

// Of the threads that write a row's maximum and sum: its row, and whether this is one of them.
template <typename Traits>
struct FewRowsSum {
  int row;
  float row_max;
  bool is_mine;

  __device__ __forceinline__ explicit FewRowsSum(const FewRowsState<Traits>& state)
      : row(warp_row<Traits>() + threadIdx.x % 32 / 4 + 8 * (threadIdx.x / 32 % 2)),
        row_max(threadIdx.x / 32 % 2 == 0 ? state.row_max[0] : state.row_max[1]),
        is_mine(sharer<Traits>() < 2 && threadIdx.x % 4 == 0) {}
};

template <typename Traits>
__device__ __forceinline__ void write_part(const FwdParams& params, const RowGroup& rows,
                                           const FewRowsState<Traits>& state) {
  const int lane = threadIdx.x % 32;
  const int column = sharer<Traits>() * Traits::kColumns + lane % 4 * 2;
  const FewRowsSum<Traits> sum(state);
  if (sum.is_mine && sum.row < rows.count) {
    params.parts.state[part_row(params, sum.row)] = make_float2(sum.row_max, state.row_sum);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row<Traits>() + lane / 4 + 8 * half;
    if (row < rows.count) {
      write_part_columns<Traits::kHeadDim>(params, row, column, state.acc, half);
    }
  }
}

// ends: room in shared memory for two numbers a row.
template <typename Traits>
__device__ __forceinline__ void write_rows(const FwdParams& params, const SequenceInfo& info,
                                           const RowGroup& rows, const FewRowsState<Traits>& state,
                                           float2* ends) {
  const int lane = threadIdx.x % 32;
  const int column = sharer<Traits>() * Traits::kColumns + lane % 4 * 2;
  const FewRowsSum<Traits> sum(state);
  __syncthreads();
  if (sum.is_mine && sum.row < rows.count) {
    ends[sum.row] = end_row(params, info, rows, sum.row, sum.row_max, state.row_sum);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row<Traits>() + lane / 4 + 8 * half;
    if (row < rows.count) {
      write_columns<typename Traits::Element>(params, info, rows, row, column, state.acc, half,
                                              ends[row]);
    }
  }
}

template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kCtas) void few_rows_kernel(
    const __grid_constant__ FwdParams params) {
  using Element = typename Traits::Element;
  constexpr int kKeys = Traits::kKeys;
  constexpr int kSteps = Traits::kHeadDim / 16;  // of q k^T
  constexpr int kKeyTiles = Traits::kWarpKeys / 8;
  constexpr int kTiles = Traits::kColumns / 8;  // of P V

  extern __shared__ char smem[];
  float* const probs = reinterpret_cast<float*>(smem + Traits::kSlots * Traits::kSlotBytes);
  Element* const probs16 = reinterpret_cast<Element*>(probs + Traits::kRows * Traits::kProbsStride);
  float* const maxima = reinterpret_cast<float*>(probs16 + Traits::kRows * Traits::kProbsStride);

  const Place place = group_place(params, Traits::kRows, params.parts.first_cta + blockIdx.x);
  const SequenceInfo info(params, place.bidb);
  RowGroup rows(params, info, place, Traits::kRows);
  rows.limit_to_split(params, blockIdx.y);
  const bool whole = params.num_splits == 1;
  if (rows.count <= 0 || (rows.n_max <= rows.n_min && !whole)) {
    return;
  }
  const int items = 2 * max(rows.n_max - rows.n_min, 0);

  const int head_k = rows.bidh / params.h_h_k_ratio;
  constexpr int kElementBytes = Traits::kFp8 ? 1 : 2;
  const KvHead keys =
      kv_head<kElementBytes>(params, info, rows.bidb, head_k, params.k_ptr, params.k_batch_stride,
                             params.k_row_stride, params.k_head_stride);
  const KvHead values =
      kv_head<kElementBytes>(params, info, rows.bidb, head_k, params.v_ptr, params.v_batch_stride,
                             params.v_row_stride, params.v_head_stride);
  // Item 2 n is block n of keys, item 2 n + 1 of values; they go around through the slots.
  const auto slot_of = [&](int item) { return smem + item % Traits::kSlots * Traits::kSlotBytes; };
  SplitPages<Traits> pages(params, rows);
  const auto key_of = [&](int item) { return (rows.n_max - 1 - item / 2) * kKeys; };
  const auto start_copy = [&](int item, auto is_values) {
    if (item < items) {
      const int first_key = key_of(item);
      copy_block<Traits>(is_values ? values : keys, pages.of(item / 2), first_key,
                         rows.seqlen_k - first_key, params.d, slot_of(item));
    }
  };
  // Once this thread's copy has ended, and before others read it.
  const auto end_copy = [&](int item) {
    if (Traits::kFp8 && item < items) {
      widen_block<Traits>(slot_of(item));
    }
  };
  char* const q_slot = slot_of(Traits::kSlots - 1);  // nothing else comes there before the loop
#pragma unroll 1
  for (int item = 0; item < Traits::kSlots - 1; item += 2) {
    start_copy(item, std::false_type{});
    if (item == 0) {
      copy_queries<Traits>(params, info, rows, q_slot);
    }
    cute::cp_async_fence();
    if (item + 1 < Traits::kSlots - 1) {
      start_copy(item + 1, std::true_type{});
      cute::cp_async_fence();
    }
  }

  const int lane = threadIdx.x % 32;
  const ThreadRows mine(params, rows, warp_row<Traits>() + lane / 4);
  const int thread_key = sharer<Traits>() * Traits::kWarpKeys + lane % 4 * 2;
  FewRowsState<Traits> state;
  uint32_t q[kSteps][4];
  uint32_t k[kKeyTiles][kSteps / 2][4];
  FewRowsScores<Traits> scores = {};
  const auto multiply_keys = [&](int step, const char* slot) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      uint32_t (&pair)[4] = k[tile][step / 2];
      if (!Traits::kLoadsAhead && step % 2 == 0) {
        load_keys<Traits>(slot, tile, step / 2, pair);
      }
      mma<Element>(scores[tile], q[step], pair[step % 2 * 2], pair[step % 2 * 2 + 1]);
    }
  };
  cute::cp_async_wait<Traits::kSlots - 2>();
  end_copy(0);
  __syncthreads();
  load_queries<Traits::kHeadDim>(q_slot, warp_row<Traits>(), q);
  if (Traits::kLoadsAhead) {
    load_keys<Traits>(slot_of(0), k);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    multiply_keys(step, slot_of(0));
  }

  using Even = std::bool_constant<Traits::kSlots % 2 != 0>;  // whether item + kSlots is of values
  using Odd = std::bool_constant<Traits::kSlots % 2 == 0>;   // and item + kSlots - 1
#pragma unroll 1
  for (int item = 0; item < items; item += 2) {
    pages.advance((item + Traits::kSlots) / 2);
    finish_scores(params, rows, mine, key_of(item) + thread_key, rows.is_cut(key_of(item)), scores);
    write_maxima<Traits>(scores, maxima);
    // After this barrier the maxima are complete, and all have read these keys and the values
    // before them: their slots are free.
    __syncthreads();
    // Maxima are read before copies start: both use the queue of shared memory.
    const float new_max[2] = {raised_max<Traits>(maxima, 0, state.row_max[0]),
                              raised_max<Traits>(maxima, 1, state.row_max[1])};
    start_copy(item + Traits::kSlots - 1, Odd{});
    cute::cp_async_fence();
    if (!Traits::kFillsApart) {
      start_copy(item + Traits::kSlots, Even{});
      cute::cp_async_fence();
    }
    write_probs<Traits>(scores, params.scale_softmax_log2, new_max, state, probs, probs16);
    cute::cp_async_wait<Traits::kSlots - 2 - Traits::kFillsApart>();
    end_copy(item + 1);
    end_copy(item + 2);
    __syncthreads();  // probabilities, values and the next keys are complete

    // After the last block there are no keys, and the products with them are not used.
    uint32_t v[2][kTiles][4];
    uint32_t p[4][4];
    if (Traits::kLoadsAhead) {
      load_keys<Traits>(slot_of(item + 2), k);
      load_values<Traits>(slot_of(item + 1), v);
#pragma unroll
      for (int keys16 = 0; keys16 < 4; ++keys16) {
        load_probs<Traits>(probs16, warp_row<Traits>(), keys16, p[keys16]);
      }
    }
    add_to_sum<Traits>(probs, state);
    if (Traits::kFillsApart) {
      start_copy(item + Traits::kSlots, Even{});
      cute::cp_async_fence();
    }
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[tile][i] = 0.f;
      }
    }
    rescale_acc<Traits>(state);
    // Side by side: each is a chain of tensor core instructions, and waits for itself only.
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_keys(step, slot_of(item + 2));
#pragma unroll
      for (int keys16 = step * 4 / kSteps; keys16 < (step + 1) * 4 / kSteps; ++keys16) {
        if (!Traits::kLoadsAhead) {
          load_probs<Traits>(probs16, warp_row<Traits>(), keys16, p[keys16]);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t (&four)[4] = v[keys16 / 2][tile];
          if (!Traits::kLoadsAhead && keys16 % 2 == 0) {
            load_values<Traits>(slot_of(item + 1), keys16 / 2, tile, four);
          }
          mma<Element>(state.acc[tile], p[keys16], four[keys16 % 2 * 2], four[keys16 % 2 * 2 + 1]);
        }
      }
    }
  }

  state.row_sum += __shfl_xor_sync(0xffffffff, state.row_sum, 2);
  state.row_sum += __shfl_xor_sync(0xffffffff, state.row_sum, 1);
  if (whole) {
    write_rows<Traits>(params, info, rows, state, reinterpret_cast<float2*>(maxima));
  } else {
    write_part<Traits>(params, rows, state);
  }
}

}  // namespace fad
