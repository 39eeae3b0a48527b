// The sm90 family's rows of the table of backward kernels. Plain C++: the table and these kernels
// are compiled apart, for different architectures.
#pragma once

#include "bwd.h"
#include "bwd_shape.h"
#include "sm90/tma.h"

namespace fad::sm90 {

struct BwdTensors {
  MappedTensor q, k, v, dout;
};

inline BwdTensors bwd_tensors(const BwdParams& params) {
  const auto tensor = [&](const void* data, bool packed, int64_t batch_stride, int64_t row_stride,
                          int64_t head_stride, int64_t rows, int64_t total, int heads,
                          int head_dim) {
    return MappedTensor{
        data,  batch_stride, row_stride, head_stride, packed ? 1 : params.b, packed ? total : rows,
        heads, head_dim};
  };
  const bool packed_q = params.cu_seqlens_q != nullptr;
  const bool packed_k = params.cu_seqlens_k != nullptr;
  return {tensor(params.q_ptr, packed_q, params.q_batch_stride, params.q_row_stride,
                 params.q_head_stride, params.seqlen_q, params.total_q, params.h, params.d),
          tensor(params.k_ptr, packed_k, params.k_batch_stride, params.k_row_stride,
                 params.k_head_stride, params.seqlen_k, params.total_k, params.h_k, params.d),
          tensor(params.v_ptr, packed_k, params.v_batch_stride, params.v_row_stride,
                 params.v_head_stride, params.seqlen_k, params.total_k, params.h_k, params.d_v),
          tensor(params.do_ptr, packed_q, params.do_batch_stride, params.do_row_stride,
                 params.do_head_stride, params.seqlen_q, params.total_q, params.h, params.d_v)};
}

// Whether the kernels take tensors laid out like this.
template <int kHeadDimV, int kBlockN>
bool takes(const BwdParams& params) {
  const auto [q, k, v, dout] = bwd_tensors(params);
  const int64_t ctas =
      static_cast<int64_t>((params.seqlen_k + kBlockN - 1) / kBlockN) * params.b * params.h;
  return params.d_v <= kHeadDimV && ctas < (int64_t{1} << 31) && params.d % 8 == 0 &&
         params.d_v % 8 == 0 && params.seqlen_q < (1 << 29) && params.seqlen_k < (1 << 29) &&
         can_map(q) && can_map(k) && can_map(v) && can_map(dout);
}

// The launchers are compiled for Hopper.
template <int kHeadDimV, int kBlockM, int kBlockN, Features kCovers>
constexpr BwdKernel bwd_entry(BwdLauncher launch, BwdLauncher after) {
  return {Family::kSm90,   kCovers, kBlockM, kBlockN,
          kBwdSharedBytes, launch,  after,   &takes<kHeadDimV, kBlockN>,
          kHeadDimV};
}

}  // namespace fad::sm90
