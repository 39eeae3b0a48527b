// The sm80 family's backward for one (dtype, head dim): upstream's body under our order of sums.
#pragma once

#include "flash_bwd_preprocess_kernel.h"  // upstream; what follows calls it

#include <stdexcept>
#include <string>

#include "bwd.h"
#include "bwd_turns.h"
#include "flash_bwd_kernel.h"  // upstream
#include "fwd.h"
#include "launch.h"
#include "tree/masking.h"
#include "tree/row_end.h"

namespace fad {

// CTAs of a one-dimensional grid: a block of a sequence each, of each head and sequence. what: the
// length, for the message.
inline unsigned grid_of(const BwdParams& params, int seqlen, int block, const char* what,
                        int heads) {
  const long long blocks_each = num_blocks(seqlen, block);
  const long long blocks = blocks_each * params.b * heads;
  if (blocks > 0x7fffffffLL) {
    throw std::runtime_error(std::string("q: expected batch * nheads * ceil(") + what + " / " +
                             std::to_string(block) + ") below 2^31, the size of a CUDA grid, got " +
                             std::to_string(params.b) + " * " + std::to_string(heads) + " * " +
                             std::to_string(blocks_each));
  }
  return static_cast<unsigned>(blocks);
}

// kInTurns: whether CTAs that work on the same head may wait for each other. Kernels without the
// calls into bwd_turns.h are faster than kernels in which these return at once.
template <typename TileTraits, bool kInTurns_>
struct BwdTraits : TileTraits {
  static constexpr bool kInTurns = kInTurns_;
};

// kAddsResidual: whether out may have a residual, and softmax_lse a gradient. Kernels that may add
// them need twice the registers.
template <typename TileTraits, bool kAddsResidual_>
struct RowsTraits : TileTraits {
  static constexpr bool kAddsResidual = kAddsResidual_;
};

// Of a row's sum, the gradient of its log-sum-exp; upstream keeps sums times the probability to
// keep.
template <int kBlockM>
__device__ __forceinline__ void subtract_dlse(const BwdParams& params) {
  const auto [bidb, bidh, m_block] = row_place<kBlockM>(params);
  const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
  float* const sums =
      static_cast<float*>(params.dsoftmax_sum) + sum_rows_before(params, info.sum_s_q, bidb, bidh);
  const int end = min((m_block + 1) * kBlockM, info.actual_seqlen_q);
  __syncthreads();  // the sums are there
  for (int row = m_block * kBlockM + threadIdx.x; row < end; row += blockDim.x) {
    const float dlse = params.dlse[lse_at(params, info, bidb, bidh, row)];
    sums[row] = __fmaf_rn(-dlse, params.p_dropout, sums[row]);
  }
}

// Fills dsoftmax_sum, rowsum(dout * out) - dlse, and clears dq's sums.
template <typename Traits>
__global__ void bwd_rows_kernel(const __grid_constant__ BwdParams params) {
  FLASH_NAMESPACE::compute_dot_do_o</*Clear_dQaccum=*/true, Traits>(params);
  if constexpr (Traits::kAddsResidual) {
    if (params.dlse != nullptr) {
      subtract_dlse<Traits::kBlockM>(params);
    }
  }
}

template <typename Traits, Masking kMasking, bool kSoftcapToo, bool kDropoutToo, bool kEvenHeadDim>
__global__ void bwd_kernel(const __grid_constant__ BwdParams params) {
  constexpr bool kLocal = kMasking == Masking::kLocal;
  take_place<Traits>(params);
  do {
    const BwdPlace& place = shared_place();
    FLASH_NAMESPACE::compute_dq_dk_dv_1colblock<
        Traits, kDropoutToo, kMasking == Masking::kCausal, /*Is_local=*/kLocal,
        /*Has_alibi=*/kLocal, /*Is_even_MN=*/false, kEvenHeadDim, kSoftcapToo, /*Is_first=*/false,
        /*Is_last=*/false, /*Seq_parallel=*/true>(params, place.bidb, place.head, place.n_block);
  } while (next_leaf<Traits>(params));
}

// dq, from its sums.
template <typename Traits>
__global__ void bwd_dq_kernel(const __grid_constant__ BwdParams params) {
  FLASH_NAMESPACE::convert_dQ<Traits>(params, /*nsplits=*/1);
}

template <typename Traits, Masking kMasking, bool kSoftcapToo, bool kDropoutToo, bool kEvenHeadDim>
void launch_bwd_loop(const BwdParams& call, cudaStream_t stream) {
  constexpr int kShared = Traits::kSmemSize1colblock;
  BwdParams params = call;
  limit_windows(params);
  launch<&bwd_kernel<Traits, kMasking, kSoftcapToo, kDropoutToo, kEvenHeadDim>>(
      grid_of(params, params.seqlen_k, Traits::kBlockN, "seqlen_k",
              params.h_k * params.parts.count),
      Traits::kNThreads, kShared, kShared, stream, params);
}

// Fills the row sums and clears dq's sums, for every family's loop.
template <typename TileTraits>
void launch_bwd_rows(const BwdParams& params, cudaStream_t stream) {
  const unsigned rows = grid_of(params, params.seqlen_q, TileTraits::kBlockM, "seqlen_q", params.h);
  if (params.residual == nullptr && params.dlse == nullptr) {
    launch<&bwd_rows_kernel<RowsTraits<TileTraits, false>>>(rows, TileTraits::kNThreads, 0, 0,
                                                            stream, params);
  } else {
    launch<&bwd_rows_kernel<RowsTraits<TileTraits, true>>>(rows, TileTraits::kNThreads, 0, 0,
                                                           stream, params);
  }
}

// Rounds dq's sums.
template <typename TileTraits>
void launch_bwd_dq(const BwdParams& params, cudaStream_t stream) {
  constexpr int kShared = TileTraits::kSmemdQSize;
  const unsigned rows = grid_of(params, params.seqlen_q, TileTraits::kBlockM, "seqlen_q", params.h);
  launch<&bwd_dq_kernel<TileTraits>>(rows, TileTraits::kNThreads, kShared, kShared, stream, params);
}

// Plain and causal calls have kernels of their own, with and without turns; all others share one
// that masks by numbers, and takes turns. That for softcap looks whether there is dropout, too: a
// kernel for both together adds 56 KB for each head dim and dtype. At head dim 64 there is one, as
// looking takes softcap alone an eighth of its time.
template <typename TileTraits>
void launch_bwd(const BwdParams& params, cudaStream_t stream) {
  using InTurns = BwdTraits<TileTraits, true>;
  using Alone = BwdTraits<TileTraits, false>;
  const Features features = features_of(params);
  const bool alone = !params.in_turns;
  constexpr bool kLooks = TileTraits::kHeadDim != 64;
  constexpr Features kBoth = kSoftcap | kDropout;
  auto loop =
      features == 0 ? (alone ? &launch_bwd_loop<Alone, Masking::kFull, false, false, true>
                             : &launch_bwd_loop<InTurns, Masking::kFull, false, false, true>)
      : features == kCausal
          ? (alone ? &launch_bwd_loop<Alone, Masking::kCausal, false, false, true>
                   : &launch_bwd_loop<InTurns, Masking::kCausal, false, false, true>)
      : (features & kBoth) == kBoth ? &launch_bwd_loop<InTurns, Masking::kLocal, true, true, false>
      : (features & kSoftcap) != 0 ? &launch_bwd_loop<InTurns, Masking::kLocal, true, kLooks, false>
      : (features & kDropout) != 0
          ? &launch_bwd_loop<InTurns, Masking::kLocal, false, true, false>
          : &launch_bwd_loop<InTurns, Masking::kLocal, false, false, false>;
  loop(params, stream);
}

template <typename TileTraits, Features kCovers>
constexpr BwdKernel bwd_entry() {
  return {Family::kSm80,
          kCovers,
          TileTraits::kBlockM,
          TileTraits::kBlockN,
          TileTraits::kSmemSize1colblock,
          &launch_bwd<TileTraits>,
          &launch_bwd_dq<TileTraits>};
}

}  // namespace fad
