// From e4m3, in which a cache may be kept, to the 16 bits that kernels compute with: each number is
// one of bfloat16 and of float16 too. From compute capability 8.9 on an instruction makes two
// numbers float16; before, shifts and a product do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fad {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

// Two numbers, in the lower 16 bits.
template <typename Element>
__device__ __forceinline__ uint32_t widened_pair(uint32_t pair) {
  uint32_t number;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(number) : "h"(static_cast<uint16_t>(pair)));
  if constexpr (!std::is_same_v<Element, cutlass::half_t>) {
    __half2 half;
    std::memcpy(&half, &number, sizeof half);
    const __nv_bfloat162 exact = __float22bfloat162_rn(__half22float2(half));
    std::memcpy(&number, &exact, sizeof number);
  }
  return number;
}

template <typename Element>
__device__ __forceinline__ uint2 widened(uint32_t four) {
  return make_uint2(widened_pair<Element>(four), widened_pair<Element>(four >> 16));
}

#else

// Two numbers in the upper bytes of 16 bits each. Exponent and mantissa move to where Element has
// them; one product then makes up for the other bias. It is exact, of subnormal numbers too: they
// are so in Element, which these products do not flush to 0.
template <typename Element>
__device__ __forceinline__ uint32_t widened_pair(uint32_t pair) {
  constexpr bool kHalf = std::is_same_v<Element, cutlass::half_t>;
  using Two = std::conditional_t<kHalf, __half2, __nv_bfloat162>;
  constexpr int kShift = kHalf ? 1 : 4;
  constexpr uint32_t kMost = 0x7f00u >> kShift;            // NaN
  constexpr uint32_t kAbove = kMost + (0x100u >> kShift);  // the bit that NaN alone carries to
  constexpr uint32_t kRest = (kHalf ? 0x7c00u : 0x7f80u) & ~kMost;
  constexpr uint32_t kFactor = kHalf ? 0x5c00u : 0x7b80u;  // 2^8, 2^120
  constexpr uint32_t kBoth = 0x10001u;
  uint32_t number = (pair >> kShift) & (kMost * kBoth);
  const uint32_t is_nan = (number + (0x100u >> kShift) * kBoth) & (kAbove * kBoth);
  number += is_nan / kAbove * kRest;
  number |= pair & 0x80008000u;
  const uint32_t factor = kFactor * kBoth;
  Two left, right;
  std::memcpy(&left, &number, sizeof left);
  std::memcpy(&right, &factor, sizeof right);
  const Two product = __hmul2(left, right);
  std::memcpy(&number, &product, sizeof number);
  return number;
}

template <typename Element>
__device__ __forceinline__ uint2 widened(uint32_t four) {
  const uint32_t low = (four & 0xffu) << 8 | (four & 0xff00u) << 16;
  const uint32_t high = (four & 0xff0000u) >> 8 | (four & 0xff000000u);
  return make_uint2(widened_pair<Element>(low), widened_pair<Element>(high));
}

#endif

}  // namespace fad
