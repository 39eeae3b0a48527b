#include "params.h"

#include <c10/cuda/CUDAException.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "allocate.h"
#include "checks.h"
#include "device.h"
#include "kernels/tree/masking.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr double kLog2E = 1.4426950408889634074;
constexpr std::int64_t kMaxSplitSize = 1 << 29;
// Upstream's kernels step over a block of rows, at most 128, with an int.
constexpr std::int64_t kMaxRowStride = std::numeric_limits<int>::max() / 128;

// Whether a factor is a normal number in float, also times log2(e).
bool is_factor(double number) { return number >= 0x1p-126 && number <= 0x1p127; }

int window(std::int64_t size) {
  return size < 0 ? -1 : static_cast<int>(std::min<std::int64_t>(size, kUnlimited));
}

}  // namespace

void set_tensors(CommonParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& out) {
  set_rows(q, params.q_ptr, params.q_batch_stride, params.q_row_stride, params.q_head_stride);
  set_rows(k, params.k_ptr, params.k_batch_stride, params.k_row_stride, params.k_head_stride);
  set_rows(v, params.v_ptr, params.v_batch_stride, params.v_row_stride, params.v_head_stride);
  set_rows(out, params.o_ptr, params.o_batch_stride, params.o_row_stride, params.o_head_stride);
}

void set_dense(CommonParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& out, const Tensor& softmax_lse) {
  set_tensors(params, q, k, v, out);
  params.softmax_lse_ptr = softmax_lse.data_ptr();
  params.b = static_cast<int>(q.size(0));
  params.seqlen_q = static_cast<int>(q.size(1));
  params.h = static_cast<int>(q.size(2));
  params.seqlen_k = static_cast<int>(k.size(1));
  params.h_k = static_cast<int>(k.size(2));
  params.h_h_k_ratio = params.h / params.h_k;
  params.is_seqlens_k_cumulative = true;
  params.is_bf16 = q.scalar_type() == ScalarType::BFloat16;
}

void check_packed(const Tensor& q, const Packed& packed) {
  const bool flat = packed.cu_seqlens_q.dim() == 1;
  const std::int64_t batch = flat ? packed.cu_seqlens_q.size(0) - 1 : 0;
  check(batch > 0, "cu_seqlens_q: expected shape (batch + 1), batch at least 1, got ",
        Shape{packed.cu_seqlens_q});
  check_int32(packed.cu_seqlens_q, "cu_seqlens_q", q, {batch + 1});
  check_int32(packed.cu_seqlens_k, "cu_seqlens_k", q, {batch + 1});
  check(packed.max_seqlen_q >= 0 && packed.max_seqlen_k >= 0 && packed.max_seqlen_q < (1 << 30) &&
            packed.max_seqlen_k < (1 << 30),
        "max_seqlen_q, max_seqlen_k: expected lengths below 2^30, got ", packed.max_seqlen_q,
        " and ", packed.max_seqlen_k);
}

void set_packed(CommonParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& out, const Tensor& softmax_lse, const Packed& packed) {
  set_tensors(params, q, k, v, out);
  params.softmax_lse_ptr = softmax_lse.data_ptr();
  params.unpadded_lse = true;
  params.total_q = static_cast<int>(q.size(0));
  params.cu_seqlens_q = static_cast<int*>(packed.cu_seqlens_q.data_ptr());
  params.cu_seqlens_k = static_cast<int*>(packed.cu_seqlens_k.data_ptr());
  params.is_seqlens_k_cumulative = true;
  params.b = static_cast<int>(packed.cu_seqlens_q.size(0) - 1);
  params.seqlen_q = static_cast<int>(packed.max_seqlen_q);
  params.seqlen_k = static_cast<int>(packed.max_seqlen_k);
  params.h = static_cast<int>(q.size(1));
  params.h_k = static_cast<int>(k.size(k.dim() - 2));
  params.h_h_k_ratio = params.h / params.h_k;
  params.is_bf16 = q.scalar_type() == ScalarType::BFloat16;
}

void set_softmax(CommonParams& params, const Scores& scores) {
  // Scores are scaled after masking: -inf times a scale of 0 or less would not stay masked.
  const double ratio = scores.softcap == 0 ? 1 : scores.softmax_scale / scores.softcap;
  check(is_factor(scores.softmax_scale),
        "softmax_scale: expected a number from 2^-126 to 2^127, got ", scores.softmax_scale);
  check(scores.softcap == 0 || is_factor(scores.softcap),
        "softcap: expected 0 or a number from 2^-126 to 2^127, got ", scores.softcap);
  check(is_factor(ratio),
        "softcap: expected softmax_scale / softcap from 2^-126 to 2^127, got a softcap of ",
        scores.softcap, " and a softmax_scale of ", scores.softmax_scale);
  const float scale = static_cast<float>(scores.softmax_scale);
  const float softcap = static_cast<float>(scores.softcap);
  // With softcap the kernels compute tanh(score * scale / softcap), then scale by softcap.
  params.softcap = softcap > 0.f ? scale / softcap : 0.f;
  params.scale_softmax = softcap > 0.f ? softcap : scale;
  // The product is rounded once, from double: upstream's float product, on any compiler.
  params.scale_softmax_log2 =
      static_cast<float>(static_cast<double>(params.scale_softmax) * kLog2E);
}

void set_dropout(CommonParams& params, const Scores& scores, const Tensor& q) {
  const double p = scores.dropout_p;
  check(p >= 0 && p < 1, "dropout_p: expected a number in [0, 1), got ", p);
  // p_dropout has upstream's meaning: the probability to keep.
  params.p_dropout = static_cast<float>(1.0 - p);
  params.p_dropout_in_uint8_t =
      static_cast<std::uint8_t>(std::floor(static_cast<double>(params.p_dropout) * 255.0));
  params.rp_dropout = 1.f / params.p_dropout;
  params.scale_softmax_rp_dropout = params.rp_dropout * params.scale_softmax;
  if (p == 0) {
    return;
  }
  check(scores.rng_state.has_value(),
        "rng_state: expected a tensor together with dropout, got None");
  const Tensor& state = *scores.rng_state;
  const bool to_each = state.dim() == 2;
  check(state.is_cuda() && state.get_device_index() == q.get_device_index() &&
            state.scalar_type() == ScalarType::Long && state.is_contiguous() &&
            (to_each ? state.size(0) == params.b && state.size(1) == 1
                     : state.dim() == 1 && state.size(0) == 2),
        "rng_state: expected a contiguous int64 tensor on the device of q, of shape (2) or (",
        params.b, ", 1), got ", Described{state});
  params.philox_args.seed_and_offset = static_cast<const std::uint64_t*>(state.data_ptr());
  params.philox_args.seed_to_each = to_each;
}

void set_scores(CommonParams& params, const Scores& scores, const Tensor& q) {
  set_softmax(params, scores);
  set_masking(params, scores);
  set_alibi(params, scores, q);
  set_dropout(params, scores, q);
}

void set_masking(CommonParams& params, const Scores& scores) {
  params.window_size_left = window(scores.window_left);
  params.window_size_right = window(scores.window_right);
  params.is_causal = params.window_size_left < 0 && params.window_size_right == 0;
}

void set_alibi(CommonParams& params, const Scores& scores, const Tensor& q) {
  if (!scores.alibi_slopes.has_value()) {
    return;
  }
  const Tensor& slopes = *scores.alibi_slopes;
  check(slopes.is_cuda() && slopes.get_device_index() == q.get_device_index() &&
            slopes.scalar_type() == ScalarType::Float,
        "alibi_slopes: expected a float32 tensor on the device of q, got ", Described{slopes});
  const bool per_batch = slopes.dim() == 2;
  check((per_batch && slopes.size(0) == params.b && slopes.size(1) == params.h) ||
            (slopes.dim() == 1 && slopes.size(0) == params.h),
        "alibi_slopes: expected shape (", params.h, ") or (", params.b, ", ", params.h, "), got ",
        Shape{slopes});
  check(slopes.stride(slopes.dim() - 1) == 1,
        "alibi_slopes: expected a contiguous last dimension, got ", Described{slopes});
  params.alibi_slopes_ptr = slopes.data_ptr();
  params.alibi_slopes_batch_stride = per_batch ? slopes.stride(0) : 0;
}

Tensor aligned(const Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  const std::uintptr_t bytes = is_e4m3(tensor) ? 8 : 16;
  bool good =
      tensor.stride(last) == 1 && reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % bytes == 0;
  for (std::int64_t dim = 0; dim < last; ++dim) {
    const std::int64_t most = dim == last - 2 ? kMaxRowStride : tensor.stride(dim);
    good = good &&
           ((tensor.stride(dim) % 8 == 0 && tensor.stride(dim) <= most) || tensor.size(dim) == 1);
  }
  if (good) {
    return tensor;
  }
  Tensor copy = allocate(tensor, tensor.sizes());
  return torch::stable::copy_(copy, tensor);
}

Tensor padded(const Tensor& tensor, std::int64_t head_dim) {
  const std::int64_t columns = tensor.size(tensor.dim() - 1);
  return columns == head_dim ? tensor : torch::stable::pad(tensor, {0, head_dim - columns});
}

Tensor with_head_dim(const Tensor& tensor, std::int64_t head_dim) {
  const std::int64_t last = tensor.dim() - 1;
  if (tensor.size(last) == head_dim) {
    return tensor;
  }
  std::vector<std::int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes[last] = head_dim;
  return allocate(tensor, {sizes.data(), sizes.size()});
}

void take_columns(Tensor to, Tensor from) {
  const std::int64_t last = to.dim() - 1;
  if (from.size(last) > to.size(last)) {
    torch::stable::copy_(to, torch::stable::narrow(from, last, 0, to.size(last)));
  }
}

void set_residual(FwdParams& params, OptionalTensor* residual, const Tensor& out) {
  if (residual != nullptr) {
    *residual = torch::stable::new_empty(out, out.sizes(), ScalarType::BFloat16);
    params.residual = (*residual)->data_ptr();
  }
}

void set_row_max(FwdParams& params, OptionalTensor* row_max, const Tensor& softmax_lse) {
  if (row_max != nullptr) {
    *row_max = allocate(softmax_lse, softmax_lse.sizes());
    // Kernels do not write rows without keys, and no kernel writes rows of no sequence.
    torch::stable::fill_(**row_max, -std::numeric_limits<double>::infinity());
    params.row_max = static_cast<float*>((*row_max)->data_ptr());
  }
}

const float* sinks_of(const OptionalTensor& learnable_sink, std::int64_t nheads, const Tensor& q) {
  if (!learnable_sink.has_value()) {
    return nullptr;
  }
  const Tensor& sinks = *learnable_sink;
  check(sinks.is_cuda() && sinks.get_device_index() == q.get_device_index() &&
            sinks.scalar_type() == ScalarType::Float && sinks.is_contiguous(),
        "learnable_sink: expected a contiguous float32 tensor on the device of q, got ",
        Described{sinks});
  check_shape(sinks, "learnable_sink", {nheads});
  return static_cast<const float*>(sinks.data_ptr());
}

FwdPlan plan_call(const FwdParams& params, const Tensor& q, std::int64_t split_size,
                  bool deterministic) {
  check(split_size >= 0 && split_size % kKeysPerBlock == 0 && split_size <= kMaxSplitSize,
        "split_size: expected 0 or a multiple of ", kKeysPerBlock, " up to ", kMaxSplitSize,
        ", got ", split_size);
  std::int64_t rows = 1;
  for (std::int64_t dim = 0; dim + 1 < q.dim(); ++dim) {
    rows *= q.size(dim);
  }
  check(rows <= std::numeric_limits<int>::max(),
        "q: expected less than 2^31 rows of all heads together, got shape ", Shape{q});
  const char* dtype = dtype_name(q);
  const FwdInstance* instance = find_fwd(dtype, params.d);
  check(instance != nullptr, "q: this build of flash_attn_deterministic holds no forward for ",
        dtype, " and head_dim ", params.d);
#ifndef FLASH_ATTENTION_DETERMINISTIC
  check(!deterministic,
        "deterministic: this build of flash_attn_deterministic has no deterministic mode");
#endif
  return plan_fwd(params, *instance, static_cast<int>(split_size), deterministic,
                  planning_device(q.get_device_index()));
}

void run_fwd(FwdParams params, const FwdRows& rows, const FwdPlan& plan) {
  if (params.seqlen_q == 0 || rows.q.size(0) == 0) {
    return;
  }
  const Tensor q = padded(rows.q, params.d);
  const Tensor k = padded(rows.k, params.d);
  const Tensor v = padded(rows.v, plan.head_dim_v);
  const Tensor out = with_head_dim(rows.out, plan.head_dim_v);
  const bool pads = q.size(q.dim() - 1) > rows.q.size(q.dim() - 1) || plan.head_dim_v > params.d_v;
  OptionalTensor residual;
  if (pads) {
    set_tensors(params, q, k, v, out);
    params.d_v = plan.head_dim_v;
    if (rows.residual != nullptr) {
      residual = with_head_dim(**rows.residual, plan.head_dim_v);
      params.residual = residual->data_ptr();
    }
  }
  std::optional<Tensor> scratch;  // lives until the launches are queued
  if (plan.scratch_bytes > 0) {
    scratch = allocate(q, {static_cast<std::int64_t>(plan.scratch_bytes / sizeof(float))},
                       ScalarType::Float);
  }
  run_plan(plan, params, scratch.has_value() ? scratch->data_ptr() : nullptr,
           current_stream(q.get_device_index()));
  take_columns(rows.out, out);
  if (residual.has_value()) {
    take_columns(**rows.residual, *residual);
  }
}

}  // namespace fad
