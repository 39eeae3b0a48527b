#include "values.h"

#include "launch.h"
#include "values.cuh"

namespace fad {

template <typename Element>
void launch_values(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  const auto run = [&](auto traits) {
    using Traits = decltype(traits);
    const dim3 grid(ctas * (params.d_rounded / kValueColumns), params.num_splits);
    launch<&values_kernel<Traits>>(grid, Traits::kThreads, Traits::kSharedBytes,
                                   Traits::kSharedBytes, stream, params);
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
