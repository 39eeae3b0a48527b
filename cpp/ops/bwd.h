// The backward ops: gradients of q, k and v, shaped like them, contiguous. A row that saw no key
// has gradient 0.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

#include "kernels/plan.h"
#include "params.h"

namespace fad {

using Gradients = std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>;

// dout, q, out: (batch, seqlen_q, nheads, head_dim); k, v: (batch, seqlen_k, nheads_k, head_dim);
// the head_dim of v, out and dout may be another one than that of q and k
// softmax_lse: (batch, nheads, seqlen_q), fp32; the rest as the forward had it.
// deterministic: dq in one order; false: in the order in which CTAs come.
// residual: like out, bfloat16, contiguous; what rounding took from out, or none.
// dlse: the gradient of softmax_lse, like it, contiguous, or none.
Gradients bwd(const torch::stable::Tensor& dout, const torch::stable::Tensor& q,
              const torch::stable::Tensor& k, const torch::stable::Tensor& v,
              const torch::stable::Tensor& out, const torch::stable::Tensor& softmax_lse,
              const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state, double dropout_p,
              double softmax_scale, std::int64_t window_left, std::int64_t window_right,
              double softcap, bool deterministic, const OptionalTensor& residual,
              const OptionalTensor& dlse);

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
                     bool deterministic, const OptionalTensor& residual,
                     const OptionalTensor& dlse);

// Sums of dk and dv, (total_k, nheads_k, head_dim), fp32, not scaled.
struct KeySums {
  torch::stable::Tensor dk, dv;
};

// Memory for the gradients, contiguous.
Gradients new_gradients(const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                        const torch::stable::Tensor& v);

// The same, into given gradients: strided rows that start at multiples of 16 bytes. Of packed
// sequences, rows that belong to none are left as they are. sums: where those of dk and dv go
// instead: nothing is then written into dk and dv.
void bwd_into(const Gradients& gradients, const torch::stable::Tensor& dout,
              const torch::stable::Tensor& q, const torch::stable::Tensor& k,
              const torch::stable::Tensor& v, const torch::stable::Tensor& out,
              const torch::stable::Tensor& softmax_lse, const Scores& scores, bool deterministic,
              const OptionalTensor& residual, const OptionalTensor& dlse);
void varlen_bwd_into(const Gradients& gradients, const torch::stable::Tensor& dout,
                     const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                     const torch::stable::Tensor& v, const torch::stable::Tensor& out,
                     const torch::stable::Tensor& softmax_lse, const Packed& packed,
                     const Scores& scores, bool deterministic, const OptionalTensor& residual,
                     const OptionalTensor& dlse, const KeySums* sums = nullptr);

// Zeroes the rows of a contiguous gradient that belong to no sequence.
void zero_tail(const torch::stable::Tensor& gradient, const torch::stable::Tensor& cu_seqlens);

// dq, and fp32 sums of dk and dv over the rows of q, (total_k, nheads_k, head_dim), not scaled.
// Where these rows are an aligned run of 2^n chunks of a longer sequence (kernels/tree/key_tree.h),
// that is what a call with all rows adds up too.
Gradients varlen_bwd_sums(const torch::stable::Tensor& dout, const torch::stable::Tensor& q,
                          const torch::stable::Tensor& k, const torch::stable::Tensor& v,
                          const torch::stable::Tensor& out,
                          const torch::stable::Tensor& softmax_lse,
                          const torch::stable::Tensor& cu_seqlens_q,
                          const torch::stable::Tensor& cu_seqlens_k,
                          const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                          std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double dropout_p,
                          double softmax_scale, std::int64_t window_left, std::int64_t window_right,
                          double softcap, bool deterministic, const OptionalTensor& residual,
                          const OptionalTensor& dlse);

// dk and dv, rounded to the dtype of k, of the sums of all rows, (keys, nheads_k, head_dim).
std::tuple<torch::stable::Tensor, torch::stable::Tensor> finish_key_sums(
    const torch::stable::Tensor& dk_sums, const torch::stable::Tensor& dv_sums,
    const torch::stable::Tensor& k, double softmax_scale, double softcap, double dropout_p);

// The gradient of learnable_sink, (nheads), fp32; the rest as the forward and bwd had it. Packed
// with cu_seqlens_q, (batch + 1), int32; max_seqlen_q is for these.
torch::stable::Tensor sink_bwd(const torch::stable::Tensor& dout, const torch::stable::Tensor& out,
                               const torch::stable::Tensor& softmax_lse,
                               const torch::stable::Tensor& learnable_sink,
                               const OptionalTensor& cu_seqlens_q, std::int64_t max_seqlen_q,
                               const OptionalTensor& residual, const OptionalTensor& dlse);

// Checks what the forward kept.
void set_residual(BwdParams& params, const OptionalTensor& residual,
                  const torch::stable::Tensor& out);

// Checks a gradient of softmax_lse.
void set_dlse(BwdParams& params, const OptionalTensor& dlse,
              const torch::stable::Tensor& softmax_lse);

// Where dout and the gradients lie; dims: those of a tensor, 4 dense, 3 packed.
void set_gradients(BwdParams& params, const torch::stable::Tensor& dout,
                   const torch::stable::Tensor& dq, const torch::stable::Tensor& dk,
                   const torch::stable::Tensor& dv);

void check_gradient_inputs(const torch::stable::Tensor& dout, const torch::stable::Tensor& q,
                           const torch::stable::Tensor& v, const torch::stable::Tensor& out,
                           const torch::stable::Tensor& softmax_lse);

// How a call will be carried out. Checks what is left to check; launches nothing.
BwdPlan plan_call(const BwdParams& params, const torch::stable::Tensor& like, bool deterministic);

// family (as in kernels/fwd.h; -1: the device has too little shared memory), rows and keys to a
// tile, parts of a key block, in_turns, heads (or parts of them) in flight, head dim of v as the
// kernel takes it.
using BwdPlanOutputs = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                                  std::int64_t, std::int64_t>;

// The plan of a backward, as `plan` gives the forward's.
BwdPlanOutputs bwd_plan(const torch::stable::Tensor& like, std::int64_t batch,
                        std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t nheads,
                        std::int64_t nheads_k, std::int64_t head_dim, std::int64_t head_dim_v,
                        std::int64_t window_left, std::int64_t window_right, bool has_alibi,
                        bool has_softcap, bool has_dropout, bool packed, bool deterministic);

// The tensors of a backward that have a head dim, as params describe them.
struct BwdRows {
  const torch::stable::Tensor &q, &k, &v, &out, &dout;
  const Gradients& gradients;
  const OptionalTensor& residual;
};

// Allocates scratch and launches; pads as run_fwd does. total_k: tokens of k, of packed sequences.
void run_bwd(BwdParams& params, const BwdRows& rows, std::int64_t total_k, bool deterministic);

}  // namespace fad
