// Launches the first kernel of the path scores-first (scores_first.h). Like the second one it is
// compiled apart from the other kernels of a head dim: for 9.0 with instructions that 8.0 lacks.
#pragma once

#include "fwd.h"

namespace fad {

// ctas: row blocks, all those of some (sequence, group of heads).
template <typename Element, int kHeadDim>
void launch_scores(const FwdParams& params, unsigned ctas, cudaStream_t stream);

}  // namespace fad
