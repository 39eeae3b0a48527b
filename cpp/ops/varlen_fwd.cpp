// Forward of packed sequences.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "allocate.h"
#include "checks.h"
#include "device.h"
#include "fwd.h"
#include "kernels/zero_tail.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

void check_layout(const Tensor& q, const Tensor& k, const Tensor& v, const Packed& packed,
                  const OptionalTensor& block_table) {
  const bool paged = block_table.has_value();
  check_attention_input(q, "q", q, 3);
  if (paged) {
    check_cached(k, "k", v, "v", q, 4);
  } else {
    check_attention_input(k, "k", q, 3);
    check_attention_input(v, "v", q, 3);
  }
  check_heads(q, k, v);
  check_packed(q, packed);
  const std::int64_t nheads_k = k.size(k.dim() - 2);
  if (paged) {
    check_shape(k, "k", {k.size(0), k.size(1), nheads_k, q.size(2)});
    check_shape(v, "v", {k.size(0), k.size(1), nheads_k, v.size(3)});
    check(k.size(1) > 0 && k.size(1) % 16 == 0,
          "k: expected pages of a multiple of 16 tokens, got ", k.size(1));
    check_pages(*block_table, q, packed.cu_seqlens_q.size(0) - 1);
  } else {
    check_shape(k, "k", {k.size(0), nheads_k, q.size(2)});
    check_shape(v, "v", {k.size(0), nheads_k, v.size(2)});
  }
}

// Lengths of sequences: int32, (batch), or none.
int* lengths(const OptionalTensor& tensor, const char* name, const Tensor& q, int batch) {
  if (!tensor.has_value()) {
    return nullptr;
  }
  check_int32(*tensor, name, q, {batch});
  return static_cast<int*>(tensor->data_ptr());
}

}  // namespace

Outputs varlen_fwd(const Extra& extra, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                   const OptionalTensor& seqused_k, const OptionalTensor& leftpad_k,
                   const OptionalTensor& block_table, const OptionalTensor& alibi_slopes,
                   const OptionalTensor& rng_state, std::int64_t max_seqlen_q,
                   std::int64_t max_seqlen_k, double dropout_p, double softmax_scale,
                   std::int64_t window_left, std::int64_t window_right, double softcap,
                   std::int64_t split_size, bool deterministic, bool /*deterministic_bwd*/,
                   const OptionalTensor& learnable_sink) {
  const Packed packed{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  check_layout(q, k, v, packed, block_table);
  check(!leftpad_k.has_value() || !block_table.has_value(),
        "leftpad_k: expected None together with block_table, got a tensor");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const std::int64_t head_dim_v = v.size(v.dim() - 1);
  Tensor out = allocate(q, {q.size(0), q.size(1), head_dim_v});
  Tensor softmax_lse = allocate(q, {q.size(1), q.size(0)}, ScalarType::Float);

  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  FwdParams params{};
  set_packed(params, q_rows, k_rows, v_rows, out, softmax_lse, packed);
  set_head_dims(params, q.size(2), head_dim_v);
  params.total_k = static_cast<int>(k.size(0));
  set_residual(params, extra.residual, out);
  set_row_max(params, extra.row_max, softmax_lse);
  params.sinks = sinks_of(learnable_sink, params.h, q);
  params.seqused_k = lengths(seqused_k, "seqused_k", q, params.b);
  params.leftpad_k = lengths(leftpad_k, "leftpad_k", q, params.b);
  if (block_table.has_value()) {
    params.block_table = static_cast<int*>(block_table->data_ptr());
    params.block_table_batch_stride = block_table->stride(0);
    params.page_block_size = static_cast<int>(k.size(1));
    params.kv_batch = static_cast<int>(k.size(0));
    params.kv_fp8 = is_e4m3(k);
    check(!params.kv_fp8 || dropout_p == 0,
          "dropout_p: expected 0 with keys of float8_e4m3fn, got ", dropout_p);
    // No key beyond the pages, whatever the lengths say.
    params.seqlen_k =
        static_cast<int>(std::min<std::int64_t>(params.seqlen_k, block_table->size(1) * k.size(1)));
  }
  set_scores(
      params,
      {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state}, q);
  run_fwd(params, {q_rows, k_rows, v_rows, out, extra.residual},
          plan_call(params, q, split_size, deterministic));
  // After the kernels: what they may have written there is of no sequence either.
  empty_tail(out.data_ptr(), static_cast<float*>(softmax_lse.data_ptr()),
             static_cast<const int*>(cu_seqlens_q.data_ptr()), params.b, q.size(0),
             out.stride(0) * 2, q.size(1), current_stream(q.get_device_index()));
  return {out, softmax_lse};
}

}  // namespace fad
