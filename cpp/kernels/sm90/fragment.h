// Parts of a tile as the threads of a warpgroup hold them: of every eight columns of an accumulator
// two neighbouring ones of two rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fad::sm90 {

template <typename Element>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<Element, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// What rounding takes from two numbers, in bfloat16.
template <typename Element>
__device__ __forceinline__ uint32_t packed_residual(float low, float high) {
  const uint32_t rounded = packed<Element>(low, high);
  float2 back;
  if constexpr (std::is_same_v<Element, __half>) {
    back = __half22float2(reinterpret_cast<const __half2&>(rounded));
  } else {
    back = make_float2(__uint_as_float(rounded << 16), __uint_as_float(rounded & 0xffff0000u));
  }
  return packed<__nv_bfloat16>(__fsub_rn(low, back.x), __fsub_rn(high, back.y));
}

// Four words of each of four neighbouring threads, transposed: thread i gets word i of each.
__device__ __forceinline__ uint4 quad_transpose(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int lane = threadIdx.x % 4;
  const bool odd = lane & 1;
  const bool upper = lane & 2;
  const uint32_t ab = __shfl_xor_sync(~0u, odd ? a : b, 1);
  const uint32_t cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
  const uint32_t a1 = odd ? ab : a;
  const uint32_t b1 = odd ? b : ab;
  const uint32_t c1 = odd ? cd : c;
  const uint32_t d1 = odd ? d : cd;
  const uint32_t ac = __shfl_xor_sync(~0u, upper ? a1 : c1, 2);
  const uint32_t bd = __shfl_xor_sync(~0u, upper ? b1 : d1, 2);
  return upper ? make_uint4(ac, bd, c1, d1) : make_uint4(a1, b1, ac, bd);
}

// Four 8 x 8 matrices of 16-bit values, each transposed: thread i gives the address of row i % 8 of
// matrix i / 8 as it will be in shared memory, 16 bytes.
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t* pairs) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
      : "memory");
}

}  // namespace fad::sm90
