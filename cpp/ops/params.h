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
// needs rng_state: (2), int64, seed and offset.
struct Scores {
  double softmax_scale;
  std::int64_t window_left, window_right;
  double softcap;
  const OptionalTensor& alibi_slopes;
  double dropout_p;
  const OptionalTensor& rng_state;
};

// Where (batch, seqlen, heads, head_dim) tensors lie, and their sizes.
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

// Makes room for what rounding takes from out, unless residual is nullptr.
void set_residual(FwdParams& params, OptionalTensor* residual, const torch::stable::Tensor& q);

// Checks sinks of query heads.
const float* sinks_of(const OptionalTensor& learnable_sink, std::int64_t nheads,
                      const torch::stable::Tensor& q);

// How a call will be carried out. Checks what is left to check; launches nothing.
FwdPlan plan_call(const FwdParams& params, const torch::stable::Tensor& q, std::int64_t split_size,
                  bool deterministic);

// Carries it out, if there is anything to compute; scratch comes from torch's allocator, on the
// device of q.
void run_fwd(const FwdParams& params, const torch::stable::Tensor& q, const FwdPlan& plan);

}  // namespace fad
