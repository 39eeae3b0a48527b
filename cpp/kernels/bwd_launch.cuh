// Launches upstream's backward kernel body for one (dtype, head dim).
#pragma once

#include "flash_bwd_preprocess_kernel.h"  // upstream; what follows calls it

#include "bwd.h"
#include "bwd_turns.h"
#include "flash_bwd_kernel.h"  // upstream
#include "launch.cuh"
#include "masking.h"

namespace fad {

// kInTurns: whether CTAs that work on the same head can wait for each other. Hooks that are not
// there are faster than hooks that do nothing.
template <typename Upstream, bool kInTurns_>
struct BwdTraits : Upstream {
  static constexpr bool kInTurns = kInTurns_;
};

// softmax_lse's companion, rowsum(dout * out), and zeros in dq's accumulator.
template <typename Traits>
__global__ void bwd_rows_kernel(const __grid_constant__ BwdParams params) {
  FLASH_NAMESPACE::compute_dot_do_o</*Clear_dQaccum=*/true, Traits>(params);
}

template <typename Traits, Masking kMasking, bool kSoftcap, bool kDropout, bool kEvenHeadDim>
__global__ void bwd_kernel(const __grid_constant__ BwdParams params) {
  constexpr bool kGeneral = kMasking == Masking::kGeneral;
  take_place<Traits, kGeneral>(params);
  do {
    const BwdPlace& place = shared_place();
    FLASH_NAMESPACE::compute_dq_dk_dv_1colblock<
        Traits, kDropout, kMasking == Masking::kCausal, /*Is_local=*/kGeneral,
        /*Has_alibi=*/kGeneral, /*Is_even_MN=*/false, kEvenHeadDim, kSoftcap, /*Is_first=*/false,
        /*Is_last=*/false, /*Seq_parallel=*/true>(params, place.bidb, place.bidh, place.n_block);
  } while (next_place<Traits>(params));
}

// dq, from its accumulator.
template <typename Traits>
__global__ void bwd_dq_kernel(const __grid_constant__ BwdParams params) {
  FLASH_NAMESPACE::convert_dQ<Traits>(params, /*nsplits=*/1);
}

template <typename Traits, Masking kMasking, bool kSoftcap, bool kDropout, bool kEvenHeadDim>
void launch_bwd_loop(BwdParams params, cudaStream_t stream) {
  if (kMasking == Masking::kGeneral) {
    limit_windows(params);
  }
  const unsigned grid =
      grid_of(params, params.whole_heads ? 1 : params.seqlen_k, Traits::kBlockN, "seqlen_k");
  launch(&bwd_kernel<Traits, kMasking, kSoftcap, kDropout, kEvenHeadDim>, grid, Traits::kNThreads,
         Traits::kSmemSize1colblock, params, stream);
}

template <typename Traits>
void launch_bwd(BwdParams& params, cudaStream_t stream) {
  const unsigned rows = grid_of(params, params.seqlen_q, Traits::kBlockM, "seqlen_q");
  launch(&bwd_rows_kernel<Traits>, rows, Traits::kNThreads, 0, params, stream);

  const bool even = params.d == Traits::kHeadDim;
  const bool full = params.window_size_left < 0 && params.window_size_right < 0;
  const bool softcap = params.softcap > 0.f;
  const bool dropout = params.p_dropout < 1.f;
  const bool plain = params.alibi_slopes_ptr == nullptr && !softcap && !dropout && even;
  constexpr Masking kGeneral = Masking::kGeneral;
  using InTurns = BwdTraits<Traits, true>;
  using Alone = BwdTraits<Traits, false>;
  const bool alone = !params.in_turns;
  auto loop = plain && full
                  ? (alone ? &launch_bwd_loop<Alone, Masking::kFull, false, false, true>
                           : &launch_bwd_loop<InTurns, Masking::kFull, false, false, true>)
              : plain && params.is_causal
                  ? (alone ? &launch_bwd_loop<Alone, Masking::kCausal, false, false, true>
                           : &launch_bwd_loop<InTurns, Masking::kCausal, false, false, true>)
              : softcap ? &launch_bwd_loop<InTurns, kGeneral, true, false, false>
              : dropout ? &launch_bwd_loop<InTurns, kGeneral, false, true, false>
                        : &launch_bwd_loop<InTurns, kGeneral, false, false, false>;
  loop(params, stream);

  launch(&bwd_dq_kernel<Traits>, rows, Traits::kNThreads, Traits::kSmemdQSize, params, stream);
}

}  // namespace fad
