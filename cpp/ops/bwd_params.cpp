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

void check_gradient_inputs(const Tensor& dout, const Tensor& q, const Tensor& out,
                           const Tensor& softmax_lse) {
  check_attention_input(dout, "dout", q, q.dim());
  check_attention_input(out, "out", q, q.dim());
  check(dout.sizes().equals(q.sizes()), "dout: expected the shape of q, ", Shape{q}, ", got ",
        Shape{dout});
  check(out.sizes().equals(q.sizes()), "out: expected the shape of q, ", Shape{q}, ", got ",
        Shape{out});
  check(softmax_lse.is_cuda() && softmax_lse.get_device_index() == q.get_device_index() &&
            softmax_lse.scalar_type() == ScalarType::Float && softmax_lse.is_contiguous(),
        "softmax_lse: expected a contiguous float32 tensor on the device of q, got ",
        Described{softmax_lse});
}

void set_residual(BwdParams& params, const OptionalTensor& residual, const Tensor& q) {
  if (!residual.has_value()) {
    return;
  }
  check(residual->is_cuda() && residual->get_device_index() == q.get_device_index() &&
            residual->scalar_type() == ScalarType::BFloat16 &&
            residual->sizes().equals(q.sizes()) && residual->is_contiguous() &&
            reinterpret_cast<std::uintptr_t>(residual->data_ptr()) % 16 == 0,
        "residual: expected what the forward returned, a contiguous bfloat16 tensor on the device "
        "of q and of its shape, ",
        Shape{q}, ", that starts at a multiple of 16 bytes, got ", Described{*residual});
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
  const bool packed = dout.dim() == 3;
  const std::int64_t row = packed ? 0 : 1;
  params.do_ptr = dout.data_ptr();
  params.do_batch_stride = packed ? 0 : dout.stride(0);
  params.do_row_stride = dout.stride(row);
  params.do_head_stride = dout.stride(row + 1);
  params.dq_ptr = dq.data_ptr();
  params.dq_batch_stride = packed ? 0 : dq.stride(0);
  params.dq_row_stride = dq.stride(row);
  params.dq_head_stride = dq.stride(row + 1);
  params.dk_ptr = dk.data_ptr();
  params.dk_batch_stride = packed ? 0 : dk.stride(0);
  params.dk_row_stride = dk.stride(row);
  params.dk_head_stride = dk.stride(row + 1);
  params.dv_ptr = dv.data_ptr();
  params.dv_batch_stride = packed ? 0 : dv.stride(0);
  params.dv_row_stride = dv.stride(row);
  params.dv_head_stride = dv.stride(row + 1);
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

void run_bwd(BwdParams& params, const Tensor& like, std::int64_t total_k, bool deterministic) {
  params.total_k = static_cast<int>(total_k);
  const BwdPlan plan = plan_call(params, like, deterministic);
  const cudaStream_t stream = current_stream(like.get_device_index());
  params.rng_state = const_cast<std::uint64_t*>(params.philox_args.seed_and_offset);

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
  const std::int64_t num_counters = 1 + positions + plan.slot_counters;
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
    params.freed_slots = params.progress + positions;
  }
  if (shared) {
    params.dk_sums = first + dk_sums;
    params.dv_sums = first + dv_sums;
  }
  C10_CUDA_CHECK(cudaMemsetAsync(params.tickets, 0, num_counters * sizeof(int), stream));

  run_plan(plan, params, stream);
}

}  // namespace fad
