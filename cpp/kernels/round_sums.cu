#include "round_sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "launch.h"

namespace fad {

namespace {

constexpr int kThreads = 256;

template <typename Element>
__global__ void round_kernel(const __grid_constant__ KeySums sums) {
  const int64_t elements = sums.rows * (sums.heads / sums.group) * sums.head_dim;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; at < elements;
       at += step) {
    const int64_t row_and_head = at / sums.head_dim;
    const float* const first =
        sums.sums + row_and_head * sums.group * sums.head_dim + at % sums.head_dim;
    float sum = *first;
    for (int head = 1; head < sums.group; ++head) {
      sum = __fadd_rn(sum, first[static_cast<int64_t>(head) * sums.head_dim]);
    }
    const float scaled = sums.scales ? __fmul_rn(sum, sums.scale) : sum;
    static_cast<Element*>(sums.gradient)[at] = static_cast<Element>(scaled);
  }
}

}  // namespace

void round_sums(const KeySums& sums, bool is_bf16, cudaStream_t stream) {
  const int64_t elements = sums.rows * (sums.heads / sums.group) * sums.head_dim;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((elements + kThreads - 1) / kThreads, 1 << 16));
  if (is_bf16) {
    launch<&round_kernel<__nv_bfloat16>>(blocks, kThreads, 0, 0, stream, sums);
  } else {
    launch<&round_kernel<__half>>(blocks, kThreads, 0, 0, stream, sums);
  }
}

}  // namespace fad
