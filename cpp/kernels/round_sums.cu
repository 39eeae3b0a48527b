#include "round_sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "launch.h"

namespace fad {

namespace {

constexpr int kThreads = 256;

// One of dk and dv: (rows, h_k, d), contiguous, from sums (rows, h, d).
template <typename Element>
__global__ void round_kernel(Element* gradient, const float* sums, const int* cu_seqlens_k,
                             int batch, int64_t rows, int heads, int group, int head_dim,
                             float scale, bool scales) {
  // Rows of packed tensors behind the last sequence are zeros already.
  const int64_t end =
      cu_seqlens_k == nullptr ? rows : min(rows, static_cast<int64_t>(cu_seqlens_k[batch]));
  const int64_t width = static_cast<int64_t>(heads) / group * head_dim;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; at < end * width;
       at += step) {
    const int64_t row_and_head = at / head_dim;
    const float* const first = sums + row_and_head * group * head_dim + at % head_dim;
    float sum = *first;
    for (int head = 1; head < group; ++head) {
      sum = __fadd_rn(sum, first[static_cast<int64_t>(head) * head_dim]);
    }
    gradient[at] = static_cast<Element>(scales ? __fmul_rn(sum, scale) : sum);
  }
}

template <typename Element>
void round_both(const BwdParams& params, cudaStream_t stream) {
  const int64_t rows = params.cu_seqlens_k != nullptr
                           ? params.total_k
                           : static_cast<int64_t>(params.b) * params.seqlen_k;
  const int64_t elements = rows * params.h_k * params.d;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((elements + kThreads - 1) / kThreads, 1 << 16));
  const auto round = [&](void* gradient, const float* sums, float scale, bool scales) {
    launch<&round_kernel<Element>>(blocks, kThreads, 0, 0, stream, static_cast<Element*>(gradient),
                                   sums, params.cu_seqlens_k, params.b, rows, params.h,
                                   params.h_h_k_ratio, params.d, scale, scales);
  };
  round(params.dk_ptr, params.dk_sums, params.scale_softmax_rp_dropout, true);
  round(params.dv_ptr, params.dv_sums, params.rp_dropout, params.p_dropout < 1.f);
}

}  // namespace

void round_sums(const BwdParams& params, cudaStream_t stream) {
  if (params.is_bf16) {
    round_both<__nv_bfloat16>(params, stream);
  } else {
    round_both<__half>(params, stream);
  }
}

}  // namespace fad
