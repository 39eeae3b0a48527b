#include "scores.h"

#include "instances.h"
#include "launch.h"
#include "scores.cuh"

namespace fad {

template <typename Element, int kHeadDim>
void launch_scores(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  using Traits = ScoresTraits<Element, kHeadDim>;
  const unsigned units = ctas / num_blocks(params.seqlen_q * params.group, kScoreRows);
  launch<&scores_kernel<Traits>>(units * num_blocks(params.scores.blocks, Traits::kWarps),
                                 Traits::kThreads, Traits::kSharedBytes, Traits::kSharedBytes,
                                 stream, params);
}

using fp16 = cutlass::half_t;
using bf16 = cutlass::bfloat16_t;
#define FAD_SCORES(dtype, head_dim) \
  template void launch_scores<dtype, head_dim>(const FwdParams&, unsigned, cudaStream_t);
FAD_FWD_INSTANCES(FAD_SCORES)
#undef FAD_SCORES

}  // namespace fad
