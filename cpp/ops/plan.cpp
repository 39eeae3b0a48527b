// The plan of a call, for `explain`.
#include <torch/csrc/stable/accelerator.h>

#include "bwd.h"
#include "checks.h"
#include "fwd.h"

namespace fad {

namespace {

// Stands for device memory: a plan only depends on whether a pointer is null.
int somewhere;

// Contiguous tensors, as large as the longest sequence allows.
template <typename Params>
Params params_of(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_k,
                 std::int64_t nheads, std::int64_t nheads_k, std::int64_t head_dim,
                 std::int64_t head_dim_v, std::int64_t window_left, std::int64_t window_right,
                 bool has_alibi, bool has_softcap, bool has_dropout, bool packed) {
  check(nheads_k > 0 && nheads > 0 && nheads % nheads_k == 0,
        "nheads_k: expected a number that divides the ", nheads, " heads of q, got ", nheads_k);
  for (const auto& [number, name] :
       {std::pair{head_dim, "head_dim"}, std::pair{head_dim_v, "head_dim_v"}}) {
    check((number > 0 && number <= 256) ||
              (head_dim == kLatentHeadDim && head_dim_v == kLatentHeadDimV),
          name, ": expected a number from 1 to 256, got ", number);
  }
  Params params{};
  params.b = static_cast<int>(batch);
  params.seqlen_q = static_cast<int>(seqlen_q);
  params.seqlen_k = static_cast<int>(seqlen_k);
  params.h = static_cast<int>(nheads);
  params.h_k = static_cast<int>(nheads_k);
  params.h_h_k_ratio = params.h / params.h_k;
  set_head_dims(params, head_dim, head_dim_v);
  params.total_q = params.b * params.seqlen_q;
  params.total_k = params.b * params.seqlen_k;
  const auto set_strides = [](std::int64_t columns, std::int64_t heads, std::int64_t tokens,
                              auto& batch, auto& row, auto& head) {
    head = columns;
    row = columns * heads;
    batch = columns * heads * tokens;
  };
  set_strides(head_dim, nheads, seqlen_q, params.q_batch_stride, params.q_row_stride,
              params.q_head_stride);
  set_strides(head_dim, nheads_k, seqlen_k, params.k_batch_stride, params.k_row_stride,
              params.k_head_stride);
  set_strides(head_dim_v, nheads_k, seqlen_k, params.v_batch_stride, params.v_row_stride,
              params.v_head_stride);
  set_strides(head_dim_v, nheads, seqlen_q, params.o_batch_stride, params.o_row_stride,
              params.o_head_stride);
  params.softcap = has_softcap ? 1.f : 0.f;  // whether there is some is all that counts
  const OptionalTensor none;
  set_masking(params, Scores{1.0, window_left, window_right, 0.0, none, 0.0, none});
  params.p_dropout = has_dropout ? 0.5f : 1.f;
  params.alibi_slopes_ptr = has_alibi ? &somewhere : nullptr;
  params.cu_seqlens_q = params.cu_seqlens_k = packed ? &somewhere : nullptr;
  params.is_seqlens_k_cumulative = true;
  return params;
}

}  // namespace

PlanOutputs plan(const torch::stable::Tensor& like, std::int64_t batch, std::int64_t seqlen_q,
                 std::int64_t seqlen_k, std::int64_t nheads, std::int64_t nheads_k,
                 std::int64_t head_dim, std::int64_t head_dim_v, std::int64_t window_left,
                 std::int64_t window_right, bool has_alibi, bool has_softcap, bool has_dropout,
                 bool packed, std::int64_t page_size, bool cache_index, bool kv_fp8,
                 bool keep_residual, std::int64_t split_size, bool deterministic) {
  auto params =
      params_of<FwdParams>(batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim, head_dim_v,
                           window_left, window_right, has_alibi, has_softcap, has_dropout, packed);
  params.kv_batch = params.b;
  if (page_size > 0) {
    params.block_table = &somewhere;
    params.page_block_size = static_cast<int>(page_size);
    params.k_batch_stride = params.k_row_stride * page_size;
    params.v_batch_stride = params.v_row_stride * page_size;
  }
  params.cache_batch_idx = cache_index ? &somewhere : nullptr;
  params.kv_fp8 = kv_fp8;
  params.residual = keep_residual ? &somewhere : nullptr;
  const FwdPlan plan = plan_call(params, like, split_size, deterministic);
  return {static_cast<std::int64_t>(plan.kernel->family),
          static_cast<std::int64_t>(plan.kernel->path),
          plan.kernel->block_m,
          plan.num_splits,
          plan.num_splits > 1
              ? static_cast<std::int64_t>(plan.tree.blocks_per_split) * plan.tree.keys_per_block
              : 0,
          plan.launches(),
          static_cast<std::int64_t>(plan.scratch_bytes),
          plan.head_dim_v};
}

BwdPlanOutputs bwd_plan(const torch::stable::Tensor& like, std::int64_t batch,
                        std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t nheads,
                        std::int64_t nheads_k, std::int64_t head_dim, std::int64_t head_dim_v,
                        std::int64_t window_left, std::int64_t window_right, bool has_alibi,
                        bool has_softcap, bool has_dropout, bool packed, bool deterministic) {
  auto params =
      params_of<BwdParams>(batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim, head_dim_v,
                           window_left, window_right, has_alibi, has_softcap, has_dropout, packed);
  params.do_batch_stride = params.o_batch_stride;
  params.do_row_stride = params.o_row_stride;
  params.do_head_stride = params.o_head_stride;
  try {
    const BwdPlan plan = plan_call(params, like, deterministic);
    return {static_cast<std::int64_t>(plan.kernel->family),
            plan.kernel->block_m,
            plan.kernel->block_n,
            plan.parts.count,
            plan.in_turns,
            plan.shares_in_flight,
            plan.head_dim_v};
  } catch (const TooLittleSharedMemory&) {
    return {-1, 0, 0, 0, false, 0, 0};
  }
}

}  // namespace fad
