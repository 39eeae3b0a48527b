// Decode of multi-head latent attention on the absorbed path: 576 columns of q and k, of which the
// first 512 of k are the values too. One CTA takes up to 16 rows (row_group.cuh) and one split, as
// few_rows.cuh does, whose steps these are. Here a block of keys is read from memory once, for both
// products, and fills shared memory with the queries, which are too many for registers. Hopper has
// room for two CTAs, of which one computes while the other waits.
#pragma once

#include "few_rows.cuh"
#include "latent_rows.cuh"

namespace fad {

template <typename Element_>
struct LatentTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kLatentHeadDim;
  static constexpr int kRows = 16;
  static constexpr int kKeys = kKeysPerBlock;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtas = 2;  // to an SM, where they fit
  // As in FewRowsTraits.
  static constexpr int kSharers = kWarps;
  static constexpr int kWarpKeys = kKeys / kSharers;
  static constexpr int kColumns = kLatentHeadDimV / kSharers;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kSlotBytes = kKeys * kHeadDim * 2;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kProbsStride = kKeys + 8;
  static constexpr int kProbsBytes = kRows * kProbsStride * (4 + 2);
  static constexpr int kMaximaBytes = kSharers * kRows * 4;
  static constexpr int kSharedBytes = kSlotBytes + kQueryBytes + kProbsBytes + kMaximaBytes;
  // Copies: eight threads to a row, 16 bytes each, and then the next 128 bytes.
  static constexpr int kRowsAtOnce = kThreads / 8;
  static constexpr int kCopiedRows = kKeys / kRowsAtOnce;
  static_assert(kKeys % kRowsAtOnce == 0 && kChunks % 8 == 0);
};

template <typename Traits>
__device__ __forceinline__ void copy_rows(const LatentRows<Traits>& keys, char* slot) {
  using Chunk = cute::uint128_t;
#pragma unroll
  for (int i = 0; i < Traits::kCopiedRows; ++i) {
    const int row = threadIdx.x / 8 + i * Traits::kRowsAtOnce;
    const bool inside = keys.at[i] != nullptr;
    const auto* const source = reinterpret_cast<const Chunk*>(inside ? keys.at[i] : keys.from.data);
#pragma unroll
    for (int chunk = threadIdx.x % 8; chunk < Traits::kChunks; chunk += 8) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>::copy(
          source[inside ? chunk : 0],
          *reinterpret_cast<Chunk*>(slot + slot_offset<Traits::kHeadDim>(row, chunk)), inside);
    }
  }
}

template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kCtas) void latent_kernel(
    const __grid_constant__ FwdParams params) {
  using Element = typename Traits::Element;
  constexpr int kKeys = Traits::kKeys;
  constexpr int kSteps = Traits::kHeadDim / 16;  // of q k^T
  constexpr int kTiles = Traits::kColumns / 8;   // of P V

  extern __shared__ char smem[];
  char* const queries = smem + Traits::kSlotBytes;
  float* const probs = reinterpret_cast<float*>(queries + Traits::kQueryBytes);
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
  LatentRows<Traits> keys(params, info, rows);
  // Starts the copy of a block, if there is one, and looks up the block before it.
  const auto start_copy = [&](int n_block) {
    if (n_block >= rows.n_min) {
      copy_rows(keys, smem);
      keys.look_up((n_block - 1) * kKeys, threadIdx.x / 8);
    }
    cute::cp_async_fence();
  };
  keys.look_up((rows.n_max - 1) * kKeys, threadIdx.x / 8);
  copy_queries<Traits>(params, info, rows, queries);
  start_copy(rows.n_max - 1);

  const int lane = threadIdx.x % 32;
  const ThreadRows mine(params, rows, warp_row<Traits>() + lane / 4);
  const int thread_key = sharer<Traits>() * Traits::kWarpKeys + lane % 4 * 2;
  FewRowsState<Traits> state;
#pragma unroll 1
  for (int n_block = rows.n_max - 1; n_block >= rows.n_min; --n_block) {
    cute::cp_async_wait<0>();
    __syncthreads();  // the keys are complete
    FewRowsScores<Traits> scores = {};
#pragma unroll 4
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      uint32_t k[4];
      load_keys<Traits>(smem, 0, pair, k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t q[4];
        load_query_step<Traits::kHeadDim>(queries, 0, 2 * pair + half, q);
        mma<Element>(scores[0], q, k[2 * half], k[2 * half + 1]);
      }
    }
    const int first_key = n_block * kKeys;
    finish_scores(params, rows, mine, first_key + thread_key, rows.is_cut(first_key), scores);
    write_maxima<Traits>(scores, maxima);
    __syncthreads();
    const float new_max[2] = {raised_max<Traits>(maxima, 0, state.row_max[0]),
                              raised_max<Traits>(maxima, 1, state.row_max[1])};
    write_probs<Traits>(scores, params.scale_softmax_log2, new_max, state, probs, probs16);
    __syncthreads();
    add_to_sum<Traits>(probs, state);
    rescale_acc<Traits>(state);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t p[2][4];
      load_probs<Traits>(probs16, warp_row<Traits>(), 2 * half, p[0]);
      load_probs<Traits>(probs16, warp_row<Traits>(), 2 * half + 1, p[1]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t v[4];
        load_values<Traits>(smem, half, tile, v);
        mma<Element>(state.acc[tile], p[0], v[0], v[1]);
        mma<Element>(state.acc[tile], p[1], v[2], v[3]);
      }
    }
    __syncthreads();  // all have read the block
    start_copy(n_block - 1);
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
