#include "values.h"

#include <type_traits>

#include "launch.h"
#include "values.cuh"

namespace fad {

template <typename Element>
void launch_values(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  const auto run = [&](auto traits) {
    using Traits = decltype(traits);
    const unsigned of_unit = num_blocks(params.seqlen_q * params.group, kScoreRows);
    const unsigned units = ctas / of_unit;
    const dim3 grid(
        units * num_blocks(of_unit, Traits::kRowBlocks) * (params.d_rounded / kValueColumns),
        params.num_splits);
    const auto run_kernel = params.scores.blocks > 0  // else no scores kernel runs before
                                ? &launch_early<&values_kernel<Traits>, FwdParams>
                                : &launch<&values_kernel<Traits>, FwdParams>;
    run_kernel(grid, Traits::kThreads, Traits::kSharedBytes, Traits::kSharedBytes, stream, params);
  };
  const auto run_rows = [&](auto row_blocks) {
    constexpr int kRowBlocks = decltype(row_blocks)::value;
    if (params.block_table == nullptr) {
      run(ValuesTraits<Element, false, kRowBlocks>{});
    } else {
      run(ValuesTraits<Element, true, kRowBlocks>{});
    }
  };
  if (params.seqlen_q * params.group <= kScoreRows) {
    run_rows(std::integral_constant<int, 1>{});
  } else {
    run_rows(std::integral_constant<int, 2>{});
  }
}

template void launch_values<cutlass::half_t>(const FwdParams&, unsigned, cudaStream_t);
template void launch_values<cutlass::bfloat16_t>(const FwdParams&, unsigned, cudaStream_t);

}  // namespace fad
