// Hopper's decode of multi-head latent attention (sm80/decode/latent.cuh), for 64 rows: of three
// warpgroups the first computes scores and their softmax; the first and the second multiply the
// weights with half of the values' columns each; the third loads keys. A block's keys are loaded
// while the block after it is worked on. The bits are those of the sm80 family.
#pragma once

#include <type_traits>

#include "fwd.h"
#include "latent_entry.h"
#include "launch.h"
#include "sm80/decode/few_rows_end.cuh"
#include "sm80/decode/latent_rows.cuh"
#include "sm90/barrier.h"
#include "sm90/forward/fwd_softmax.cuh"
#include "sm90/fragment.h"
#include "sm90/wgmma.h"

namespace fad::sm90 {

template <typename Element_>
struct LatentTile {
  using Element = Element_;
  using Number =
      std::conditional_t<std::is_same_v<Element, cutlass::half_t>, __half, __nv_bfloat16>;
  static constexpr int kHeadDim = kLatentHeadDim;
  static constexpr int kRows = kLatentRows;
  static constexpr int kKeys = kStep;
  static constexpr int kSteps = 1;
  static constexpr int kColumns = kLatentHeadDimV / 2;  // of a warpgroup
  static constexpr int kThreads = 3 * 128;
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  // Copies: eight of the producer's threads to a row.
  static constexpr int kRowsAtOnce = 128 / 8;
  static constexpr int kCopiedRows = kKeys / kRowsAtOnce;
  // Shared memory: boxes of 64 columns, as wgmma.h reads them, of queries and of two blocks of
  // keys; weights and factors, as threads hold them; what ends a row; barriers.
  static constexpr int kBoxBytes = kKeys * kBoxRowBytes;
  static constexpr int kBlockBytes = kHeadDim / kBoxColumns * kBoxBytes;
  static constexpr int kSlotsAt = kBlockBytes;
  static constexpr int kWeightsAt = kSlotsAt + 2 * kBlockBytes;
  static constexpr int kFactorsAt = kWeightsAt + 128 * 64;
  static constexpr int kEndsAt = kFactorsAt + 128 * 8;
  static constexpr int kFull = kEndsAt + kRows * 8;
  static constexpr int kEmpty = kFull + 2 * 8;
  static_assert(kRows == kGroupRows && kRows == kKeys && kEmpty + 2 * 8 == kLatentSharedBytes &&
                kLatentSharedBytes <= shared_bytes(1));

  // Where 16 bytes of a row lie in a block.
  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    return chunk / 8 * kBoxBytes + row * kBoxRowBytes + (chunk % 8 ^ row % 8) * 16;
  }
};

// Named barriers between the first two warpgroups: weights are there, and have been read.
constexpr int kWeightsFull = 1, kWeightsEmpty = 2;

__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(inside ? 16 : 0)
               : "memory");
}

// Arrives once all copies that this thread has started are complete.
__device__ __forceinline__ void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

template <typename T>
__device__ __forceinline__ void load_latent(const fad::FwdParams& params, const SequenceInfo& info,
                                            const RowGroup& rows, uint32_t shared) {
  const int thread = threadIdx.x % 128;
  const auto start = [&](uint32_t block, int row, const void* from, bool inside) {
#pragma unroll
    for (int box = 0; box < T::kHeadDim / kBoxColumns; ++box) {
      copy_async(shared + block + T::offset(row, box * 8 + thread % 8),
                 static_cast<const char*>(from) + box * kBoxRowBytes + thread % 8 * 16, inside);
    }
  };
  if (rows.n_max <= rows.n_min) {
    return;  // nobody waits for the queries
  }
#pragma unroll 1
  for (int row = thread / 8; row < T::kRows; row += T::kRowsAtOnce) {
    const bool inside = row < rows.count;
    start(0, row, query_row<typename T::Element>(params, info, rows, inside ? row : 0), inside);
  }
  LatentRows<T> keys(params, info, rows);
  keys.look_up((rows.n_max - 1) * T::kKeys, thread / 8);
  uint32_t turn = 0;
#pragma unroll 1
  for (int n_block = rows.n_max - 1; n_block >= rows.n_min; --n_block, ++turn) {
    const uint32_t slot = turn % 2;
    barrier_wait(shared + T::kEmpty + 8 * slot, turn / 2 % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < T::kCopiedRows; ++i) {
      const bool inside = keys.at[i] != nullptr;
      start(T::kSlotsAt + slot * T::kBlockBytes, thread / 8 + i * T::kRowsAtOnce,
            inside ? keys.at[i] : keys.from.data, inside);
    }
    arrive_with_copies(shared + T::kFull + 8 * slot);
    keys.look_up((n_block - 1) * T::kKeys, thread / 8);
  }
}

// One of the two warpgroups that compute.
template <typename T>
struct LatentConsumer {
  const fad::FwdParams& params;
  const RowGroup& rows;
  uint32_t shared;
  int group = threadIdx.x / 128;
  int thread = threadIdx.x % 128;
  int lane = threadIdx.x % 32;
  int first_row = thread / 32 * 16 + lane / 4;  // of two, the other one 8 below
  RowState state;                               // the first warpgroup's
  float acc[T::kColumns / 2] = {};

  __device__ __forceinline__ void run() {
    const ThreadRows mine(params, rows, first_row);
    if (group == 1) {
      named_barrier_arrive(kWeightsEmpty, 256);
    }
    uint32_t turn = 0;
#pragma unroll 1
    for (int n_block = rows.n_max - 1; n_block >= rows.n_min; --n_block, ++turn) {
      const uint32_t slot = turn % 2;
      const uint32_t block = shared + T::kSlotsAt + slot * T::kBlockBytes;
      barrier_wait(shared + T::kFull + 8 * slot, turn / 2 % 2);
      fence_async_proxy();  // the keys were copied by threads
      uint32_t weights[T::kKeys / 4];
      float2 factor;
      if (group == 0) {
        factor = compute_weights(mine, n_block * T::kKeys, block, weights);
        pass_on(weights, factor);
      } else {
        factor = take(weights);
      }
      add_values(block, weights, factor);
      barrier_arrive(shared + T::kEmpty + 8 * slot);
    }
    if (group == 0) {
      named_barrier_sync(kWeightsEmpty, 256);  // as often as the second arrives
      state.sum[0] = quad_sum(state.sum[0]);
      state.sum[1] = quad_sum(state.sum[1]);
    }
  }

 private:
  __device__ __forceinline__ float2 compute_weights(const ThreadRows& mine, int first_key,
                                                    uint32_t block,
                                                    uint32_t (&weights)[T::kKeys / 4]) {
    float scores[T::kKeys / 2];
    const uint64_t q = operand(shared, 16);
    const uint64_t k = operand(block, 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 16; ++i) {
      const uint64_t at = i / 4 * T::kBoxBytes / 16 + i % 4 * kOperandColumns16;
      SharedProduct<typename T::Number, T::kKeys>::issue(scores, q + at, k + at, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(scores);
    finish_scores(params, rows, mine, first_key + lane % 4 * 2, rows.is_cut(first_key),
                  reinterpret_cast<float (&)[T::kKeys / 8][4]>(scores));
    StepScales<1> scales;
    find_maxima<T>(params.scale_softmax_log2, scores, state, scales);
    exponentiate<T>(params.scale_softmax_log2, scores, state, scales);
#pragma unroll
    for (int j = 0; j < T::kKeys / 4; ++j) {
      weights[j] = packed<typename T::Number>(scores[2 * j], scores[2 * j + 1]);
    }
    return make_float2(scales.factor[0][0], scales.factor[0][1]);
  }

  // 16 words of a thread are 512 bytes apart in four: neighbours have neighbouring 16 bytes.
  __device__ __forceinline__ uint32_t weights_at(int four) const {
    return shared + T::kWeightsAt + (four * 128 + thread) * 16;
  }

  __device__ __forceinline__ void pass_on(const uint32_t (&weights)[T::kKeys / 4],
                                          float2 factor) const {
    named_barrier_sync(kWeightsEmpty, 256);
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i) {
      store_shared_ints(weights_at(i), reinterpret_cast<const int4*>(weights)[i]);
    }
    store_shared(shared + T::kFactorsAt + thread * 8, factor);
    named_barrier_arrive(kWeightsFull, 256);
  }

  __device__ __forceinline__ float2 take(uint32_t (&weights)[T::kKeys / 4]) const {
    named_barrier_sync(kWeightsFull, 256);
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i) {
      reinterpret_cast<int4*>(weights)[i] = load_shared_ints(weights_at(i));
    }
    const float2 factor = load_shared_pair(shared + T::kFactorsAt + thread * 8);
    named_barrier_arrive(kWeightsEmpty, 256);
    return factor;
  }

  __device__ __forceinline__ void add_values(uint32_t block, uint32_t (&weights)[T::kKeys / 4],
                                             float2 factor) {
    rescale(acc, {factor.x, factor.y});
    const uint64_t v =
        operand(block + group * T::kColumns / kBoxColumns * T::kBoxBytes, T::kBoxBytes);
    hold(acc);
    hold(weights);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i) {
      RegisterProduct<typename T::Number, T::kColumns>::issue(acc, weights + 4 * i,
                                                              v + i * kOperandRows16, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(acc);
    hold(weights);
  }
};

template <typename T>
__global__ __launch_bounds__(T::kThreads, 1) void latent_sm90_kernel(
    const __grid_constant__ fad::FwdParams params) {
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const Place place = group_place(params, T::kRows, params.parts.first_cta + blockIdx.x);
  const SequenceInfo info(params, place.bidb);
  RowGroup rows(params, info, place, T::kRows);
  rows.limit_to_split(params, blockIdx.y);
  const bool whole = params.num_splits == 1;
  if (rows.count <= 0 || (rows.n_max <= rows.n_min && !whole)) {
    return;
  }
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < 2; ++slot) {
      barrier_init(shared + T::kFull + 8 * slot, 128);
      barrier_init(shared + T::kEmpty + 8 * slot, 256);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x / 128 == 2) {
    give_registers<T::kProducerRegisters>();
    load_latent<T>(params, info, rows, shared);
    return;
  }
  take_registers<T::kConsumerRegisters>();
  LatentConsumer<T> consumer{params, rows, shared};
  consumer.run();
  const RowState& state = consumer.state;
  const bool writes_sums = consumer.group == 0 && consumer.lane % 4 == 0;
  if (whole) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = consumer.first_row + 8 * half;
      if (writes_sums && row < rows.count) {
        const float2 end = end_row(params, info, rows, row, state.max[half], state.sum[half]);
        store_shared(shared + T::kEndsAt + row * 8, end);
      }
    }
    named_barrier_sync(kWeightsFull, 256);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = consumer.first_row + 8 * half;
    if (row >= rows.count) {
      continue;
    }
    const int column = consumer.group * T::kColumns + consumer.lane % 4 * 2;
    auto& acc = reinterpret_cast<const float (&)[T::kColumns / 8][4]>(consumer.acc);
    if (whole) {
      const float2 end = load_shared_pair(shared + T::kEndsAt + row * 8);
      write_columns<typename T::Element>(params, info, rows, row, column, acc, half, end);
    } else {
      if (writes_sums) {
        params.parts.state[part_row(params, row)] = make_float2(state.max[half], state.sum[half]);
      }
      write_part_columns<T::kHeadDim>(params, row, column, acc, half);
    }
  }
}

template <typename Element>
void latent_sm90(const fad::FwdParams& params, unsigned ctas, cudaStream_t stream) {
  using T = LatentTile<Element>;
  launch<&latent_sm90_kernel<T>>(dim3(ctas, params.num_splits), T::kThreads, kLatentSharedBytes,
                                 kLatentSharedBytes, stream, params);
}

}  // namespace fad::sm90
