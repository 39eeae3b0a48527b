// The end of a row: where its queries lie, and where its output and log-sum-exp go.
#pragma once

#include <cutlass/numeric_types.h>

#include "params.h"
#include "softmax_steps.h"
#include "split_state.h"

namespace fad {

template <typename Element, typename Info>
__device__ __forceinline__ Element* out_row(const FwdParams& params, const Info& info, int bidb,
                                            int bidh, int row) {
  return static_cast<Element*>(params.o_ptr) +
         info.q_offset(params.o_batch_stride, params.o_row_stride, bidb) +
         row * params.o_row_stride + bidh * params.o_head_stride;
}

// What rounding takes from an element of the output (docs/adr/0020).
template <typename Element>
__device__ __forceinline__ float lost(float exact) {
  return __fsub_rn(exact, static_cast<float>(static_cast<Element>(exact)));
}

// Where that of an element is kept.
template <typename Element>
__device__ __forceinline__ cutlass::bfloat16_t* residual_of(const FwdParams& params,
                                                            const Element* out) {
  return static_cast<cutlass::bfloat16_t*>(params.residual) +
         (out - static_cast<const Element*>(params.o_ptr));
}

template <typename Element>
__device__ __forceinline__ void keep_residual(const FwdParams& params, const Element* out,
                                              float exact) {
  *residual_of(params, out) = static_cast<cutlass::bfloat16_t>(lost<Element>(exact));
}

template <typename Element>
__device__ __forceinline__ void write_out(const FwdParams& params, Element* out, float exact) {
  *out = static_cast<Element>(exact);
  if (params.residual != nullptr) {
    keep_residual(params, out, exact);
  }
}

// Merges the sink of a query head into the maximum and sum of a row. Returns the weight of the
// accumulator: 1 if there are none.
__device__ __forceinline__ float merge_sink(const FwdParams& params, int bidh, float& row_max,
                                            float& row_sum) {
  return params.sinks == nullptr ? 1.f
                                 : merge_sink(params.sinks[bidh], params.scale_softmax,
                                              params.scale_softmax_log2, row_max, row_sum);
}

// softmax_lse of a row that sees no key.
__device__ __forceinline__ float lse_without_keys(const FwdParams& params, int bidh) {
  float row_max = -INFINITY;
  float row_sum = 0.f;
  merge_sink(params, bidh, row_max, row_sum);
  return log_sum_exp(row_max, params.scale_softmax, row_sum, INFINITY);
}

// softmax_lse lies as get_lse_tile in upstream's kernel has it: (b, h, seqlen_q), or (h, total_q)
// for packed sequences.
template <typename Params, typename Info>
__device__ __forceinline__ int64_t lse_at(const Params& params, const Info& info, int bidb,
                                          int bidh, int row) {
  return params.unpadded_lse
             ? static_cast<int64_t>(bidh) * params.total_q +
                   info.q_offset(params.seqlen_q, 1, bidb) + row
             : (static_cast<int64_t>(bidb) * params.h + bidh) * params.seqlen_q + row;
}

template <typename Info>
__device__ __forceinline__ void write_lse(const FwdParams& params, const Info& info, int bidb,
                                          int bidh, int row, float row_max, float row_sum) {
  static_cast<float*>(params.softmax_lse_ptr)[lse_at(params, info, bidb, bidh, row)] =
      log_sum_exp(row_max, params.scale_softmax, row_sum, INFINITY);
}

// Before the row's sink is merged, which changes its maximum.
template <typename Info>
__device__ __forceinline__ void write_row_max(const FwdParams& params, const Info& info, int bidb,
                                              int bidh, int row, float row_max, float row_sum) {
  if (params.row_max != nullptr) {
    params.row_max[lse_at(params, info, bidb, bidh, row)] =
        largest_score(row_max, params.scale_softmax, row_sum);
  }
}

}  // namespace fad
