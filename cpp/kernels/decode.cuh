// Attention of a few rows (decode): one CTA takes up to 16 rows and one split. Upstream's body
// gives each warp rows of its own, most of which a decode leaves empty; here the warps share the
// rows, and divide the keys of a block among them for q k^T, the columns of the head dim for P V.
// A decode waits for latency, not for arithmetic: q k^T of the next block stands beside P V of this
// one.
//
// The bits are those of upstream's patched body: it sees the same blocks of 64 keys in the same
// order, each element of q k^T and P V is the same chain of the same tensor core instructions, and
// what lies between goes through the same functions.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <type_traits>

#include "kernel_traits.h"  // upstream; its other headers lean on this one

#include "block_info.h"  // upstream
#include "fwd_rows.cuh"
#include "kv_rows.h"
#include "params.h"
#include "softmax_steps.h"

namespace fad {

template <typename Element_, int kHeadDim_>
struct DecodeTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kFewRows;
  static constexpr int kKeys = 64;
  static constexpr int kWarps = kHeadDim % 64 == 0 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpKeys = kKeys / kWarps;    // of q k^T, to a warp
  static constexpr int kColumns = kHeadDim / kWarps;  // of P V, to a warp
  // Shared memory: blocks of keys and of values on their way, in turn; scores, as fp32 to be summed
  // up and as Element to be multiplied; maxima.
  static constexpr int kSlotBytes = kKeys * kHeadDim * 2;
  static constexpr int kProbsStride = kKeys + 8;  // no bank conflicts
  static constexpr int kProbsBytes = kRows * kProbsStride * (4 + 2);
  static constexpr int kMaximaBytes = kWarps * kRows * 4;
  static constexpr int kSlots = std::min(8, (98 * 1024 - kProbsBytes - kMaximaBytes) / kSlotBytes);
  static constexpr int kSharedBytes = kSlots * kSlotBytes + kProbsBytes + kMaximaBytes;
  static_assert(kSlots >= 2 && kColumns % 8 == 0);
};

template <typename Element>
__device__ __forceinline__ void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  using Op =
      std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                         cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  Op::fma(acc[0], acc[1], acc[2], acc[3], a[0], a[1], a[2], a[3], b0, b1, acc[0], acc[1], acc[2],
          acc[3]);
}

// Where 16 bytes of a row of keys or values lie in a slot, so that eight rows can be read at once.
template <int kHeadDim>
__device__ __forceinline__ int slot_offset(int row, int chunk) {
  constexpr int kChunks = kHeadDim / 8;
  const int swizzled = kChunks % 8 == 0 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
  return (row * kChunks + swizzled) * 16;
}

// Where keys or values of one head of one sequence lie in memory.
struct KvHead {
  const char* data;
  int64_t row_bytes, page_bytes;
  const int* pages;  // nullptr: no pages
  int page_block_size;

  __device__ __forceinline__ const char* row(int key) const {
    if (pages == nullptr) {
      return data + key * row_bytes;
    }
    const int page = key / page_block_size;
    return data + pages[page] * page_bytes + (key - page * page_block_size) * row_bytes;
  }
};

template <typename Info>
__device__ __forceinline__ KvHead kv_head(const FwdParams& params, const Info& info, int bidb,
                                          int head, void* data, int64_t batch_stride,
                                          int64_t row_stride, int64_t head_stride) {
  using Rows = KvRows</*kMayBePaged=*/true>;
  const int64_t first =
      Rows::offset(params, info, batch_stride, row_stride, bidb) + head * head_stride;
  return {static_cast<const char*>(data) + 2 * first, 2 * row_stride, 2 * batch_stride,
          params.block_table == nullptr
              ? nullptr
              : params.block_table + bidb * params.block_table_batch_stride,
          params.page_block_size};
}

// Starts the copy of a block of keys or values; rows from `rows` on and columns from d on are
// zeros.
template <typename Traits>
__device__ __forceinline__ void copy_block(const KvHead& from, int first_key, int rows, int d,
                                           char* slot) {
  using Chunk = cute::uint128_t;
  constexpr int kChunks = Traits::kHeadDim / 8;
  constexpr int kRowsAtOnce = Traits::kThreads / kChunks;
  const int first_row = threadIdx.x / kChunks;
  const int chunk = threadIdx.x % kChunks;
  if (first_row >= kRowsAtOnce) {
    return;
  }
  const auto to = [&](int row) -> Chunk& {
    return *reinterpret_cast<Chunk*>(slot + slot_offset<Traits::kHeadDim>(row, chunk));
  };
  if (from.pages == nullptr && rows >= Traits::kKeys && d == Traits::kHeadDim) {
    const char* source = from.data + (first_key + first_row) * from.row_bytes + chunk * 16;
#pragma unroll
    for (int row = 0; row < Traits::kKeys; row += kRowsAtOnce) {
      if (Traits::kKeys % kRowsAtOnce == 0 || first_row + row < Traits::kKeys) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<Chunk>::copy(*reinterpret_cast<const Chunk*>(source),
                                                     to(first_row + row));
      }
      source += kRowsAtOnce * from.row_bytes;
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < Traits::kKeys; row += kRowsAtOnce) {
    const bool inside = row < rows && chunk * 8 < d;
    const char* const source = inside ? from.row(first_key + row) + chunk * 16 : from.data;
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>::copy(*reinterpret_cast<const Chunk*>(source),
                                                       to(row), inside);
  }
}

// Scores of one warp's keys with q, before anything else is done to them.
template <typename Traits, int kSteps, int kTiles>
__device__ __forceinline__ void multiply_keys(const uint32_t (&q)[kSteps][4], const char* slot,
                                              float (&scores)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * Traits::kWarpKeys + lane % 8;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t k[kSteps / 2][4];  // eight keys, two steps at a time
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<const cute::uint128_t*>(
              slot + slot_offset<Traits::kHeadDim>(first_row + tile * 8, pair * 4 + lane / 8)),
          k[pair][0], k[pair][1], k[pair][2], k[pair][3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[tile][i] = 0.f;
    }
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      mma<typename Traits::Element>(scores[tile], q[2 * pair], k[pair][0], k[pair][1]);
      mma<typename Traits::Element>(scores[tile], q[2 * pair + 1], k[pair][2], k[pair][3]);
    }
  }
}

template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads) void decode_kernel(
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
  const int items = 2 * max(n_max - n_min, 0);  // blocks of keys and of values, in turn

  const int head_k = bidh / params.h_h_k_ratio;
  const KvHead keys = kv_head(params, info, bidb, head_k, params.k_ptr, params.k_batch_stride,
                              params.k_row_stride, params.k_head_stride);
  const KvHead values = kv_head(params, info, bidb, head_k, params.v_ptr, params.v_batch_stride,
                                params.v_row_stride, params.v_head_stride);
  const auto slot_of = [&](int item) { return smem + item % Traits::kSlots * Traits::kSlotBytes; };
  const auto copy_item = [&](int item, auto is_values) {
    if (item < items) {
      const int first_key = (n_max - 1 - item / 2) * kKeys;
      copy_block<Traits>(is_values ? values : keys, first_key, seqlen_k - first_key, params.d,
                         slot_of(item));
    }
    cute::cp_async_fence();
  };
  using Even = std::bool_constant<Traits::kSlots % 2 != 0>;  // whether item + kSlots is of values
  using Odd = std::bool_constant<Traits::kSlots % 2 == 0>;   // and item + kSlots - 1
#pragma unroll 1
  for (int item = 0; item < Traits::kSlots - 1; item += 2) {
    copy_item(item, std::false_type{});
    if (item + 1 < Traits::kSlots - 1) {
      copy_item(item + 1, std::true_type{});
    }
  }

  // q, as the tensor cores take it: rows lane / 4 and 8 below, in each step 16 columns.
  uint32_t q[kSteps][4];
  {
    const Element* const from = static_cast<const Element*>(params.q_ptr) +
                                info.q_offset(params.q_batch_stride, params.q_row_stride, batch) +
                                bidh * params.q_head_stride;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int row = lane / 4 + part % 2 * 8;
        const int column = step * 16 + lane % 4 * 2 + part / 2 * 8;
        q[step][part] =
            row < rows && column < params.d
                ? *reinterpret_cast<const uint32_t*>(from + row * params.q_row_stride + column)
                : 0;
      }
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
  // Here they are the first two warps, row thread / 4.
  const int sum_row = thread / 4 % Traits::kRows;
  float sum_max = -INFINITY;
  float row_sum = 0.f;

  float scores[kKeyTiles][4];
  cute::cp_async_wait<Traits::kSlots - 2>();
  __syncthreads();
  multiply_keys<Traits>(q, slot_of(0), scores);

#pragma unroll 1
  for (int item = 0; item < items; item += 2) {
    const int first_key = (n_max - 1 - item / 2) * kKeys;
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
    copy_item(item + Traits::kSlots - 1, Odd{});
    copy_item(item + Traits::kSlots, Even{});
    const auto raise = [&](float& most, int row) {  // and returns what brings older terms down
      const float before = most;
#pragma unroll
      for (int w = 0; w < Traits::kWarps; w += 4) {
        const float4 four = *reinterpret_cast<const float4*>(maxima + row * Traits::kWarps + w);
        most = fmaxf(most, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
      }
      const float now = most == -INFINITY ? 0.f : most;
      return exp2f((before - now) * params.scale_softmax_log2);
    };
    row_sum = rescaled_sum(row_sum, raise(sum_max, sum_row));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      const float rescale = raise(row_max[half], row);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        acc[tile][2 * half] *= rescale;
        acc[tile][2 * half + 1] *= rescale;
      }
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
    cute::cp_async_wait<Traits::kSlots - 2>();
    __syncthreads();  // probabilities, values and the next keys are here

    uint32_t v[2][kTiles][4];
    const char* const value_slot = slot_of(item + 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 keys
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        cute::SM75_U16x8_LDSM_T::copy(
            *reinterpret_cast<const cute::uint128_t*>(
                value_slot + slot_offset<Traits::kHeadDim>(half * 32 + lane, warp * kTiles + tile)),
            v[half][tile][0], v[half][tile][1], v[half][tile][2], v[half][tile][3]);
      }
    }
    if (item + 2 < items) {
      multiply_keys<Traits>(q, slot_of(item + 2), scores);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t p[4];
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(
                                        probs16 + lane % 16 * kStride + step * 16 + lane / 16 * 8),
                                    p[0], p[1], p[2], p[3]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma<Element>(acc[tile], p, v[step / 2][tile][step % 2 * 2],
                     v[step / 2][tile][step % 2 * 2 + 1]);
      }
    }
    if (thread < 4 * Traits::kRows) {
#pragma unroll
      for (int pair = 0; pair < kKeys / 8; ++pair) {
        const float2 two =
            *reinterpret_cast<const float2*>(probs + sum_row * kStride + pair * 8 + thread % 4 * 2);
        row_sum = __fadd_rn(row_sum, two.x);
        row_sum = __fadd_rn(row_sum, two.y);
      }
    }
  }

  row_sum += __shfl_xor_sync(0xffffffff, row_sum, 2);
  row_sum += __shfl_xor_sync(0xffffffff, row_sum, 1);
  const bool writes_state = thread < 4 * Traits::kRows && thread % 4 == 0 && sum_row < rows;
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
  if (thread < 4 * Traits::kRows && thread % 4 == 0) {
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
