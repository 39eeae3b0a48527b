// The gradient of sinks.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace fad {

// Rows that one CTA adds up.
constexpr int kSinkRows = 128;

// Of each query head: minus the sum, over the rows of all sequences, of the sink's probability
// times (rowsum(dout * out) - dlse). sinks, dsink: (h); sums: (b, h, blocks of kSinkRows rows). The
// sum of a sequence depends on nothing else; those of sequences are added first to last.
void sink_bwd(const BwdParams& params, const float* sinks, float* sums, float* dsink,
              cudaStream_t stream);

}  // namespace fad
