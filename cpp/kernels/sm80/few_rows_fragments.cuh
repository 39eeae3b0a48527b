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

// q, as the tensor cores take it: 16 columns a step.
template <int kHeadDim, int kSteps>
__device__ __forceinline__ void load_queries(const char* slot, uint32_t (&q)[kSteps][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    cute::SM75_U32x4_LDSM_N::copy(
        *reinterpret_cast<const cute::uint128_t*>(
            slot + slot_offset<kHeadDim>(lane % 16, step * 2 + lane / 16)),
        q[step][0], q[step][1], q[step][2], q[step][3]);
  }
}

// This warp's keys: eight of them to a tile, two steps of q to a pair.
template <typename Traits, int kTiles, int kPairs>
__device__ __forceinline__ void load_keys(const char* slot, uint32_t (&k)[kTiles][kPairs][4]) {
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * Traits::kWarpKeys + lane % 8;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<const cute::uint128_t*>(
              slot + slot_offset<Traits::kHeadDim>(first_row + tile * 8, pair * 4 + lane / 8)),
          k[tile][pair][0], k[tile][pair][1], k[tile][pair][2], k[tile][pair][3]);
    }
  }
}

// This warp's columns of the values: eight of them to a tile, 32 keys to a half.
template <typename Traits, int kTiles>
__device__ __forceinline__ void load_values(const char* slot, uint32_t (&v)[2][kTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int first_chunk = threadIdx.x / 32 * kTiles;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      cute::SM75_U16x8_LDSM_T::copy(
          *reinterpret_cast<const cute::uint128_t*>(
              slot + slot_offset<Traits::kHeadDim>(half * 32 + lane, first_chunk + tile)),
          v[half][tile][0], v[half][tile][1], v[half][tile][2], v[half][tile][3]);
    }
  }
}

// Probabilities of all keys of the block: 16 of them to a step.
template <typename Traits>
__device__ __forceinline__ void load_probs(const typename Traits::Element* probs,
                                           uint32_t (&p)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    cute::SM75_U32x4_LDSM_N::copy(
        *reinterpret_cast<const cute::uint128_t*>(probs + lane % 16 * Traits::kProbsStride +
                                                  step * 16 + lane / 16 * 8),
        p[step][0], p[step][1], p[step][2], p[step][3]);
  }
}

}  // namespace fad
