#include "fwd.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <limits>

#include "checks.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<int>::max() - 1024;

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attention_input(q, "q", q, 4);
  check_attention_input(k, "k", q, 4);
  check_attention_input(v, "v", q, 4);
  check_heads(q, k);
  check(q.size(0) > 0, "q: expected a batch of at least 1, got shape ", shape_string(q));
  check_shape(k, "k", {q.size(0), k.size(1), k.size(2), q.size(3)});
  check_shape(v, "v", {q.size(0), k.size(1), k.size(2), q.size(3)});
  check(q.size(1) <= kMaxSize && k.size(1) <= kMaxSize && q.size(0) <= kMaxSize,
        "q, k: expected sizes below 2^31, got ", shape_string(q), " and ", shape_string(k));
}

}  // namespace

Outputs fwd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& alibi_slopes,
            double softmax_scale, std::int64_t window_left, std::int64_t window_right,
            double softcap, std::int64_t split_size, bool deterministic) {
  check_inputs(q, k, v);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor out = torch::stable::new_empty(q, q.sizes());
  Tensor softmax_lse =
      torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);

  // Named, so that copies live until the launches are queued.
  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  FwdParams params{};
  set_dense(params, q_rows, k_rows, v_rows, out, softmax_lse);
  const Scores scores{softmax_scale, window_left, window_right, softcap, alibi_slopes};
  set_softmax(params, scores);
  set_masking(params, scores);
  set_alibi(params, scores);
  turn_groups_into_rows(params);
  if (params.seqlen_q > 0) {
    run_fwd(params, q, split_size, deterministic);
  }
  return {out, softmax_lse};
}

}  // namespace fad
