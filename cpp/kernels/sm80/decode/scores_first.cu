// The path scores-first. One source compiles its kernels for all head dims and dtypes: features are
// decided at run time, and the second kernel knows no head dim, only columns, so that there are few
// instances.
#include "instances.h"
#include "launch.h"
#include "scores.cuh"
#include "values.cuh"

namespace fad {

template <typename Element, bool kPaged>
void launch_values(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  using Traits = ValuesTraits<Element, kPaged>;
  const dim3 grid(ctas * (params.d_rounded / kValueColumns), params.num_splits);
  launch<&values_kernel<Traits>>(grid, Traits::kThreads, Traits::kSharedBytes, Traits::kSharedBytes,
                                 stream, params);
}

template <typename Element, int kHeadDim>
void launch_scores_first(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  using Traits = ScoresTraits<Element, kHeadDim>;
  const unsigned units = ctas / num_blocks(params.seqlen_q * params.group, kScoreRows);
  launch<&scores_kernel<Traits>>(units * num_blocks(params.scores.blocks, Traits::kWarps),
                                 Traits::kThreads, Traits::kSharedBytes, Traits::kSharedBytes,
                                 stream, params);
  if (params.block_table == nullptr) {
    launch_values<Element, false>(params, ctas, stream);
  } else {
    launch_values<Element, true>(params, ctas, stream);
  }
}

using fp16 = cutlass::half_t;
using bf16 = cutlass::bfloat16_t;
#define FAD_SCORES_FIRST(dtype, head_dim) \
  template void launch_scores_first<dtype, head_dim>(const FwdParams&, unsigned, cudaStream_t);
FAD_FWD_INSTANCES(FAD_SCORES_FIRST)
#undef FAD_SCORES_FIRST

}  // namespace fad
