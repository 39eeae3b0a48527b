// Launches the first kernel of the path scores-first (scores_first.h). One source compiles it for
// all head dims and dtypes: features are decided at run time, so that there are few instances.
#pragma once

#include "fwd.h"

namespace fad {

// ctas: row blocks, all those of some (sequence, group of heads).
template <typename Element, int kHeadDim>
void launch_scores(const FwdParams& params, unsigned ctas, cudaStream_t stream);

}  // namespace fad
