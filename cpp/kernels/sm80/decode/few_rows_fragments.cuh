// The tensor core instruction of few_rows.cuh, and its operands, from shared memory to registers.
#pragma once

#include <cute/tensor.hpp>

#include <type_traits>

#include "few_rows_traits.h"

namespace fad {

template <typename Element>
__device__ __forceinline__ void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  using Op =
      std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                         cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  Op::fma(acc[0], acc[1], acc[2], acc[3], a[0], a[1], a[2], a[3], b0, b1, acc[0], acc[1], acc[2],
          acc[3]);
}

// q of 16 rows, as the tensor cores take it: 16 columns a step.
template <int kHeadDim>
__device__ __forceinline__ void load_query_step(const char* slot, int first_row, int step,
                                                uint32_t (&q)[4]) {
  const int lane = threadIdx.x % 32;
  cute::SM75_U32x4_LDSM_N::copy(
      *reinterpret_cast<const cute::uint128_t*>(
          slot + slot_offset<kHeadDim>(first_row + lane % 16, step * 2 + lane / 16)),
      q[0], q[1], q[2], q[3]);
}

template <int kHeadDim, int kSteps>
__device__ __forceinline__ void load_queries(const char* slot, int first_row,
                                             uint32_t (&q)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_query_step<kHeadDim>(slot, first_row, step, q[step]);
  }
}

// Eight keys, and 32 columns (two steps of q) of them.
template <int kHeadDim>
__device__ __forceinline__ void load_eight_keys(const char* slot, int first_key, int pair,
                                                uint32_t (&k)[4]) {
  const int lane = threadIdx.x % 32;
  cute::SM75_U32x4_LDSM_N::copy(
      *reinterpret_cast<const cute::uint128_t*>(
          slot + slot_offset<kHeadDim>(first_key + lane % 8, pair * 4 + lane / 8)),
      k[0], k[1], k[2], k[3]);
}

// Some of this warp's keys.
template <typename Traits>
__device__ __forceinline__ void load_keys(const char* slot, int tile, int pair, uint32_t (&k)[4]) {
  const int first_key = sharer<Traits>() * Traits::kWarpKeys + tile * 8;
  load_eight_keys<Traits::kHeadDim>(slot, first_key, pair, k);
}

template <typename Traits, int kTiles, int kPairs>
__device__ __forceinline__ void load_keys(const char* slot, uint32_t (&k)[kTiles][kPairs][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      load_keys<Traits>(slot, tile, pair, k[tile][pair]);
    }
  }
}

// Eight columns of the values, and 32 keys (two steps of P V) of them: a key to a lane.
__device__ __forceinline__ void load_transposed(const char* eight, uint32_t (&v)[4]) {
  cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(eight), v[0], v[1], v[2],
                                v[3]);
}

// Some of this warp's columns.
template <typename Traits>
__device__ __forceinline__ void load_values(const char* slot, int half, int tile,
                                            uint32_t (&v)[4]) {
  const int chunk = sharer<Traits>() * (Traits::kColumns / 8) + tile;
  const int row = half * 32 + threadIdx.x % 32;
  load_transposed(slot + slot_offset<Traits::kHeadDim>(row, chunk), v);
}

template <typename Traits, int kTiles>
__device__ __forceinline__ void load_values(const char* slot, uint32_t (&v)[2][kTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      load_values<Traits>(slot, half, tile, v[half][tile]);
    }
  }
}

// Probabilities of 16 rows and 16 keys.
template <typename Traits>
__device__ __forceinline__ void load_probs(const typename Traits::Element* probs, int first_row,
                                           int keys16, uint32_t (&p)[4]) {
  const int lane = threadIdx.x % 32;
  cute::SM75_U32x4_LDSM_N::copy(
      *reinterpret_cast<const cute::uint128_t*>(
          probs + (first_row + lane % 16) * Traits::kProbsStride + keys16 * 16 + lane / 16 * 8),
      p[0], p[1], p[2], p[3]);
}

}  // namespace fad
