// From tensors and arguments to the kernels' parameters; shared by the forward ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "kernels/plan.h"

namespace fad {

using OptionalTensor = std::optional<torch::stable::Tensor>;

// What parameters of forward and backward have in common.
using CommonParams = FLASH_NAMESPACE::Flash_fwd_params;

// How scores become probabilities. window_left, window_right: keys visible on either side of the
// diagonal (aligned bottom right), negative for all; causal is window_right 0. dropout_p above 0
// needs rng_state, int64: (2), seed and offset, or (batch, 1), a seed of each sequence.
struct Scores {
  double softmax_scale;
  std::int64_t window_left, window_right;
  double softcap;
  const OptionalTensor& alibi_slopes;
  double dropout_p;
  const OptionalTensor& rng_state;
};

// Where the rows of a tensor lie: (batch or pages, tokens, heads, head_dim), or packed, without the
// first dimension.
template <typename Pointer, typename Stride>
void set_rows(const torch::stable::Tensor& tensor, Pointer& data, Stride& batch_stride,
              Stride& row_stride, Stride& head_stride) {
  const std::int64_t row = tensor.dim() - 3;
  data = tensor.data_ptr();
  batch_stride = row > 0 ? tensor.stride(0) : 0;
  row_stride = tensor.stride(row);
  head_stride = tensor.stride(row + 1);
}

// The same of all that a forward works on.
void set_tensors(CommonParams& params, const torch::stable::Tensor& q,
                 const torch::stable::Tensor& k, const torch::stable::Tensor& v,
                 const torch::stable::Tensor& out);

// Head dims: kernels work on that of q and k or, if v is wider, on that of v.
template <typename Params>
void set_head_dims(Params& params, std::int64_t head_dim, std::int64_t head_dim_v) {
  params.d = static_cast<int>(head_dim > head_dim_v ? head_dim : head_dim_v);
  params.d_rounded = kernel_head_dim(params.d);
  params.d_v = static_cast<int>(head_dim_v);
}

// Where (batch, seqlen, heads, head_dim) tensors lie, and their sizes but for head_dim.
void set_dense(CommonParams& params, const torch::stable::Tensor& q, const torch::stable::Tensor& k,
               const torch::stable::Tensor& v, const torch::stable::Tensor& out,
               const torch::stable::Tensor& softmax_lse);

// The same for (tokens, heads, head_dim), or pages of keys and values.
struct Packed {
  const torch::stable::Tensor& cu_seqlens_q;
  const torch::stable::Tensor& cu_seqlens_k;
  std::int64_t max_seqlen_q, max_seqlen_k;
};
void set_packed(CommonParams& params, const torch::stable::Tensor& q,
                const torch::stable::Tensor& k, const torch::stable::Tensor& v,
                const torch::stable::Tensor& out, const torch::stable::Tensor& softmax_lse,
                const Packed& packed);
void check_packed(const torch::stable::Tensor& q, const Packed& packed);

void set_softmax(CommonParams& params, const Scores& scores);
void set_masking(CommonParams& params, const Scores& scores);
void set_alibi(CommonParams& params, const Scores& scores, const torch::stable::Tensor& q);
void set_dropout(CommonParams& params, const Scores& scores, const torch::stable::Tensor& q);

// All four.
void set_scores(CommonParams& params, const Scores& scores, const torch::stable::Tensor& q);

// The tensor, or a copy of it if its rows are strided or not aligned to the 16 bytes that kernels
// load at a time.
torch::stable::Tensor aligned(const torch::stable::Tensor& tensor);

// The tensor, or a copy of it with zeros behind its last dimension.
torch::stable::Tensor padded(const torch::stable::Tensor& tensor, std::int64_t head_dim);

// An uninitialised tensor like the given one, with this head_dim; the given one, if it has it.
torch::stable::Tensor with_head_dim(const torch::stable::Tensor& tensor, std::int64_t head_dim);

// Copies the first columns of a result that is wider than the caller's, unless it is the caller's.
void take_columns(torch::stable::Tensor to, torch::stable::Tensor from);

// Makes room for what rounding takes from out, unless residual is nullptr.
void set_residual(FwdParams& params, OptionalTensor* residual, const torch::stable::Tensor& out);

// Makes room for the largest score of each row, -inf so far, unless row_max is nullptr.
void set_row_max(FwdParams& params, OptionalTensor* row_max,
                 const torch::stable::Tensor& softmax_lse);

// Checks sinks of query heads.
const float* sinks_of(const OptionalTensor& learnable_sink, std::int64_t nheads,
                      const torch::stable::Tensor& q);

// How a call will be carried out. Checks what is left to check; launches nothing.
FwdPlan plan_call(const FwdParams& params, const torch::stable::Tensor& q, std::int64_t split_size,
                  bool deterministic);

// The tensors of a forward that have a head dim, as params describe them.
struct FwdRows {
  const torch::stable::Tensor &q, &k, &v, &out;
  OptionalTensor* residual;  // nullptr: none
};

// Carries it out, if there is anything to compute. Kernels that need one head dim get padded copies
// of what is narrower: columns of v do not depend on each other, and zeros change no sum of scores.
// Scratch comes from torch's allocator, on the device of q.
void run_fwd(FwdParams params, const FwdRows& rows, const FwdPlan& plan);

}  // namespace fad
