#include "fwd.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "checks.h"
#include "device.h"
#include "kernels/fwd.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// The kernels load 16 bytes at a time: rows that are strided, or that do not start at multiples of
// that, are copied.
Tensor aligned(const Tensor& tensor) {
  bool good =
      tensor.stride(3) == 1 && reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) {
    good = good && (tensor.stride(dim) % 8 == 0 || tensor.size(dim) == 1);
  }
  if (good) {
    return tensor;
  }
  Tensor copy = torch::stable::new_empty(
      tensor, {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)});
  return torch::stable::copy_(copy, tensor);
}

constexpr double kLog2E = 1.4426950408889634074;

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
  const auto round_up = [](int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
  };
  params.b = static_cast<int>(q.size(0));
  params.seqlen_q = static_cast<int>(q.size(1));
  params.h = static_cast<int>(q.size(2));
  params.d = static_cast<int>(q.size(3));
  params.seqlen_k = static_cast<int>(k.size(1));
  params.h_k = static_cast<int>(k.size(2));
  params.h_h_k_ratio = params.h / params.h_k;
  params.d_rounded = round_up(params.d, params.d <= 128 ? 32 : 64);
  params.seqlen_q_rounded = round_up(params.seqlen_q, 128);
  params.seqlen_k_rounded = round_up(params.seqlen_k, 128);
  params.is_seqlens_k_cumulative = true;
}

void set_softmax(FwdParams& params, double softmax_scale, bool causal) {
  params.scale_softmax = static_cast<float>(softmax_scale);
  // The product is rounded once, from double: upstream's float product, on any compiler.
  params.scale_softmax_log2 =
      static_cast<float>(static_cast<double>(params.scale_softmax) * kLog2E);
  params.is_causal = causal;
  params.window_size_left = -1;
  params.window_size_right = causal ? 0 : -1;
  params.p_dropout = 1.f;  // upstream's meaning: the probability to keep
  params.p_dropout_in_uint8_t = 255;
  params.rp_dropout = 1.f;
  params.scale_softmax_rp_dropout = params.scale_softmax;
}

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale) {
  check_attention_input(q, "q", q);
  check_attention_input(k, "k", q);
  check_attention_input(v, "v", q);
  const std::int64_t head_dim = q.size(3);
  check(head_dim > 0 && head_dim <= 256 && head_dim % 8 == 0,
        "q: expected a head_dim that is a multiple of 8 and at most 256, got ", head_dim);
  check(q.size(0) > 0, "q: expected a batch of at least 1, got shape ", shape_string(q));
  const std::int64_t nheads_k = k.size(2);
  check(nheads_k > 0 && q.size(2) > 0 && q.size(2) % nheads_k == 0,
        "k: expected a number of heads that divides the ", q.size(2), " heads of q, got ",
        nheads_k);
  check_shape(k, "k", {q.size(0), k.size(1), nheads_k, head_dim});
  check_shape(v, "v", {q.size(0), k.size(1), nheads_k, head_dim});
  constexpr std::int64_t kMaxLength = std::numeric_limits<int>::max() - 1024;
  check(q.size(1) <= kMaxLength && k.size(1) <= kMaxLength && q.size(0) <= kMaxLength,
        "q, k: expected sizes below 2^31, got ", shape_string(q), " and ", shape_string(k));
  // Scores are scaled after masking: -inf times a scale of 0 or less would not stay masked.
  check(std::isfinite(softmax_scale) && softmax_scale > 0,
        "softmax_scale: expected a positive, finite number, got ", softmax_scale);
}

// The parts that a schedule-dependent build writes before it combines them; kept alive by the
// caller until the launches are queued.
struct Scratch {
  Tensor out, softmax_lse;
};

Scratch allocate_parts(FwdParams& params, const Tensor& q) {
  const std::int64_t rows =
      static_cast<std::int64_t>(params.num_splits) * params.b * params.h * params.seqlen_q;
  Scratch scratch{torch::stable::new_empty(q, {rows * params.d_rounded}, ScalarType::Float),
                  torch::stable::new_empty(q, {rows}, ScalarType::Float)};
  params.oaccum_ptr = scratch.out.data_ptr();
  params.softmax_lseaccum_ptr = scratch.softmax_lse.data_ptr();
  return scratch;
}

}  // namespace

std::tuple<Tensor, Tensor> fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                               double softmax_scale, bool causal) {
  check_inputs(q, k, v, softmax_scale);
  const char* dtype = dtype_name(q);
  const FwdLauncher launch = find_fwd(dtype, static_cast<int>(q.size(3)));
  check(launch != nullptr, "this build of flash_attn_deterministic holds no forward for ", dtype,
        " and head_dim ", q.size(3));
  const int device = q.get_device_index();
  check_architecture(device);
  const torch::stable::accelerator::DeviceGuard guard(device);

  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)});
  Tensor softmax_lse =
      torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  if (q.size(1) == 0) {
    return {out, softmax_lse};
  }

  // Named, so that copies live until the launches are queued.
  const Tensor q_rows = aligned(q);
  const Tensor k_rows = aligned(k);
  const Tensor v_rows = aligned(v);
  FwdParams params{};
  set_tensors(params, q_rows, k_rows, v_rows, out, softmax_lse);
  set_sizes(params, q, k);
  set_softmax(params, softmax_scale, causal);
  params.is_bf16 = q.scalar_type() == ScalarType::BFloat16;
  params.num_splits = schedule_fwd(params, num_sms(device)).num_splits;
  std::optional<Scratch> scratch;
  if (params.num_splits > 1) {
    scratch = allocate_parts(params, q);
  }
  launch(params, current_stream(device));
  return {out, softmax_lse};
}

}  // namespace fad
