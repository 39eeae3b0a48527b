#include "bwd.h"

#include <torch/csrc/stable/accelerator.h>

#include "allocate.h"
#include "checks.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Gradients new_gradients(const Tensor& q, const Tensor& k, const Tensor& v) {
  return {allocate(q, q.sizes()), allocate(k, k.sizes()), allocate(v, v.sizes())};
}

void bwd_into(const Gradients& gradients, const Tensor& dout, const Tensor& q, const Tensor& k,
              const Tensor& v, const Tensor& out, const Tensor& softmax_lse, const Scores& scores,
              bool deterministic, const OptionalTensor& residual, const OptionalTensor& dlse) {
  check_dense(q, k, v);
  check_gradient_inputs(dout, q, v, out, softmax_lse);
  check_shape(softmax_lse, "softmax_lse", {q.size(0), q.size(2), q.size(1)});
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());

  // Named, so that copies live until the launches are queued.
  const Tensor dout_rows = aligned(dout);
  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  const Tensor out_rows = aligned(out);
  const auto& [dq, dk, dv] = gradients;
  BwdParams params{};
  set_dense(params, q_rows, k_rows, v_rows, out_rows, softmax_lse);
  set_head_dims(params, q.size(3), v.size(3));
  set_gradients(params, dout_rows, dq, dk, dv);
  set_scores(params, scores, q);
  set_residual(params, residual, out);
  set_dlse(params, dlse, softmax_lse);
  run_bwd(params, {q_rows, k_rows, v_rows, out_rows, dout_rows, gradients, residual},
          /*total_k=*/0, deterministic);
}

Gradients bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& softmax_lse, const OptionalTensor& alibi_slopes,
              const OptionalTensor& rng_state, double dropout_p, double softmax_scale,
              std::int64_t window_left, std::int64_t window_right, double softcap,
              bool deterministic, const OptionalTensor& residual, const OptionalTensor& dlse) {
  const Gradients gradients = new_gradients(q, k, v);
  bwd_into(gradients, dout, q, k, v, out, softmax_lse,
           {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state},
           deterministic, residual, dlse);
  return gradients;
}

}  // namespace fad
