// The ops on q, k and v, or k and v, in one tensor. Their gradients come in one tensor as well, so
// that nothing is stacked. Arguments that are not named here are those of fwd.h and bwd.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

#include "fwd.h"

namespace fad {

// qkv: (batch, seqlen, 3, nheads, head_dim), q, k and v in this order, and no q; or
// (batch, seqlen_k, 2, nheads_k, head_dim), k and v, beside q: (batch, seqlen_q, nheads, head_dim).
Outputs qkvpacked_fwd(const Extra& extra, const OptionalTensor& q, const torch::stable::Tensor& qkv,
                      const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                      double dropout_p, double softmax_scale, std::int64_t window_left,
                      std::int64_t window_right, double softcap, std::int64_t split_size,
                      bool deterministic, bool deterministic_bwd);

// The same without the first dimension: (tokens, 3 or 2, heads, head_dim).
Outputs varlen_qkvpacked_fwd(const Extra& extra, const OptionalTensor& q,
                             const torch::stable::Tensor& qkv,
                             const torch::stable::Tensor& cu_seqlens_q,
                             const torch::stable::Tensor& cu_seqlens_k,
                             const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                             std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double dropout_p,
                             double softmax_scale, std::int64_t window_left,
                             std::int64_t window_right, double softcap, std::int64_t split_size,
                             bool deterministic, bool deterministic_bwd);

// dq and dqkv, contiguous and shaped like q and qkv; without q, dq has shape (0).
using PackedGradients = std::tuple<torch::stable::Tensor, torch::stable::Tensor>;

PackedGradients qkvpacked_bwd(const torch::stable::Tensor& dout, const OptionalTensor& q,
                              const torch::stable::Tensor& qkv, const torch::stable::Tensor& out,
                              const torch::stable::Tensor& softmax_lse,
                              const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                              double dropout_p, double softmax_scale, std::int64_t window_left,
                              std::int64_t window_right, double softcap, bool deterministic,
                              const OptionalTensor& residual, const OptionalTensor& dlse);

PackedGradients varlen_qkvpacked_bwd(
    const torch::stable::Tensor& dout, const OptionalTensor& q, const torch::stable::Tensor& qkv,
    const torch::stable::Tensor& out, const torch::stable::Tensor& softmax_lse,
    const torch::stable::Tensor& cu_seqlens_q, const torch::stable::Tensor& cu_seqlens_k,
    const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state, std::int64_t max_seqlen_q,
    std::int64_t max_seqlen_k, double dropout_p, double softmax_scale, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool deterministic, const OptionalTensor& residual,
    const OptionalTensor& dlse);

}  // namespace fad
