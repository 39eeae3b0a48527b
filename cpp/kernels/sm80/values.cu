#include "values.h"

#include "../launch.h"
#include "values.cuh"

namespace fad {

template <typename Element>
void launch_values(const FwdParams& params, unsigned ctas, int head_dim, cudaStream_t stream) {
  const auto run = [&](auto traits) {
    using Traits = decltype(traits);
    const dim3 grid(ctas, params.num_splits, head_dim / kValueColumns);
    launch<&values_kernel<Traits>>(grid, Traits::kThreads, Traits::kSharedBytes,
                                   Traits::kSharedBytes, stream, params);
  };
  if (params.block_table == nullptr) {
    run(ValuesTraits<Element, false>{});
  } else {
    run(ValuesTraits<Element, true>{});
  }
}

template void launch_values<cutlass::half_t>(const FwdParams&, unsigned, int, cudaStream_t);
template void launch_values<cutlass::bfloat16_t>(const FwdParams&, unsigned, int, cudaStream_t);

}  // namespace fad
