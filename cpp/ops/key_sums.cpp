// The end of dk and dv whose rows several calls have added up.
#include <torch/csrc/stable/accelerator.h>

#include "allocate.h"
#include "bwd.h"
#include "checks.h"
#include "device.h"
#include "kernels/fold_parts.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> finish_key_sums(const Tensor& dk_sums, const Tensor& dv_sums,
                                           const Tensor& k, double softmax_scale, double softcap,
                                           double dropout_p) {
  const bool bf16 = k.scalar_type() == ScalarType::BFloat16;
  check(bf16 || k.scalar_type() == ScalarType::Half, "k: expected float16 or bfloat16, got ",
        Described{k});
  check(dk_sums.dim() == 3 && dk_sums.size(2) % 4 == 0,
        "dk_sums: expected (keys, nheads_k, head_dim), head_dim a multiple of 4, got ",
        Shape{dk_sums});
  check(dv_sums.sizes().equals(dk_sums.sizes()), "dv_sums: expected the shape of dk_sums, ",
        Shape{dk_sums}, ", got ", Shape{dv_sums});
  const int device = dk_sums.get_device_index();
  for (const auto& [sums, name] : {std::pair{dk_sums, "dk_sums"}, std::pair{dv_sums, "dv_sums"}}) {
    check(sums.is_cuda() && sums.get_device_index() == device &&
              sums.scalar_type() == ScalarType::Float && sums.is_contiguous(),
          name, ": expected a contiguous float32 tensor on cuda:", device, ", got ",
          Described{sums});
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor dk = allocate(dk_sums, dk_sums.sizes(), k.scalar_type());
  const Tensor dv = allocate(dk_sums, dk_sums.sizes(), k.scalar_type());
  BwdParams params{};
  params.b = 1;
  params.seqlen_k = static_cast<int>(dk_sums.size(0));
  params.h = params.h_k = static_cast<int>(dk_sums.size(1));
  params.h_h_k_ratio = 1;
  params.d = params.d_v = static_cast<int>(dk_sums.size(2));
  params.is_bf16 = bf16;
  params.dk_sums = static_cast<float*>(dk_sums.data_ptr());
  params.dv_sums = static_cast<float*>(dv_sums.data_ptr());
  params.dk_ptr = dk.data_ptr();
  params.dv_ptr = dv.data_ptr();
  params.dk_row_stride = params.dv_row_stride = dk.stride(0);
  params.dk_head_stride = params.dv_head_stride = dk.stride(1);
  // As set_softmax and set_dropout have them: with softcap, softmax_scale / softcap is in the sums.
  params.p_dropout = static_cast<float>(1.0 - dropout_p);
  params.rp_dropout = 1.f / params.p_dropout;
  params.scale_softmax_rp_dropout =
      params.rp_dropout * static_cast<float>(softcap > 0 ? softcap : softmax_scale);
  fold_parts(params, current_stream(device));
  return {dk, dv};
}

}  // namespace fad
