// The backward ops: gradients of q, k and v, shaped like them, contiguous. A row that saw no key
// has gradient 0.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

#include "kernels/bwd.h"
#include "params.h"

namespace fad {

using Gradients = std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>;

// dout, q, out: (batch, seqlen_q, nheads, head_dim); k, v: (batch, seqlen_k, nheads_k, head_dim)
// softmax_lse: (batch, nheads, seqlen_q), fp32; the rest as the forward had it.
// deterministic: dq in one order; false: in the order in which CTAs come.
Gradients bwd(const torch::stable::Tensor& dout, const torch::stable::Tensor& q,
              const torch::stable::Tensor& k, const torch::stable::Tensor& v,
              const torch::stable::Tensor& out, const torch::stable::Tensor& softmax_lse,
              const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state, double dropout_p,
              double softmax_scale, std::int64_t window_left, std::int64_t window_right,
              double softcap, bool deterministic);

// dout, q, out: (total_q, nheads, head_dim); k, v: (total_k, nheads_k, head_dim)
// softmax_lse: (nheads, total_q), fp32; cu_seqlens_q, cu_seqlens_k: (batch + 1), int32
Gradients varlen_bwd(const torch::stable::Tensor& dout, const torch::stable::Tensor& q,
                     const torch::stable::Tensor& k, const torch::stable::Tensor& v,
                     const torch::stable::Tensor& out, const torch::stable::Tensor& softmax_lse,
                     const torch::stable::Tensor& cu_seqlens_q,
                     const torch::stable::Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& rng_state, std::int64_t max_seqlen_q,
                     std::int64_t max_seqlen_k, double dropout_p, double softmax_scale,
                     std::int64_t window_left, std::int64_t window_right, double softcap,
                     bool deterministic);

// The same, into given gradients: strided rows that start at multiples of 16 bytes. Of packed
// sequences, rows that belong to none are left as they are.
void bwd_into(const Gradients& gradients, const torch::stable::Tensor& dout,
              const torch::stable::Tensor& q, const torch::stable::Tensor& k,
              const torch::stable::Tensor& v, const torch::stable::Tensor& out,
              const torch::stable::Tensor& softmax_lse, const Scores& scores, bool deterministic);
void varlen_bwd_into(const Gradients& gradients, const torch::stable::Tensor& dout,
                     const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                     const torch::stable::Tensor& v, const torch::stable::Tensor& out,
                     const torch::stable::Tensor& softmax_lse, const Packed& packed,
                     const Scores& scores, bool deterministic);

// Zeroes the rows of a contiguous gradient that belong to no sequence.
void zero_tail(const torch::stable::Tensor& gradient, const torch::stable::Tensor& cu_seqlens);

// Where dout and the gradients lie; dims: those of a tensor, 4 dense, 3 packed.
void set_gradients(BwdParams& params, const torch::stable::Tensor& dout,
                   const torch::stable::Tensor& dq, const torch::stable::Tensor& dk,
                   const torch::stable::Tensor& dv);

void check_gradient_inputs(const torch::stable::Tensor& dout, const torch::stable::Tensor& q,
                           const torch::stable::Tensor& out,
                           const torch::stable::Tensor& softmax_lse);

// Allocates scratch and launches. total_k: tokens of k, of packed sequences.
void run_bwd(BwdParams& params, const torch::stable::Tensor& like, std::int64_t total_k,
             bool deterministic);

}  // namespace fad
