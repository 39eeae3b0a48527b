// A kernel that starts while the one before it in the stream still runs: launch_early (launch.h).
//
// Before 9.0, and where it is launched like any other, it starts when that one has ended, and
// nothing here does anything.
#pragma once

namespace fad {

// The next kernel may start once all CTAs of this one have called this, or have ended. It finds
// nothing of what this one writes before it has waited.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernel before has ended, and what it wrote is there. Every thread calls this before it
// ends: the kernel after this one takes its end for that of the one before, too.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fad
