// The forward op.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fad {

// q: (batch, seqlen_q, nheads, head_dim), fp16 or bf16
// k, v: (batch, seqlen_k, nheads_k, head_dim), like q
// Any strides (rows that are not aligned to 16 bytes are copied), head_dim a multiple of 8 and at
// most 256, nheads a multiple of nheads_k. Returns out, shaped like q, contiguous, and softmax_lse:
// (batch, nheads, seqlen_q), fp32. A row that sees no key has out 0 and softmax_lse +inf.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> fwd(const torch::stable::Tensor& q,
                                                             const torch::stable::Tensor& k,
                                                             const torch::stable::Tensor& v,
                                                             double softmax_scale, bool causal);

}  // namespace fad
