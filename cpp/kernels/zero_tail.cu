#include "zero_tail.h"

#include <c10/cuda/CUDAException.h>

namespace fad {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 64;  // rarely is there anything to do

__global__ void zero_tail_kernel(uint4* data, const int* cu_seqlens, int batch, int64_t rows,
                                 int64_t row_words) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t at = cu_seqlens[batch] * row_words + blockIdx.x * kThreads + threadIdx.x;
  for (; at < rows * row_words; at += step) {
    data[at] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace

void zero_tail(void* data, const int* cu_seqlens, int batch, std::int64_t rows,
               std::int64_t row_bytes, cudaStream_t stream) {
  if (rows == 0) {
    return;
  }
  zero_tail_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<uint4*>(data), cu_seqlens, batch,
                                                     rows, row_bytes / 16);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fad
