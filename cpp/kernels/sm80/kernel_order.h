// A kernel that starts while the one before it in the stream still runs: launch_early (launch.h).
//
// Before 9.0, and in a plain launch, it starts when that one has ended; then these functions do
// nothing.
#pragma once

namespace fad {

// The next kernel may start once all CTAs of this one have called this, or have ended. It may read
// what this one writes only after wait_for_kernel_before.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before has ended and what it wrote is visible. Every thread calls this
// before it ends: the kernel after this one relies on the end of both.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fad
