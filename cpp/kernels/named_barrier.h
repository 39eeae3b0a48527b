// Named barriers, where warps with different work meet. __syncthreads is only for code that all
// threads of a CTA run.
#pragma once

namespace fad {

// Waits until this many threads have reached a barrier (1 to 15; 0 is that of __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts this thread as come, and goes on.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fad
