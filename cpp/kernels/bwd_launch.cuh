// Launches upstream's backward kernel body for one (dtype, head dim).
#pragma once

#include <c10/cuda/CUDAException.h>

#include <stdexcept>
#include <string>

#include "flash_bwd_preprocess_kernel.h"  // upstream; what follows calls it

#include "bwd.h"
#include "bwd_turns.h"
#include "flash_bwd_kernel.h"  // upstream
#include "masking.h"

namespace fad {

// softmax_lse's companion, rowsum(dout * out), and zeros in dq's accumulator.
template <typename Traits>
__global__ void bwd_rows_kernel(const __grid_constant__ BwdParams params) {
  FLASH_NAMESPACE::compute_dot_do_o</*Clear_dQaccum=*/true, Traits>(params);
}

template <typename Traits, Masking kMasking, bool kSoftcap, bool kDropout, bool kEvenHeadDim>
__global__ void bwd_kernel(const __grid_constant__ BwdParams params) {
  take_place<Traits>(params);
  const BwdPlace& place = shared_place();
  constexpr bool kGeneral = kMasking == Masking::kGeneral;
  FLASH_NAMESPACE::compute_dq_dk_dv_1colblock<
      Traits, kDropout, kMasking == Masking::kCausal, /*Is_local=*/kGeneral, /*Has_alibi=*/kGeneral,
      /*Is_even_MN=*/false, kEvenHeadDim, kSoftcap, /*Is_first=*/false, /*Is_last=*/false,
      /*Seq_parallel=*/true>(params, place.bidb, place.bidh, place.n_block);
}

// dq, from its accumulator.
template <typename Traits>
__global__ void bwd_dq_kernel(const __grid_constant__ BwdParams params) {
  FLASH_NAMESPACE::convert_dQ<Traits>(params, /*nsplits=*/1);
}

inline unsigned bwd_grid(const BwdParams& params, int seqlen, int block, const char* what) {
  const long long blocks =
      static_cast<long long>((seqlen + block - 1) / block) * params.b * params.h;
  if (blocks > 0x7fffffffLL) {
    throw std::runtime_error(std::string("q: expected batch * nheads * ceil(") + what + " / " +
                             std::to_string(block) + ") below 2^31, the size of a CUDA grid, got " +
                             std::to_string(params.b) + " * " + std::to_string(params.h) + " * " +
                             std::to_string((seqlen + block - 1) / block));
  }
  return static_cast<unsigned>(blocks);
}

template <typename Kernel>
void launch_bwd_kernel(Kernel kernel, unsigned grid, int threads, int shared,
                       const BwdParams& params, cudaStream_t stream) {
  if (grid == 0) {
    return;
  }
  if (shared > 48 * 1024) {
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  }
  kernel<<<grid, threads, shared, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Traits, Masking kMasking, bool kSoftcap, bool kDropout, bool kEvenHeadDim>
void launch_bwd_loop(BwdParams params, cudaStream_t stream) {
  if (kMasking == Masking::kGeneral) {
    limit_windows(params);
  }
  launch_bwd_kernel(&bwd_kernel<Traits, kMasking, kSoftcap, kDropout, kEvenHeadDim>,
                    bwd_grid(params, params.seqlen_k, Traits::kBlockN, "seqlen_k"),
                    Traits::kNThreads, Traits::kSmemSize1colblock, params, stream);
}

template <typename Traits>
void launch_bwd(BwdParams& params, cudaStream_t stream) {
  const unsigned rows = bwd_grid(params, params.seqlen_q, Traits::kBlockM, "seqlen_q");
  launch_bwd_kernel(&bwd_rows_kernel<Traits>, rows, Traits::kNThreads, 0, params, stream);

  const bool even = params.d == Traits::kHeadDim;
  const bool full = params.window_size_left < 0 && params.window_size_right < 0;
  const bool softcap = params.softcap > 0.f;
  const bool dropout = params.p_dropout < 1.f;
  const bool plain = params.alibi_slopes_ptr == nullptr && !softcap && !dropout && even;
  constexpr Masking kGeneral = Masking::kGeneral;
  auto launch = plain && full ? &launch_bwd_loop<Traits, Masking::kFull, false, false, true>
                : plain && params.is_causal
                    ? &launch_bwd_loop<Traits, Masking::kCausal, false, false, true>
                : softcap ? &launch_bwd_loop<Traits, kGeneral, true, false, false>
                : dropout ? &launch_bwd_loop<Traits, kGeneral, false, true, false>
                          : &launch_bwd_loop<Traits, kGeneral, false, false, false>;
  launch(params, stream);

  launch_bwd_kernel(&bwd_dq_kernel<Traits>, rows, Traits::kNThreads, Traits::kSmemdQSize, params,
                    stream);
}

}  // namespace fad
