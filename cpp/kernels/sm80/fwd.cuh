// The sm80 family's forward for one (dtype, head dim): upstream's body, for one CTA per row block
// or one per split of it; the few-rows kernel; the merge kernel.
#pragma once

#include <c10/cuda/CUDAException.h>

#include "flash_fwd_kernel.h"  // upstream
#include "fwd.h"
#include "launch.h"
#include "merge.cuh"
#include "sm80/decode/few_rows_launch.h"
#include "sm80/decode/latent.cuh"
#include "sm80/decode/scores_first.h"
#include "tree/masking.h"

namespace fad {

// A row of O depends on its own row of Q and on kBlockN alone, so that kBlockM and warps are free.
template <typename Element, int kHeadDim, int kBlockM, int kWarps, Path kPath, Features kCovers>
struct FwdTraits
    : Flash_fwd_kernel_traits<kHeadDim, kBlockM, kKeysPerBlock, kWarps, /*Is_Q_in_regs=*/false,
                              /*Share_Q_K_smem=*/false, Element> {
  using Walk =
      std::conditional_t<kPath == Path::kOneCta, OwnerWalk<FwdTraits>, PartWalk<FwdTraits>>;
  using KvLayout = KvRows<(kCovers & (kCacheIndex | kPaged)) != 0>;
  static constexpr bool kEvenHeadDim = (kCovers & kPadded) == 0;
  static constexpr bool kAlibiToo = (kCovers & kAlibi) != 0;
  static constexpr bool kSoftcapToo = (kCovers & kSoftcap) != 0;
  static constexpr bool kDropoutToo = (kCovers & kDropout) != 0;
  // Few kernels do: with a branch behind it the loop over keys gets fewer registers.
  static constexpr bool kKeepsResidual = kPath == Path::kOneCta && (kCovers & kResidual) != 0;
  static constexpr Masking kMasking = (kCovers & kWindow) != 0   ? Masking::kLocal
                                      : (kCovers & kCausal) != 0 ? Masking::kCausal
                                                                 : Masking::kFull;
  // Upstream's other masks add the bias in another form (tree/softmax_steps.h).
  static_assert(!kAlibiToo || kMasking == Masking::kLocal);
};

template <typename Traits>
__global__ void fwd_kernel(const __grid_constant__ FwdParams params) {
  const auto [bidb, bidh, m_block] =
      place_of<Traits::kBlockM>(params, Traits::Walk::first_cta(params) + blockIdx.x);
  FLASH_NAMESPACE::compute_attn_1rowblock<
      Traits, Traits::kDropoutToo, Traits::kMasking == Masking::kCausal,
      /*Is_local=*/Traits::kMasking == Masking::kLocal, /*Has_alibi=*/Traits::kAlibiToo,
      /*Is_even_MN=*/false, Traits::kEvenHeadDim, Traits::kSoftcapToo,
      /*Return_softmax=*/false>(params, bidb, bidh, m_block);
}

template <typename Traits>
void launch_fwd(const FwdParams& call, unsigned ctas, cudaStream_t stream) {
  constexpr int kShared = Traits::kSmemSize;
  constexpr int kState = Traits::Walk::kSharedBytes;
  FwdParams params = call;
  if (Traits::kMasking == Masking::kLocal) {
    limit_windows(params);
  }
  const dim3 grid(ctas, Traits::Walk::kWritesParts ? params.num_splits : 1);
  // A single split keeps no state.
  launch<&fwd_kernel<Traits>>(grid, Traits::kNThreads,
                              kShared + (params.num_splits > 1 ? kState : 0), kShared + kState,
                              stream, params);
}

template <typename Traits>
void launch_latent(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  launch<&latent_kernel<Traits>>(dim3(ctas, params.num_splits), Traits::kThreads,
                                 Traits::kSharedBytes, Traits::kSharedBytes, stream, params);
}

// An entry of the instance table.
template <typename Element, int kHeadDim, Path kPath, int kBlockM, int kWarps, Features kCovers>
constexpr FwdKernel fwd_entry() {
  if constexpr (kPath == Path::kScoresFirst) {
    using Traits = ScoresTraits<Element, kHeadDim>;
    static_assert(kScoreRows == kBlockM && Traits::kWarps == kWarps, "instances.json");
    return {Family::kSm80,
            kPath,
            kCovers,
            kBlockM,
            Traits::kSharedBytes,
            Traits::kSharedBytes,
            &launch_scores_first<Element, kHeadDim>};
  } else if constexpr (kHeadDim == kLatentHeadDim) {
    using Traits = LatentTraits<Element>;
    static_assert(kPath == Path::kFewRows && Traits::kRows == kBlockM && Traits::kWarps == kWarps,
                  "instances.json");
    static_assert(Traits::kSharedBytes <= 99 * 1024);  // what the smallest device offers
    return {Family::kSm80,
            kPath,
            kCovers,
            kBlockM,
            Traits::kSharedBytes,
            Traits::kSharedBytes,
            &launch_latent<Traits>,
            /*ctas_per_sm=*/0,
            /*takes=*/nullptr,
            kLatentHeadDimV};
  } else if constexpr (kPath == Path::kFewRows) {
    using Traits =
        FewRowsTraits<Element, kHeadDim, kBlockM, (kCovers & kPaged) != 0, (kCovers & kFp8) != 0>;
    static_assert(Traits::kWarps == kWarps, "instances.json");
    return {Family::kSm80,
            kPath,
            kCovers,
            kBlockM,
            Traits::kSharedBytes,
            Traits::kSharedBytes,
            &launch_few_rows<Traits>};
  } else {
    using Traits = FwdTraits<Element, kHeadDim, kBlockM, kWarps, kPath, kCovers>;
    constexpr int kShared = Traits::kSmemSize;
    // Every device runs the same tree, and the smallest of them offers 99 KB to a block.
    static_assert(kShared <= 99 * 1024);
    return {
        Family::kSm80,      kPath, kCovers, kBlockM, kShared, kShared + Traits::Walk::kSharedBytes,
        &launch_fwd<Traits>};
  }
}

}  // namespace fad
