#include "bwd.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "checks.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

Gradients dense_gradients(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& out, const Tensor& softmax_lse, const KeptSums* sums,
                          const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                          double dropout_p, double softmax_scale, std::int64_t window_left,
                          std::int64_t window_right, double softcap, bool deterministic) {
  check_dense(q, k, v);
  check_gradient_inputs(dout, q, out, softmax_lse);
  check_shape(softmax_lse, "softmax_lse", {q.size(0), q.size(2), q.size(1)});
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor dq = torch::stable::new_empty(q, q.sizes());
  Tensor dk = torch::stable::new_empty(k, k.sizes());
  Tensor dv = torch::stable::new_empty(v, v.sizes());

  // Named, so that copies live until the launches are queued.
  const Tensor dout_rows = aligned(dout);
  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  const Tensor out_rows = aligned(out);
  BwdParams params{};
  set_dense(params, q_rows, k_rows, v_rows, out_rows, softmax_lse);
  set_gradients(params, dout_rows, dq, dk, dv);
  set_scores(
      params,
      {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state}, q);
  set_sums(params, sums, q, k);
  run_bwd(params, q, /*total_k=*/0, deterministic);
  return {dq, dk, dv};
}

}  // namespace

Gradients bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& softmax_lse, const OptionalTensor& alibi_slopes,
              const OptionalTensor& rng_state, double dropout_p, double softmax_scale,
              std::int64_t window_left, std::int64_t window_right, double softcap,
              bool deterministic) {
  return dense_gradients(dout, q, k, v, out, softmax_lse, nullptr, alibi_slopes, rng_state,
                         dropout_p, softmax_scale, window_left, window_right, softcap,
                         deterministic);
}

Tensor bwd_accumulate(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& out, const Tensor& softmax_lse, Tensor dk_sums, Tensor dv_sums,
                      const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                      double dropout_p, double softmax_scale, std::int64_t window_left,
                      std::int64_t window_right, double softcap, bool deterministic) {
  const KeptSums sums{dk_sums, dv_sums};
  return std::get<0>(dense_gradients(dout, q, k, v, out, softmax_lse, &sums, alibi_slopes,
                                     rng_state, dropout_p, softmax_scale, window_left, window_right,
                                     softcap, deterministic));
}

}  // namespace fad
