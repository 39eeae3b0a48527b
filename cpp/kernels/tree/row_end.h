// The end of a row: where its queries lie, and where its output and log-sum-exp go.
#pragma once

#include "../params.h"
#include "softmax_steps.h"

namespace fad {

template <typename Element, typename Info>
__device__ __forceinline__ Element* out_row(const FwdParams& params, const Info& info, int bidb,
                                            int bidh, int row) {
  return static_cast<Element*>(params.o_ptr) +
         info.q_offset(params.o_batch_stride, params.o_row_stride, bidb) +
         row * params.o_row_stride + bidh * params.o_head_stride;
}

// softmax_lse lies as get_lse_tile in upstream's kernel has it: (b, h, seqlen_q), or (h, total_q)
// for packed sequences.
template <typename Info>
__device__ __forceinline__ void write_lse(const FwdParams& params, const Info& info, int bidb,
                                          int bidh, int row, float row_max, float row_sum) {
  const int64_t at = params.unpadded_lse
                         ? static_cast<int64_t>(bidh) * params.total_q +
                               info.q_offset(params.seqlen_q, 1, bidb) + row
                         : (static_cast<int64_t>(bidb) * params.h + bidh) * params.seqlen_q + row;
  static_cast<float*>(params.softmax_lse_ptr)[at] =
      log_sum_exp(row_max, params.scale_softmax, row_sum, INFINITY);
}

}  // namespace fad
