// Backward of packed sequences.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "bwd.h"
#include "checks.h"
#include "device.h"
#include "kernels/zero_tail.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

Gradients packed_gradients(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& out, const Tensor& softmax_lse, const KeptSums* sums,
                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                           const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                           std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double dropout_p,
                           double softmax_scale, std::int64_t window_left,
                           std::int64_t window_right, double softcap, bool deterministic) {
  const Packed packed{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  check_attention_input(q, "q", q, 3);
  check_attention_input(k, "k", q, 3);
  check_attention_input(v, "v", q, 3);
  check_heads(q, k);
  check_shape(k, "k", {k.size(0), k.size(1), q.size(2)});
  check_shape(v, "v", {k.size(0), k.size(1), q.size(2)});
  check_packed(q, packed);
  check_gradient_inputs(dout, q, out, softmax_lse);
  check_shape(softmax_lse, "softmax_lse", {q.size(1), q.size(0)});
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor dq = torch::stable::new_empty(q, q.sizes());
  Tensor dk = torch::stable::new_empty(k, k.sizes());
  Tensor dv = torch::stable::new_empty(v, v.sizes());

  const Tensor dout_rows = aligned(dout);
  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  const Tensor out_rows = aligned(out);
  BwdParams params{};
  set_packed(params, q_rows, k_rows, v_rows, out_rows, softmax_lse, packed);
  set_gradients(params, dout_rows, dq, dk, dv);
  set_scores(
      params,
      {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state}, q);
  const cudaStream_t stream = current_stream(q.get_device_index());
  const auto zero = [&](const Tensor& gradient, const int* cu_seqlens) {
    zero_tail(gradient.data_ptr(), cu_seqlens, params.b, gradient.size(0), gradient.stride(0) * 2,
              stream);
  };
  zero(dq, params.cu_seqlens_q);
  zero(dk, params.cu_seqlens_k);
  zero(dv, params.cu_seqlens_k);
  set_sums(params, sums, q, k);
  run_bwd(params, q, k.size(0), deterministic);
  return {dq, dk, dv};
}

}  // namespace

Gradients varlen_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& out, const Tensor& softmax_lse, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& rng_state, std::int64_t max_seqlen_q,
                     std::int64_t max_seqlen_k, double dropout_p, double softmax_scale,
                     std::int64_t window_left, std::int64_t window_right, double softcap,
                     bool deterministic) {
  return packed_gradients(dout, q, k, v, out, softmax_lse, nullptr, cu_seqlens_q, cu_seqlens_k,
                          alibi_slopes, rng_state, max_seqlen_q, max_seqlen_k, dropout_p,
                          softmax_scale, window_left, window_right, softcap, deterministic);
}

Tensor varlen_bwd_accumulate(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& softmax_lse, Tensor dk_sums,
                             Tensor dv_sums, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                             const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                             std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double dropout_p,
                             double softmax_scale, std::int64_t window_left,
                             std::int64_t window_right, double softcap, bool deterministic) {
  const KeptSums sums{dk_sums, dv_sums};
  return std::get<0>(packed_gradients(dout, q, k, v, out, softmax_lse, &sums, cu_seqlens_q,
                                      cu_seqlens_k, alibi_slopes, rng_state, max_seqlen_q,
                                      max_seqlen_k, dropout_p, softmax_scale, window_left,
                                      window_right, softcap, deterministic));
}

}  // namespace fad
