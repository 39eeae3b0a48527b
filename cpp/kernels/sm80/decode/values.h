// Launches the second kernel of the path scores-first (scores_first.h). It knows no head dim, only
// columns, and so is compiled once for each dtype, apart from the kernels of a head dim.
#pragma once

#include "fwd.h"

namespace fad {

// ctas: row blocks.
template <typename Element>
void launch_values(const FwdParams& params, unsigned ctas, cudaStream_t stream);

}  // namespace fad
