// Backward of packed sequences.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "allocate.h"
#include "bwd.h"
#include "checks.h"
#include "device.h"
#include "kernels/zero_tail.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void zero_tail(const Tensor& gradient, const Tensor& cu_seqlens) {
  zero_tail(gradient.data_ptr(), static_cast<const int*>(cu_seqlens.data_ptr()),
            static_cast<int>(cu_seqlens.size(0) - 1), gradient.size(0),
            gradient.stride(0) * (gradient.scalar_type() == ScalarType::Float ? 4 : 2),
            current_stream(gradient.get_device_index()));
}

void varlen_bwd_into(const Gradients& gradients, const Tensor& dout, const Tensor& q,
                     const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& softmax_lse,
                     const Packed& packed, const Scores& scores, bool deterministic,
                     const OptionalTensor& residual, const OptionalTensor& dlse,
                     const KeySums* sums) {
  check_attention_input(q, "q", q, 3);
  check_attention_input(k, "k", q, 3);
  check_attention_input(v, "v", q, 3);
  check_heads(q, k, v);
  check_shape(k, "k", {k.size(0), k.size(1), q.size(2)});
  check_shape(v, "v", {k.size(0), k.size(1), sums == nullptr ? v.size(2) : q.size(2)});
  check_packed(q, packed);
  check_gradient_inputs(dout, q, v, out, softmax_lse);
  check_shape(softmax_lse, "softmax_lse", {q.size(1), q.size(0)});
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());

  const Tensor dout_rows = aligned(dout);
  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  const Tensor out_rows = aligned(out);
  const auto& [dq, dk, dv] = gradients;
  BwdParams params{};
  set_packed(params, q_rows, k_rows, v_rows, out_rows, softmax_lse, packed);
  set_head_dims(params, q.size(2), v.size(2));
  set_gradients(params, dout_rows, dq, dk, dv);
  set_scores(params, scores, q);
  if (sums != nullptr) {
    params.dk_sums = static_cast<float*>(sums->dk.data_ptr());
    params.dv_sums = static_cast<float*>(sums->dv.data_ptr());
  }
  set_residual(params, residual, out);
  set_dlse(params, dlse, softmax_lse);
  run_bwd(params, {q_rows, k_rows, v_rows, out_rows, dout_rows, gradients, residual}, k.size(0),
          deterministic);
}

Gradients varlen_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& out, const Tensor& softmax_lse, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& rng_state, std::int64_t max_seqlen_q,
                     std::int64_t max_seqlen_k, double dropout_p, double softmax_scale,
                     std::int64_t window_left, std::int64_t window_right, double softcap,
                     bool deterministic, const OptionalTensor& residual,
                     const OptionalTensor& dlse) {
  const Gradients gradients = new_gradients(q, k, v);
  varlen_bwd_into(
      gradients, dout, q, k, v, out, softmax_lse,
      {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
      {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state},
      deterministic, residual, dlse);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const auto& [dq, dk, dv] = gradients;
  zero_tail(dq, cu_seqlens_q);
  zero_tail(dk, cu_seqlens_k);
  zero_tail(dv, cu_seqlens_k);
  return gradients;
}

Gradients varlen_bwd_sums(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& out, const Tensor& softmax_lse, const Tensor& cu_seqlens_q,
                          const Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes,
                          const OptionalTensor& rng_state, std::int64_t max_seqlen_q,
                          std::int64_t max_seqlen_k, double dropout_p, double softmax_scale,
                          std::int64_t window_left, std::int64_t window_right, double softcap,
                          bool deterministic, const OptionalTensor& residual,
                          const OptionalTensor& dlse) {
  const Tensor dq = allocate(q, q.sizes());
  const KeySums sums{allocate(k, k.sizes(), ScalarType::Float),
                     allocate(v, v.sizes(), ScalarType::Float)};
  varlen_bwd_into(
      {dq, k, v}, dout, q, k, v, out, softmax_lse,  // nothing is written into k and v
      {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
      {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state},
      deterministic, residual, dlse, &sums);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  zero_tail(dq, cu_seqlens_q);
  zero_tail(sums.dk, cu_seqlens_k);
  zero_tail(sums.dv, cu_seqlens_k);
  return {dq, sums.dk, sums.dv};
}

}  // namespace fad
