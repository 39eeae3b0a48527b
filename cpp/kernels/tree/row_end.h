// The end of a row: where its queries lie, and where its output and log-sum-exp go.
#pragma once

#include "../params.h"
#include "softmax_steps.h"

namespace fad {

// What a batch stride of q and out counts: the sequence, or its only token where packed sequences
// have at most one each; -1 if it has none.
__device__ __forceinline__ int row_batch(const FwdParams& params, int bidb) {
  if (params.token_of == nullptr) {
    return bidb;
  }
  const int token = params.token_of[bidb];
  return params.token_of[bidb + 1] > token ? token : -1;
}

template <typename Element, typename Info>
__device__ __forceinline__ Element* out_row(const FwdParams& params, const Info& info, int batch,
                                            int bidh, int row) {
  return static_cast<Element*>(params.o_ptr) +
         info.q_offset(params.o_batch_stride, params.o_row_stride, batch) +
         row * params.o_row_stride + bidh * params.o_head_stride;
}

// softmax_lse lies as get_lse_tile in upstream's kernel has it: (b, h, seqlen_q), or (h, total_q)
// for packed sequences; (h * seqlen_q, total_q) where their query groups were turned into rows.
template <typename Info>
__device__ __forceinline__ void write_lse(const FwdParams& params, const Info& info, int batch,
                                          int bidh, int row, float row_max, float row_sum) {
  int64_t at = (static_cast<int64_t>(batch) * params.h + bidh) * params.seqlen_q + row;
  if (params.token_of != nullptr) {
    at = (static_cast<int64_t>(bidh) * params.seqlen_q + row) * params.total_q + batch;
  } else if (params.unpadded_lse) {
    at = static_cast<int64_t>(bidh) * params.total_q + info.q_offset(params.seqlen_q, 1, batch) +
         row;
  }
  static_cast<float*>(params.softmax_lse_ptr)[at] =
      log_sum_exp(row_max, params.scale_softmax, row_sum, INFINITY);
}

}  // namespace fad
