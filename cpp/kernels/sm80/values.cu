#include "values.h"

#include "../launch.h"
#include "values.cuh"

namespace fad {

template <typename Element>
void launch_values(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  const auto run = [&](auto traits) {
    using Traits = decltype(traits);
    const dim3 grid(ctas * (params.d_rounded / kValueColumns), params.num_splits);
    const auto run_kernel = params.scores.blocks > 0  // else no scores kernel runs before
                                ? &launch_early<&values_kernel<Traits>, FwdParams>
                                : &launch<&values_kernel<Traits>, FwdParams>;
    run_kernel(grid, Traits::kThreads, Traits::kSharedBytes, Traits::kSharedBytes, stream, params);
  };
  if (params.block_table == nullptr) {
    run(ValuesTraits<Element, false>{});
  } else {
    run(ValuesTraits<Element, true>{});
  }
}

template void launch_values<cutlass::half_t>(const FwdParams&, unsigned, cudaStream_t);
template void launch_values<cutlass::bfloat16_t>(const FwdParams&, unsigned, cudaStream_t);

}  // namespace fad
