// Forward of packed sequences.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "checks.h"
#include "fwd.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

struct Layout {
  bool paged;
  std::int64_t batch, nheads_k, head_dim;
};

Layout check_layout(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                    const OptionalTensor& block_table) {
  const bool paged = block_table.has_value();
  check_attention_input(q, "q", q, 3);
  check_attention_input(k, "k", q, paged ? 4 : 3);
  check_attention_input(v, "v", q, paged ? 4 : 3);
  check_heads(q, k);
  const Layout layout{paged, cu_seqlens_q.size(0) - 1, k.size(k.dim() - 2), q.size(2)};
  check(layout.batch > 0, "cu_seqlens_q: expected shape (batch + 1), batch at least 1, got ",
        shape_string(cu_seqlens_q));
  if (paged) {
    check_shape(k, "k", {k.size(0), k.size(1), layout.nheads_k, layout.head_dim});
    check_shape(v, "v", {k.size(0), k.size(1), layout.nheads_k, layout.head_dim});
    check(k.size(1) > 0 && k.size(1) % 16 == 0,
          "k: expected pages of a multiple of 16 tokens, got ", k.size(1));
    check_int32(*block_table, "block_table", q, {layout.batch, block_table->size(1)});
  } else {
    check_shape(k, "k", {k.size(0), layout.nheads_k, layout.head_dim});
    check_shape(v, "v", {k.size(0), layout.nheads_k, layout.head_dim});
  }
  return layout;
}

int* data(const Tensor& tensor) { return static_cast<int*>(tensor.data_ptr()); }

}  // namespace

Outputs varlen_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                   const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                   const OptionalTensor& leftpad_k, const OptionalTensor& block_table,
                   const OptionalTensor& alibi_slopes, std::int64_t max_seqlen_q,
                   std::int64_t max_seqlen_k, double softmax_scale, std::int64_t window_left,
                   std::int64_t window_right, double softcap, std::int64_t split_size,
                   bool deterministic) {
  const Layout layout = check_layout(q, k, v, cu_seqlens_q, block_table);
  check_int32(cu_seqlens_q, "cu_seqlens_q", q, {layout.batch + 1});
  check_int32(cu_seqlens_k, "cu_seqlens_k", q, {layout.batch + 1});
  if (seqused_k.has_value()) {
    check_int32(*seqused_k, "seqused_k", q, {layout.batch});
  }
  if (leftpad_k.has_value()) {
    check(!layout.paged, "leftpad_k: not supported together with block_table");
    check_int32(*leftpad_k, "leftpad_k", q, {layout.batch});
  }
  check(max_seqlen_q >= 0 && max_seqlen_k >= 0 && max_seqlen_q < (1 << 30) &&
            max_seqlen_k < (1 << 30),
        "max_seqlen_q, max_seqlen_k: expected lengths below 2^30, got ", max_seqlen_q, " and ",
        max_seqlen_k);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor out = torch::stable::new_empty(q, q.sizes());
  Tensor softmax_lse = torch::stable::new_empty(q, {q.size(1), q.size(0)}, ScalarType::Float);

  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  FwdParams params{};
  params.q_ptr = q_rows.data_ptr();
  params.q_row_stride = q_rows.stride(0);
  params.q_head_stride = q_rows.stride(1);
  params.o_ptr = out.data_ptr();
  params.o_row_stride = out.stride(0);
  params.o_head_stride = out.stride(1);
  params.softmax_lse_ptr = softmax_lse.data_ptr();
  params.unpadded_lse = true;
  params.total_q = static_cast<int>(q.size(0));
  const std::int64_t row = layout.paged ? 1 : 0;  // the dimension of tokens
  params.k_ptr = k_rows.data_ptr();
  params.k_row_stride = k_rows.stride(row);
  params.k_head_stride = k_rows.stride(row + 1);
  params.v_ptr = v_rows.data_ptr();
  params.v_row_stride = v_rows.stride(row);
  params.v_head_stride = v_rows.stride(row + 1);
  if (layout.paged) {
    params.k_batch_stride = k_rows.stride(0);
    params.v_batch_stride = v_rows.stride(0);
    params.block_table = data(*block_table);
    params.block_table_batch_stride = block_table->stride(0);
    params.page_block_size = static_cast<int>(k.size(1));
  }
  params.cu_seqlens_q = data(cu_seqlens_q);
  params.cu_seqlens_k = data(cu_seqlens_k);
  params.is_seqlens_k_cumulative = true;
  params.seqused_k = seqused_k.has_value() ? data(*seqused_k) : nullptr;
  params.leftpad_k = leftpad_k.has_value() ? data(*leftpad_k) : nullptr;
  params.b = static_cast<int>(layout.batch);
  params.seqlen_q = static_cast<int>(max_seqlen_q);
  params.seqlen_k = static_cast<int>(max_seqlen_k);
  params.h = static_cast<int>(q.size(1));
  params.h_k = static_cast<int>(layout.nheads_k);
  params.h_h_k_ratio = params.h / params.h_k;
  params.d = static_cast<int>(layout.head_dim);
  params.d_rounded = kernel_head_dim(params.d);
  const Scores scores{softmax_scale, window_left, window_right, softcap, alibi_slopes};
  set_softmax(params, scores);
  set_masking(params, scores);
  set_alibi(params, scores);
  if (params.total_q == params.b) {
    turn_groups_into_rows(params);
  }
  if (params.seqlen_q > 0 && params.total_q > 0) {
    run_fwd(params, q, split_size, deterministic);
  }
  return {out, softmax_lse};
}

}  // namespace fad
