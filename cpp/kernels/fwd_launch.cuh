// Launches upstream's forward kernel body for one (dtype, head dim). Everything a call may vary
// without changing bits (path, tile height, grid, order of row blocks) is decided outside of it.
#pragma once

#include <c10/cuda/CUDAException.h>

#include "decode.cuh"
#include "flash_fwd_kernel.h"  // upstream
#include "fwd.h"
#include "fwd_merge.cuh"
#include "launch.cuh"
#include "masking.h"

namespace fad {

// A row of O depends on its own row of Q and on kBlockN alone, so that kBlockM and warps are free.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps, bool kOwner,
          bool kMayBePaged, bool kEvenHeadDim_>
struct FwdTraits
    : Flash_fwd_kernel_traits<kHeadDim, kBlockM, kBlockN, kWarps, /*Is_Q_in_regs=*/false,
                              /*Share_Q_K_smem=*/false, Element> {
  using Walk = std::conditional_t<kOwner, OwnerWalk<FwdTraits>, PartWalk<FwdTraits>>;
  using Rows = KvRows<kMayBePaged>;
  static constexpr bool kEvenHeadDim = kEvenHeadDim_;
};

template <typename Traits, Masking kMasking, bool kSoftcap, bool kDropout>
__global__ void fwd_kernel(const __grid_constant__ FwdParams params) {
  const auto [bidb, bidh, m_block] = place_of<Traits>(params, blockIdx.x);
  constexpr bool kGeneral = kMasking == Masking::kGeneral;
  FLASH_NAMESPACE::compute_attn_1rowblock<
      Traits, kDropout, kMasking == Masking::kCausal, /*Is_local=*/kGeneral,
      /*Has_alibi=*/kGeneral, /*Is_even_MN=*/false, Traits::kEvenHeadDim, kSoftcap,
      /*Return_softmax=*/false>(params, bidb, bidh, m_block);
}

template <typename Traits, Masking kMasking, bool kSoftcap, bool kDropout>
void launch_kernel(FwdParams params, cudaStream_t stream) {
  if (kMasking == Masking::kGeneral) {
    limit_windows(params);
  }
  // A single split keeps no state.
  const int shared = Traits::kSmemSize + (params.num_parts > 1 ? Traits::Walk::kSharedBytes : 0);
  const dim3 grid(grid_of(params, params.seqlen_q, Traits::kBlockM, "seqlen_q"),
                  Traits::Walk::kWritesParts ? params.num_parts : 1);
  launch(&fwd_kernel<Traits, kMasking, kSoftcap, kDropout>, grid, Traits::kNThreads, shared, params,
         stream);
}

template <typename Element, int kHeadDim>
void launch_merge(FwdParams& params, cudaStream_t stream) {
  constexpr int kRowsPerBlock = 4;
  const long long rows = static_cast<long long>(params.b) * params.h * params.seqlen_q;
  fwd_merge_kernel<Element, kHeadDim>
      <<<static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock), 32 * kRowsPerBlock, 0,
         stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Traits>
void launch_decode_kernel(FwdParams& params, cudaStream_t stream) {
  const dim3 grid(grid_of(params, params.seqlen_q, Traits::kRows, "seqlen_q"), params.num_parts);
  launch(&decode_kernel<Traits>, grid, Traits::kThreads, Traits::kSharedBytes, params, stream);
}

template <typename Element, int kHeadDim>
void launch_decode(FwdParams& params, cudaStream_t stream) {
  if (params.block_table != nullptr) {
    launch_decode_kernel<DecodeTraits<Element, kHeadDim, /*kPaged=*/true>>(params, stream);
  } else {
    launch_decode_kernel<DecodeTraits<Element, kHeadDim, /*kPaged=*/false>>(params, stream);
  }
  if (params.num_parts > 1) {
    launch_merge<Element, kHeadDim>(params, stream);
  }
}

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps>
void launch_fwd(FwdParams& params, cudaStream_t stream) {
  static_assert(kBlockN == 64, "plan.cpp and fwd_merge.cuh count in blocks of 64");
  using Even = FwdTraits<Element, kHeadDim, kBlockM, kBlockN, kWarps, true, false, true>;
  using Uneven = FwdTraits<Element, kHeadDim, kBlockM, kBlockN, kWarps, true, false, false>;
  using General = FwdTraits<Element, kHeadDim, kBlockM, kBlockN, kWarps, true, true, false>;
  using EvenPart = FwdTraits<Element, kHeadDim, 64, kBlockN, 4, false, true, true>;
  using GeneralPart = FwdTraits<Element, kHeadDim, 64, kBlockN, 4, false, true, false>;
  // Every device runs the same kBlockN, and the smallest of them offers 99 KB to a block.
  static_assert(Even::kSmemSize <= 99 * 1024 && EvenPart::kSmemSize <= 99 * 1024);

  const bool even = params.d == kHeadDim;
  const bool full = params.window_size_left < 0 && params.window_size_right < 0;
  const bool softcap = params.softcap > 0.f;
  const bool dropout = params.p_dropout < 1.f;
  const bool plain_scores = params.alibi_slopes_ptr == nullptr && !softcap && !dropout;
  const bool paged = params.block_table != nullptr || params.cache_batch_idx != nullptr;
  constexpr Masking kFull = Masking::kFull;
  constexpr Masking kCausal = Masking::kCausal;
  constexpr Masking kGeneral = Masking::kGeneral;

  if (params.few_rows) {
    return launch_decode<Element, kHeadDim>(params, stream);
  }
  if (params.part_acc != nullptr) {
    auto launch = plain_scores && full && even ? &launch_kernel<EvenPart, kFull, false, false>
                  : softcap                    ? &launch_kernel<GeneralPart, kGeneral, true, false>
                  : dropout ? &launch_kernel<GeneralPart, kGeneral, false, true>
                            : &launch_kernel<GeneralPart, kGeneral, false, false>;
    launch(params, stream);
    return launch_merge<Element, kHeadDim>(params, stream);
  }
  if (plain_scores && !paged && (full || params.is_causal)) {
    auto launch = params.is_causal ? (even ? &launch_kernel<Even, kCausal, false, false>
                                           : &launch_kernel<Uneven, kCausal, false, false>)
                                   : (even ? &launch_kernel<Even, kFull, false, false>
                                           : &launch_kernel<Uneven, kFull, false, false>);
    return launch(params, stream);
  }
  auto launch = softcap   ? &launch_kernel<General, kGeneral, true, false>
                : dropout ? &launch_kernel<General, kGeneral, false, true>
                          : &launch_kernel<General, kGeneral, false, false>;
  launch(params, stream);
}

}  // namespace fad
