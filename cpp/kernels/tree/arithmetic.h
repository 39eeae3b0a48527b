// Arithmetic whose rounding is written out. Kernels are compiled without contraction (--fmad=false)
// and flush denormals (--ftz=true), so that with these functions the bits of a result follow from
// the source, and not from what the compiler chooses to fuse or to approximate.
#pragma once

namespace fad {

// 2^x: one instruction, approximate, denormals flushed.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ln(x): log2 in one instruction, then one product.
__device__ __forceinline__ float log_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmul_rn(y, 0.693147181f);
}

// 1 / x: one instruction, approximate, denormals flushed.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x * y with denormals kept, whatever the compiler's flags: times 1 is then exact for every x.
__device__ __forceinline__ float multiply_keeping_denormals(float x, float y) {
  float z;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// x + y with denormals kept, likewise: plus 0 is then exact for every x but -0.
__device__ __forceinline__ float add_keeping_denormals(float x, float y) {
  float z;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace fad
