#include "kernels/sink_bwd.h"

#include <torch/csrc/stable/accelerator.h>

#include "allocate.h"
#include "bwd.h"
#include "checks.h"
#include "device.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor sink_bwd(const Tensor& dout, const Tensor& out, const Tensor& softmax_lse,
                const Tensor& learnable_sink, const OptionalTensor& cu_seqlens_q,
                std::int64_t max_seqlen_q, const OptionalTensor& residual,
                const OptionalTensor& dlse) {
  const bool packed = cu_seqlens_q.has_value();
  check_attention_input(out, "out", out, packed ? 3 : 4);
  check_heads(out, out, out);
  dtype_name(out);
  check_gradient_inputs(dout, out, out, out, softmax_lse);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const Tensor dout_rows = aligned(dout);
  const Tensor out_rows = aligned(out);
  BwdParams params{};
  if (packed) {
    const Packed lengths{*cu_seqlens_q, *cu_seqlens_q, max_seqlen_q, max_seqlen_q};
    check_packed(out, lengths);
    check_shape(softmax_lse, "softmax_lse", {out.size(1), out.size(0)});
    set_packed(params, out_rows, out_rows, out_rows, out_rows, softmax_lse, lengths);
  } else {
    check(out.size(0) > 0, "out: expected a batch of at least 1, got shape ", Shape{out});
    check_shape(softmax_lse, "softmax_lse", {out.size(0), out.size(2), out.size(1)});
    set_dense(params, out_rows, out_rows, out_rows, out_rows, softmax_lse);
  }
  const std::int64_t head_dim = out.size(out.dim() - 1);
  set_head_dims(params, head_dim, head_dim);
  set_gradients(params, dout_rows, out_rows, out_rows, out_rows);
  set_residual(params, residual, out);
  set_dlse(params, dlse, softmax_lse);
  const float* const sinks = sinks_of(learnable_sink, params.h, out);
  const std::int64_t blocks = (params.seqlen_q + kSinkRows - 1) / kSinkRows;
  const std::int64_t ctas = std::int64_t{params.b} * params.h * blocks;
  check(ctas < (std::int64_t{1} << 31), "out: expected batch * nheads * ceil(seqlen_q / ",
        kSinkRows, ") below 2^31, got ", ctas);
  const Tensor sums = allocate(out, {ctas}, ScalarType::Float);
  const Tensor dsink = allocate(out, {params.h}, ScalarType::Float);
  sink_bwd(params, sinks, static_cast<float*>(sums.data_ptr()),
           static_cast<float*>(dsink.data_ptr()), current_stream(out.get_device_index()));
  return dsink;
}

}  // namespace fad
