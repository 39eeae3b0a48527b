// The end of dk and dv whose sums the caller keeps.
#include <torch/csrc/stable/accelerator.h>

#include "allocate.h"
#include "bwd.h"
#include "checks.h"
#include "device.h"
#include "kernels/round_sums.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> finish_key_sums(const Tensor& dk_sums, const Tensor& dv_sums,
                                           const Tensor& k, double softmax_scale, double softcap,
                                           double dropout_p) {
  const std::int64_t last = dk_sums.dim() - 1;
  check(
      last == 2 || last == 3,
      "dk_sums: expected (batch, seqlen_k, nheads, head_dim) or (total_k, nheads, head_dim), got ",
      Shape{dk_sums});
  const std::int64_t heads = dk_sums.size(last - 1);
  check(k.dim() >= 3, "k: expected (..., nheads_k, head_dim), got ", Shape{k});
  const std::int64_t heads_k = k.size(k.dim() - 2);
  const bool bf16 = k.scalar_type() == ScalarType::BFloat16;
  check(bf16 || k.scalar_type() == ScalarType::Half, "k: expected float16 or bfloat16, got ",
        Described{k});
  check(heads_k > 0 && heads % heads_k == 0 && k.size(k.dim() - 1) == dk_sums.size(last),
        "k: expected a number of heads that divides the ", heads, " of dk_sums, and its head_dim ",
        dk_sums.size(last), ", got ", Shape{k});
  check(dv_sums.sizes().equals(dk_sums.sizes()), "dv_sums: expected the shape of dk_sums, ",
        Shape{dk_sums}, ", got ", Shape{dv_sums});
  const int device = dk_sums.get_device_index();
  std::vector<std::int64_t> shape(dk_sums.sizes().begin(), dk_sums.sizes().end());
  shape[last - 1] = heads_k;
  std::int64_t rows = 1;
  for (std::int64_t dim = 0; dim < last - 1; ++dim) {
    rows *= shape[dim];
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  const auto rounded = [&](const Tensor& sums, const char* name, float scale, bool scales) {
    check(sums.is_cuda() && sums.get_device_index() == device &&
              sums.scalar_type() == ScalarType::Float && sums.is_contiguous(),
          name, ": expected a contiguous float32 tensor on cuda:", device, ", got ",
          Described{sums});
    Tensor gradient = allocate(sums, shape, k.scalar_type());
    round_sums({static_cast<const float*>(sums.data_ptr()), gradient.data_ptr(), rows,
                static_cast<int>(heads), static_cast<int>(heads / heads_k),
                static_cast<int>(shape[last]), scale, scales},
               bf16, current_stream(device));
    return gradient;
  };
  // As set_softmax and set_dropout have them: with softcap, softmax_scale / softcap is in the sums.
  const auto scale = static_cast<float>(softcap > 0 ? softcap : softmax_scale);
  const float keep = static_cast<float>(1.0 - dropout_p);
  const float rp_dropout = 1.f / keep;
  return {rounded(dk_sums, "dk_sums", rp_dropout * scale, true),
          rounded(dv_sums, "dv_sums", rp_dropout, dropout_p > 0)};
}

}  // namespace fad
