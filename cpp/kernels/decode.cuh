// Attention of a few rows (decode): one CTA takes up to 16 rows and one split. Upstream's body
// gives each warp rows of its own, most of which a decode leaves empty; here the warps share the
// rows, and divide the keys of a block among them for q k^T, the columns of the head dim for P V.
// A decode waits for latency and for shared memory, not for arithmetic: q k^T of the next block
// stands beside P V of this one.
//
// The bits are those of upstream's patched body: it sees the same blocks of 64 keys in the same
// order, each element of q k^T and P V is the same chain of the same tensor core instructions, and
// what lies between goes through the same functions.
#pragma once

#include <cutlass/fast_math.h>

#include <type_traits>

#include "kernel_traits.h"  // upstream; its other headers lean on this one

#include "block_info.h"  // upstream
#include "decode_copy.cuh"
#include "decode_fragments.cuh"
#include "decode_traits.h"
#include "fwd_rows.cuh"
#include "params.h"
#include "softmax_steps.h"

namespace fad {

template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kCtas) void decode_kernel(
    const __grid_constant__ FwdParams params) {
  using Element = typename Traits::Element;
  constexpr int kKeys = Traits::kKeys;
  constexpr int kSteps = Traits::kHeadDim / 16;  // of q k^T
  constexpr int kKeyTiles = Traits::kWarpKeys / 8;
  constexpr int kTiles = Traits::kColumns / 8;  // of P V
  constexpr int kStride = Traits::kProbsStride;

  extern __shared__ char smem[];
  float* const probs = reinterpret_cast<float*>(smem + Traits::kSlots * Traits::kSlotBytes);
  Element* const probs16 = reinterpret_cast<Element*>(probs + Traits::kRows * kStride);
  float* const maxima = reinterpret_cast<float*>(probs16 + Traits::kRows * kStride);

  const int thread = threadIdx.x;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int bidb = blockIdx.x / params.h;
  const int bidh = blockIdx.x % params.h;
  const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
  const int rows = info.actual_seqlen_q;
  const int batch = row_batch(params, bidb);
  if (rows <= 0 || batch < 0) {
    return;
  }
  const int seqlen_k = info.actual_seqlen_k;

  // Visible keys: [begin, end) for any row, and which blocks of this split hold them.
  const int shift = seqlen_k - rows;  // from row to position
  const int right = params.is_causal ? 0 : params.window_size_right;
  const int left = params.window_size_left;
  const int end = right < 0 ? seqlen_k : min(seqlen_k, rows + shift + right);
  const int begin = left < 0 ? 0 : max(0, shift - left);
  const int split_first = blockIdx.y * params.split_blocks;
  const int n_min = max(begin / kKeys, split_first);
  const int n_max = end <= 0
                        ? 0
                        : min((end + kKeys - 1) / kKeys,
                              params.num_parts > 1 ? split_first + params.split_blocks : (1 << 30));
  const bool whole = params.num_parts <= 1;
  if (n_max <= n_min && !whole) {
    return;
  }
  const int items = 2 * max(n_max - n_min, 0);

  const int head_k = bidh / params.h_h_k_ratio;
  const KvHead keys = kv_head(params, info, bidb, head_k, params.k_ptr, params.k_batch_stride,
                              params.k_row_stride, params.k_head_stride);
  const KvHead values = kv_head(params, info, bidb, head_k, params.v_ptr, params.v_batch_stride,
                                params.v_row_stride, params.v_head_stride);
  // Item 2 n is block n of keys, item 2 n + 1 of values; they go around through the slots.
  const auto slot_of = [&](int item) { return smem + item % Traits::kSlots * Traits::kSlotBytes; };
  const PageTable table{
      Traits::kPaged ? params.block_table + bidb * params.block_table_batch_stride : nullptr,
      params.page_block_size};
  const auto key_of = [&](int item) { return (n_max - 1 - item / 2) * kKeys; };
  const auto pages_of = [&](int item) {  // of an item that is not there: nobody's
    return BlockPages<Traits>(table, item < items ? key_of(item) : seqlen_k, seqlen_k);
  };
  const auto start_copy = [&](int item, auto is_values, const BlockPages<Traits>& pages) {
    if (item < items) {
      const int first_key = key_of(item);
      copy_block<Traits>(is_values ? values : keys, pages, first_key, seqlen_k - first_key,
                         params.d, slot_of(item));
    }
  };
  char* const q_slot = slot_of(Traits::kSlots - 1);  // nothing else comes there before the loop
#pragma unroll 1
  for (int item = 0; item < Traits::kSlots - 1; item += 2) {
    const BlockPages<Traits> pages = pages_of(item);
    start_copy(item, std::false_type{}, pages);
    if (item == 0) {
      copy_queries<Traits>(static_cast<const Element*>(params.q_ptr) +
                               info.q_offset(params.q_batch_stride, params.q_row_stride, batch) +
                               bidh * params.q_head_stride,
                           params.q_row_stride, rows, params.d, q_slot);
    }
    cute::cp_async_fence();
    if (item + 1 < Traits::kSlots - 1) {
      start_copy(item + 1, std::true_type{}, pages);
      cute::cp_async_fence();
    }
  }

  const float slope =
      params.alibi_slopes_ptr == nullptr
          ? 0.f
          : static_cast<const float*>(
                params.alibi_slopes_ptr)[bidb * params.alibi_slopes_batch_stride + bidh] /
                params.scale_softmax;

  // Of the rows lane / 4 and 8 below.
  float row_max[2] = {-INFINITY, -INFINITY};
  float acc[kTiles][4] = {};
  // The sum of a row is that of four threads, each of which takes every fourth pair of columns.
  // Every second warp has the same eight rows; the first two write them.
  const int sum_half = warp % 2;
  const int sum_row = lane / 4 + 8 * sum_half;
  float row_sum = 0.f;

  uint32_t q[kSteps][4];
  uint32_t k[kKeyTiles][kSteps / 2][4];
  float scores[kKeyTiles][4] = {};
  const auto multiply_keys = [&](int step) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const uint32_t (&pair)[4] = k[tile][step / 2];
      mma<Element>(scores[tile], q[step], pair[step % 2 * 2], pair[step % 2 * 2 + 1]);
    }
  };
  cute::cp_async_wait<Traits::kSlots - 2>();
  __syncthreads();
  load_queries<Traits::kHeadDim>(q_slot, q);
  load_keys<Traits>(slot_of(0), k);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    multiply_keys(step);
  }

  using Even = std::bool_constant<Traits::kSlots % 2 != 0>;  // whether item + kSlots is of values
  using Odd = std::bool_constant<Traits::kSlots % 2 == 0>;   // and item + kSlots - 1
#pragma unroll 1
  for (int item = 0; item < items; item += 2) {
    const BlockPages<Traits> first_pages = pages_of(item + Traits::kSlots - 1);
    const BlockPages<Traits> second_pages = pages_of(item + Traits::kSlots);
    const int first_key = key_of(item);
    const int warp_key = first_key + warp * Traits::kWarpKeys + lane % 4 * 2;
    const int position = lane / 4 + shift;
    if (params.softcap > 0.f) {
#pragma unroll
      for (int i = 0; i < 4 * kKeyTiles; ++i) {
        scores[i / 4][i % 4] = cutlass::fast_tanh(scores[i / 4][i % 4] * params.softcap);
      }
    }
    if (params.alibi_slopes_ptr != nullptr) {
#pragma unroll
      for (int i = 0; i < 4 * kKeyTiles; ++i) {
        const int distance = position + i / 2 % 2 * 8 - (warp_key + i / 4 * 8 + i % 2);
        scores[i / 4][i % 4] = alibi_score(scores[i / 4][i % 4], slope, distance);
      }
    }
    if (first_key + kKeys > seqlen_k || left >= 0 || right >= 0) {
#pragma unroll
      for (int i = 0; i < 4 * kKeyTiles; ++i) {
        const int row = position + i / 2 % 2 * 8;
        const int key = warp_key + i / 4 * 8 + i % 2;
        if (key >= seqlen_k || (right >= 0 && key > row + right) ||
            (left >= 0 && key < row - left)) {
          scores[i / 4][i % 4] = -INFINITY;
        }
      }
    }

    // The maximum over all keys of the block.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        most = fmaxf(most, fmaxf(scores[tile][2 * half], scores[tile][2 * half + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      if (lane % 4 == 0) {
        maxima[(lane / 4 + 8 * half) * Traits::kWarps + warp] = most;
      }
    }
    // Maxima are here; nobody reads these keys, or the values before them, any more.
    __syncthreads();
    // Read before copies start: they share a queue.
    float most[2] = {row_max[0], row_max[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < Traits::kWarps; w += 4) {
        const float4 four =
            *reinterpret_cast<const float4*>(maxima + (lane / 4 + 8 * half) * Traits::kWarps + w);
        most[half] = fmaxf(most[half], fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
      }
    }
    start_copy(item + Traits::kSlots - 1, Odd{}, first_pages);
    cute::cp_async_fence();
    if (!Traits::kFillsApart) {
      start_copy(item + Traits::kSlots, Even{}, second_pages);
      cute::cp_async_fence();
    }
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      const float now = most[half] == -INFINITY ? 0.f : most[half];
      rescale[half] = exp2f((row_max[half] - now) * params.scale_softmax_log2);
      row_max[half] = most[half];
      const float max_scaled =
          row_max[half] == -INFINITY ? 0.f : scaled_max(row_max[half], params.scale_softmax_log2);
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        const float first =
            scaled_exp2(scores[tile][2 * half], params.scale_softmax_log2, max_scaled);
        const float second =
            scaled_exp2(scores[tile][2 * half + 1], params.scale_softmax_log2, max_scaled);
        const int at = row * kStride + warp * Traits::kWarpKeys + tile * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(probs + at) = make_float2(first, second);
        cutlass::Array<Element, 2> two;
        two[0] = static_cast<Element>(first);
        two[1] = static_cast<Element>(second);
        *reinterpret_cast<uint32_t*>(probs16 + at) = reinterpret_cast<const uint32_t&>(two);
      }
    }
    cute::cp_async_wait<Traits::kSlots - 2 - Traits::kFillsApart>();
    __syncthreads();  // probabilities, values and the next keys are here

    // After the last block there are no keys; what is worked out then goes nowhere.
    load_keys<Traits>(slot_of(item + 2), k);
    uint32_t v[2][kTiles][4];
    load_values<Traits>(slot_of(item + 1), v);
    uint32_t p[4][4];
    load_probs<Traits>(probs16, p);
    row_sum = rescaled_sum(row_sum, sum_half == 0 ? rescale[0] : rescale[1]);
#pragma unroll
    for (int pair = 0; pair < kKeys / 8; ++pair) {
      const float2 two =
          *reinterpret_cast<const float2*>(probs + sum_row * kStride + pair * 8 + lane % 4 * 2);
      row_sum = __fadd_rn(row_sum, two.x);
      row_sum = __fadd_rn(row_sum, two.y);
    }
    if (Traits::kFillsApart) {
      start_copy(item + Traits::kSlots, Even{}, second_pages);
      cute::cp_async_fence();
    }
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[tile][i] = 0.f;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[tile][i] *= rescale[i / 2];
      }
    }
    // Side by side: each is a chain of tensor core instructions, and waits for itself only.
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_keys(step);
#pragma unroll
      for (int keys = step * 4 / kSteps; keys < (step + 1) * 4 / kSteps; ++keys) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint32_t (&four)[4] = v[keys / 2][tile];
          mma<Element>(acc[tile], p[keys], four[keys % 2 * 2], four[keys % 2 * 2 + 1]);
        }
      }
    }
  }

  row_sum += __shfl_xor_sync(0xffffffff, row_sum, 2);
  row_sum += __shfl_xor_sync(0xffffffff, row_sum, 1);
  const float sum_max = sum_half == 0 ? row_max[0] : row_max[1];
  const bool writes_state = warp < 2 && lane % 4 == 0 && sum_row < rows;
  const int column = warp * Traits::kColumns + lane % 4 * 2;
  if (!whole) {
    const int64_t first =
        ((static_cast<int64_t>(blockIdx.y) * params.b + bidb) * params.h + bidh) * params.seqlen_q;
    if (writes_state) {
      params.part_state[first + sum_row] = make_float2(sum_max, row_sum);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row < rows) {
        float* const part = params.part_acc + (first + row) * Traits::kHeadDim + column;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          *reinterpret_cast<float2*>(part + tile * 8) =
              make_float2(acc[tile][2 * half], acc[tile][2 * half + 1]);
        }
      }
    }
    return;
  }
  __syncthreads();
  if (warp < 2 && lane % 4 == 0) {
    maxima[sum_row] = inverse_sum(row_sum);
  }
  __syncthreads();
  if (writes_state) {
    write_lse(params, info, batch, bidh, sum_row, sum_max, row_sum);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    if (row < rows) {
      const float inverse = maxima[row];
      Element* const out = out_row<Element>(params, info, batch, bidh, row) + column;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (column + tile * 8 < params.d) {
          out[tile * 8] = static_cast<Element>(normalised(acc[tile][2 * half], inverse));
          out[tile * 8 + 1] = static_cast<Element>(normalised(acc[tile][2 * half + 1], inverse));
        }
      }
    }
  }
}

}  // namespace fad
