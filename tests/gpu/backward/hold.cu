// Takes SMs away from other kernels.

// Holds an SM for so many nanoseconds: it takes nearly all of its shared memory.
__global__ void hold_kernel(long long nanoseconds) {
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

extern "C" int hold(int sms, int shared, long long nanoseconds, cudaStream_t stream) {
  cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  hold_kernel<<<sms, 32, shared, stream>>>(nanoseconds);
  return cudaGetLastError();
}
