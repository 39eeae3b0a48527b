#include <c10/cuda/CUDAException.h>

#include "allocate.h"
#include "bwd.h"
#include "checks.h"
#include "device.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Blocks of all sequences, as turns.h counts them. total: tokens of packed sequences.
std::int64_t all_blocks(const int* cu_seqlens, std::int64_t total, int batch, int seqlen,
                        int block) {
  return cu_seqlens == nullptr ? batch * ceil_div(seqlen, block) : total / block + batch;
}

}  // namespace

void check_gradient_inputs(const Tensor& dout, const Tensor& q, const Tensor& v, const Tensor& out,
                           const Tensor& softmax_lse) {
  check_attention_input(dout, "dout", q, q.dim());
  check_attention_input(out, "out", q, q.dim());
  const std::int64_t last = q.dim() - 1;
  bool same = out.size(last) == v.size(last);
  for (std::int64_t dim = 0; dim < last; ++dim) {
    same = same && out.size(dim) == q.size(dim);
  }
  check(same, "out: expected the shape of q, ", Shape{q}, ", with the head_dim of v, ",
        v.size(last), ", got ", Shape{out});
  check(dout.sizes().equals(out.sizes()), "dout: expected the shape of out, ", Shape{out}, ", got ",
        Shape{dout});
  check(softmax_lse.is_cuda() && softmax_lse.get_device_index() == q.get_device_index() &&
            softmax_lse.scalar_type() == ScalarType::Float && softmax_lse.is_contiguous(),
        "softmax_lse: expected a contiguous float32 tensor on the device of q, got ",
        Described{softmax_lse});
}

void set_residual(BwdParams& params, const OptionalTensor& residual, const Tensor& out) {
  if (!residual.has_value()) {
    return;
  }
  check(residual->is_cuda() && residual->get_device_index() == out.get_device_index() &&
            residual->scalar_type() == ScalarType::BFloat16 &&
            residual->sizes().equals(out.sizes()) && residual->is_contiguous() &&
            reinterpret_cast<std::uintptr_t>(residual->data_ptr()) % 16 == 0,
        "residual: expected what the forward returned, a contiguous bfloat16 tensor on the device "
        "of out and of its shape, ",
        Shape{out}, ", that starts at a multiple of 16 bytes, got ", Described{*residual});
  params.residual = residual->data_ptr();
}

void set_dlse(BwdParams& params, const OptionalTensor& dlse, const Tensor& softmax_lse) {
  if (!dlse.has_value()) {
    return;
  }
  check(
      dlse->is_cuda() && dlse->get_device_index() == softmax_lse.get_device_index() &&
          dlse->scalar_type() == ScalarType::Float && dlse->is_contiguous() &&
          dlse->sizes().equals(softmax_lse.sizes()),
      "dlse: expected a contiguous float32 tensor on the device of softmax_lse and of its shape, ",
      Shape{softmax_lse}, ", got ", Described{*dlse});
  params.dlse = static_cast<const float*>(dlse->data_ptr());
}

void set_gradients(BwdParams& params, const Tensor& dout, const Tensor& dq, const Tensor& dk,
                   const Tensor& dv) {
  set_rows(dout, params.do_ptr, params.do_batch_stride, params.do_row_stride,
           params.do_head_stride);
  set_rows(dq, params.dq_ptr, params.dq_batch_stride, params.dq_row_stride, params.dq_head_stride);
  set_rows(dk, params.dk_ptr, params.dk_batch_stride, params.dk_row_stride, params.dk_head_stride);
  set_rows(dv, params.dv_ptr, params.dv_batch_stride, params.dv_row_stride, params.dv_head_stride);
}

BwdPlan plan_call(const BwdParams& params, const Tensor& like, bool deterministic) {
  const char* dtype = dtype_name(like);
  const BwdInstance* instance = find_bwd(dtype, params.d);
  check(instance != nullptr, "q: this build of flash_attn_deterministic holds no backward for ",
        dtype, " and head_dim ", params.d);
#ifndef FLASH_ATTENTION_DETERMINISTIC
  check(!deterministic,
        "deterministic: this build of flash_attn_deterministic has no deterministic mode");
#endif
  return plan_bwd(params, *instance, deterministic, planning_device(like.get_device_index()));
}

void run_bwd(BwdParams& params, const BwdRows& rows_of, std::int64_t total_k, bool deterministic) {
  params.total_k = static_cast<int>(total_k);
  const Tensor& like = rows_of.q;
  const BwdPlan plan = plan_call(params, like, deterministic);
  const Tensor q = padded(rows_of.q, params.d);
  const Tensor k = padded(rows_of.k, params.d);
  const Tensor v = padded(rows_of.v, plan.head_dim_v);
  const Tensor out = padded(rows_of.out, plan.head_dim_v);
  const Tensor dout = padded(rows_of.dout, plan.head_dim_v);
  const auto& [own_dq, own_dk, own_dv] = rows_of.gradients;
  const Tensor dq = with_head_dim(own_dq, params.d);
  const Tensor dk = with_head_dim(own_dk, params.d);
  const Tensor dv = with_head_dim(own_dv, plan.head_dim_v);
  OptionalTensor residual = rows_of.residual;
  set_tensors(params, q, k, v, out);
  set_gradients(params, dout, dq, dk, dv);
  if (residual.has_value()) {
    residual = padded(*residual, plan.head_dim_v);
    params.residual = residual->data_ptr();
  }
  params.d_v = plan.head_dim_v;
  const cudaStream_t stream = current_stream(like.get_device_index());

  // Upstream's layout of rowsum(dout * out), head by head, and dq's sums have the same rows: packed
  // sequences stand 128 rows apart, so that the last tile of one stays clear of the next.
  const bool packed = params.cu_seqlens_q != nullptr;
  params.seqlen_q_rounded = static_cast<int>(ceil_div(params.seqlen_q, 128) * 128);
  const std::int64_t rows = packed ? params.total_q + 128ll * params.b
                                   : static_cast<std::int64_t>(params.b) * params.seqlen_q_rounded;
  const int block_n = plan.kernel->block_n;
  const std::int64_t key_blocks =
      all_blocks(params.cu_seqlens_k, total_k, params.b, params.seqlen_k, block_n);
  const std::int64_t positions = params.h_k * key_blocks * plan.parts.count;
  const std::int64_t turns = kTurnCounters * positions;
  const std::int64_t num_counters = 1 + turns + plan.slot_counters;
  const std::int64_t slot = 2 * block_n * params.d_rounded * plan.kept_sums;
  const bool shared = plan.parts.fold();
  const std::int64_t keys =
      packed ? total_k : static_cast<std::int64_t>(params.b) * params.seqlen_k;
  const std::int64_t part = keys * params.h_k * params.d;

  // One allocation for all: allocations are most of the host's time here. Each starts at a multiple
  // of 256 bytes, and is counted in words of 4.
  std::int64_t words = 0;
  const auto reserve = [&](std::int64_t count) {
    const std::int64_t start = words;
    words += ceil_div(count, 64) * 64;
    return start;
  };
  const std::int64_t row_sums = reserve(rows * params.h);
  const std::int64_t dq_sums = reserve(rows * params.h * params.d_rounded);
  const std::int64_t counters = reserve(num_counters);
  const std::int64_t slots = reserve(plan.slots * slot);
  const std::int64_t dk_sums = reserve(shared ? plan.parts.count * part : 0);
  const std::int64_t dv_sums = reserve(shared ? plan.parts.count * part : 0);
  const Tensor scratch = allocate(like, {words}, ScalarType::Float);
  float* const first = static_cast<float*>(scratch.data_ptr());
  params.dsoftmax_sum = first + row_sums;
  params.dq_accum_ptr = first + dq_sums;
  params.tickets = reinterpret_cast<unsigned*>(first + counters);
  params.progress = params.tickets + 1;
  if (plan.slots > 0) {
    params.slots = first + slots;
    params.freed_slots = params.progress + turns;
  }
  if (shared) {
    params.dk_sums = first + dk_sums;
    params.dv_sums = first + dv_sums;
  }
  C10_CUDA_CHECK(cudaMemsetAsync(params.tickets, 0, num_counters * sizeof(int), stream));

  run_plan(plan, params, stream);
  take_columns(own_dq, dq);
  take_columns(own_dk, dk);
  take_columns(own_dv, dv);
}

}  // namespace fad
