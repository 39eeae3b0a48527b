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

void set_tensors(FwdParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& out, const Tensor& softmax_lse) {
  params.q_ptr = q.data_ptr();
  params.q_batch_stride = q.stride(0);
  params.q_row_stride = q.stride(1);
  params.q_head_stride = q.stride(2);
  params.k_ptr = k.data_ptr();
  params.k_batch_stride = k.stride(0);
  params.k_row_stride = k.stride(1);
  params.k_head_stride = k.stride(2);
  params.v_ptr = v.data_ptr();
  params.v_batch_stride = v.stride(0);
  params.v_row_stride = v.stride(1);
  params.v_head_stride = v.stride(2);
  params.o_ptr = out.data_ptr();
  params.o_batch_stride = out.stride(0);
  params.o_row_stride = out.stride(1);
  params.o_head_stride = out.stride(2);
  params.softmax_lse_ptr = softmax_lse.data_ptr();
}

void set_sizes(FwdParams& params, const Tensor& q, const Tensor& k) {
  params.b = static_cast<int>(q.size(0));
  params.seqlen_q = static_cast<int>(q.size(1));
  params.h = static_cast<int>(q.size(2));
  params.d = static_cast<int>(q.size(3));
  params.d_rounded = kernel_head_dim(params.d);
  params.seqlen_k = static_cast<int>(k.size(1));
  params.h_k = static_cast<int>(k.size(2));
  params.h_h_k_ratio = params.h / params.h_k;
  params.is_seqlens_k_cumulative = true;
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
  set_tensors(params, q_rows, k_rows, v_rows, out, softmax_lse);
  set_sizes(params, q, k);
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
