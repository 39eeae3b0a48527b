#include "fwd.h"

#include <torch/csrc/stable/accelerator.h>

#include "allocate.h"
#include "checks.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Outputs fwd(const Extra& extra, const Tensor& q, const Tensor& k, const Tensor& v,
            const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state, double dropout_p,
            double softmax_scale, std::int64_t window_left, std::int64_t window_right,
            double softcap, std::int64_t split_size, bool deterministic, bool /*deterministic_bwd*/,
            const OptionalTensor& learnable_sink) {
  check_dense(q, k, v);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor out = allocate(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  Tensor softmax_lse = allocate(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);

  // Named, so that copies live until the launches are queued.
  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  FwdParams params{};
  set_dense(params, q_rows, k_rows, v_rows, out, softmax_lse);
  set_head_dims(params, q.size(3), v.size(3));
  params.kv_batch = params.b;
  set_residual(params, extra.residual, out);
  set_row_max(params, extra.row_max, softmax_lse);
  params.sinks = sinks_of(learnable_sink, params.h, q);
  set_scores(
      params,
      {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state}, q);
  run_fwd(params, {q_rows, k_rows, v_rows, out, extra.residual},
          plan_call(params, q, split_size, deterministic));
  return {out, softmax_lse};
}

}  // namespace fad
