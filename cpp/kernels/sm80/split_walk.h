// How a CTA goes over the splits of its row block. Patches call these functions from upstream's
// kernel:
//
//   first_cta   where in the grid of all row blocks this launch begins
//   limit       which key blocks are this CTA's
//   enter       the first block of the split, whose last one is known; splits go last to first
//   hides_keys  whether some of the split's last keys are hidden from some row
//   finish_uncut_block  the scores of a block that no mask cuts
//   leave       the split is done; returns whether there is another one
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"  // upstream
#include "row_block.h"
#include "softmax.h"  // upstream
#include "tree/row_end.h"
#include "tree/softmax_steps.h"
#include "tree/split_state.h"
#include "waiting_state.h"

namespace fad {

template <typename Traits>
__device__ __forceinline__ void sum_row(FLASH_NAMESPACE::Softmax<2 * Fragment<Traits>::kMmaM>& s) {
  FLASH_NAMESPACE::SumOp<float> sum;
  FLASH_NAMESPACE::quad_allreduce_(s.row_sum, s.row_sum, sum);
}

// kBounded: causal, or with a right window; without, all rows end at the end of the sequence.
template <typename Traits, bool kBounded, typename Params, typename Info>
__device__ __forceinline__ bool hides_keys(const Params& params, const Info& info, int m_block,
                                           int n_block_max) {
  int end = info.actual_seqlen_k;
  if constexpr (kBounded) {  // the first row ends first
    end = min(end, m_block * Traits::kBlockM + 1 + info.actual_seqlen_k - info.actual_seqlen_q +
                       params.window_size_right);
  }
  return n_block_max * Traits::kBlockN > end;
}

// The last row's window begins last.
template <typename Traits, typename Params, typename Info>
__device__ __forceinline__ bool hides_early_keys(const Params& params, const Info& info,
                                                 int m_block, int n_block) {
  return n_block * Traits::kBlockN < (m_block + 1) * Traits::kBlockM - 1 + info.actual_seqlen_k -
                                         info.actual_seqlen_q - params.window_size_left;
}

// Finishes the scores of a block below those that the right edge of the mask can cut: adds the bias
// of ALiBi. Returns false, with nothing done, where a left window cuts the block: upstream's mask,
// which compares every score with its row's edges and adds the bias itself, has to run.
template <typename Traits, bool kLocal, bool kAlibi, typename Params, typename Info, typename Acc>
__device__ __forceinline__ bool finish_uncut_block(const Params& params, const Info& info,
                                                   int m_block, int n_block, float slope,
                                                   Acc& scores) {
  if (kLocal && hides_early_keys<Traits>(params, info, m_block, n_block)) {
    return false;
  }
  if (kAlibi && params.alibi_slopes_ptr != nullptr) {
    using F = Fragment<Traits>;
    if (info.actual_seqlen_q + info.actual_seqlen_k >= kExactInFloat) {
      return false;
    }
    const int first_key = n_block * Traits::kBlockN + threadIdx.x % 4 * 2;
    const int position = m_block * Traits::kBlockM + thread_row() + info.actual_seqlen_k -
                         info.actual_seqlen_q - first_key;
#pragma unroll
    for (int mi = 0; mi < F::kMmaM; ++mi) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row = static_cast<float>(position + mi * F::kRowStep + 8 * half);
#pragma unroll
        for (int nj = 0; nj < Traits::kBlockN / 8; ++nj) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& score = scores(2 * half + j, mi, nj);
            score = alibi_score(score, slope, __fsub_rn(row, static_cast<float>(nj * 8 + j)));
          }
        }
      }
    }
  }
  return true;
}

// One CTA owns the row block and walks all of its splits. While it works on one, the state of the
// later ones waits (waiting_state.h).
template <typename Traits>
struct OwnerWalk {
  using F = Fragment<Traits>;
  using Waiting = WaitingState<Traits>;
  static constexpr bool kWritesParts = false;
  static constexpr int kSharedBytes = Waiting::kBytes;

  const int highest;  // end of the last split

  __device__ __forceinline__ explicit OwnerWalk(int n_block_max) : highest(n_block_max) {}

  __device__ __forceinline__ static unsigned first_cta(const FwdParams&) { return 0; }

  template <typename Params>
  __device__ __forceinline__ static void limit(const Params&, int&, int&) {}

  template <typename Params>
  __device__ __forceinline__ static int enter(const Params& params, int lowest, int n_block_max) {
    return max(lowest,
               (n_block_max - 1) / params.tree.blocks_per_split * params.tree.blocks_per_split);
  }

  // A middle split takes both branches, in registers: through a call its accumulator would go
  // through local memory, about twice as slow.
  template <typename Params, typename Acc, typename Softmax>
  __device__ __forceinline__ bool leave(const Params& params, int lowest, int n_block_min,
                                        int& n_block_max, Acc& acc, Softmax& softmax) const {
    sum_row<Traits>(softmax);
    const bool has_later = n_block_max != highest;
    const bool has_earlier = n_block_min > lowest;
    if (has_later) {
      const Waiting waiting(params, /*is_first=*/false);
#pragma unroll
      for (int mi = 0; mi < F::kMmaM; ++mi) {
        const float4 later = waiting.state(mi);
        const MergeWeights upper = merge_state(later.x, later.y, softmax.row_max(2 * mi),
                                               softmax.row_sum(2 * mi), params.scale_softmax_log2);
        const MergeWeights lower =
            merge_state(later.z, later.w, softmax.row_max(2 * mi + 1), softmax.row_sum(2 * mi + 1),
                        params.scale_softmax_log2);
#pragma unroll
        for (int nj = 0; nj < F::kMmaN; ++nj) {
          const float4 value = waiting.load(params, mi, nj);
          acc(0, mi, nj) = merge_value(value.x, upper.later, acc(0, mi, nj), upper.earlier);
          acc(1, mi, nj) = merge_value(value.y, upper.later, acc(1, mi, nj), upper.earlier);
          acc(2, mi, nj) = merge_value(value.z, lower.later, acc(2, mi, nj), lower.earlier);
          acc(3, mi, nj) = merge_value(value.w, lower.later, acc(3, mi, nj), lower.earlier);
        }
      }
    }
    if (has_earlier) {
      const Waiting waiting(params, /*is_first=*/!has_later);
#pragma unroll
      for (int mi = 0; mi < F::kMmaM; ++mi) {
        waiting.state(mi) = make_float4(softmax.row_max(2 * mi), softmax.row_sum(2 * mi),
                                        softmax.row_max(2 * mi + 1), softmax.row_sum(2 * mi + 1));
#pragma unroll
        for (int nj = 0; nj < F::kMmaN; ++nj) {
          waiting.store(
              params, mi, nj,
              make_float4(acc(0, mi, nj), acc(1, mi, nj), acc(2, mi, nj), acc(3, mi, nj)));
        }
      }
    }
    // Tested a second time: with the return inside the branch above, ptxas leaves the loop over key
    // blocks fewer registers.
    if (has_earlier) {
      n_block_max = n_block_min;
      return true;
    }
    if constexpr (Traits::kKeepsResidual) {
      if (params.row_max != nullptr) {
        write_row_maxima(params, softmax);
      }
      if (params.sinks != nullptr) {
        const int bidh = place_of<Traits::kBlockM>(params, read_cta()).bidh;
#pragma unroll
        for (int i = 0; i < size(softmax.row_sum); ++i) {
          const float weight = merge_sink(params, bidh, softmax.row_max(i), softmax.row_sum(i));
#pragma unroll
          for (int nj = 0; nj < F::kMmaN; ++nj) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& value = acc(2 * (i % 2) + j, i / 2, nj);
              value = rescaled_acc(value, weight);
            }
          }
        }
      }
    }
    // The sum is whole; upstream's epilogue adds up the four threads of a row once more.
#pragma unroll
    for (int i = 0; i < size(softmax.row_sum); ++i) {
      softmax.row_sum(i) = threadIdx.x % 4 == 0 ? softmax.row_sum(i) : 0.f;
    }
    return false;
  }

 private:
  template <typename Params, typename Softmax>
  __device__ __forceinline__ static void write_row_maxima(const Params& params,
                                                          const Softmax& softmax) {
    const auto [bidb, bidh, m_block] = place_of<Traits::kBlockM>(params, read_cta());
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
    const int first = m_block * Traits::kBlockM + thread_row();
#pragma unroll
    for (int i = 0; i < size(softmax.row_max); ++i) {
      const int row = first + i / 2 * F::kRowStep + 8 * (i % 2);
      if (read_thread() % 4 == 0 && row < info.actual_seqlen_q) {
        write_row_max(params, info, bidb, bidh, row, softmax.row_max(i), softmax.row_sum(i));
      }
    }
  }
};

// Several CTAs share the row block, one per split (blockIdx.y); each leaves its part for the merge
// kernel.
template <typename Traits>
struct PartWalk {
  using F = Fragment<Traits>;
  static constexpr bool kWritesParts = true;
  static constexpr int kSharedBytes = 0;

  __device__ __forceinline__ explicit PartWalk(int) {}

  __device__ __forceinline__ static unsigned first_cta(const FwdParams& params) {
    return params.parts.first_cta;
  }

  template <typename Params>
  __device__ __forceinline__ static void limit(const Params& params, int& n_block_min,
                                               int& n_block_max) {
    const int first = blockIdx.y * params.tree.blocks_per_split;
    n_block_min = max(n_block_min, first);
    n_block_max = min(n_block_max, first + params.tree.blocks_per_split);
  }

  template <typename Params>
  __device__ __forceinline__ static int enter(const Params&, int lowest, int) {
    return lowest;
  }

  template <typename Params, typename Acc, typename Softmax>
  __device__ __forceinline__ bool leave(const Params& params, int, int, int&, Acc& acc,
                                        Softmax& softmax) const {
    sum_row<Traits>(softmax);
    const int thread = read_thread();
    const unsigned cta = read_cta();
    const auto [bidb, bidh, m_block] =
        place_of<Traits::kBlockM>(params, params.parts.first_cta + cta);
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
    const int rows = info.actual_seqlen_q - m_block * Traits::kBlockM;
    const int row = thread_row();
    const int64_t first =
        (static_cast<int64_t>(blockIdx.y) * params.parts.ctas + cta) * params.parts.rows + row;
#pragma unroll
    for (int mi = 0; mi < F::kMmaM; ++mi) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int down = mi * F::kRowStep + 8 * half;
        if (row + down < rows) {
          if (thread % 4 == 0) {
            params.parts.state[first + down] =
                make_float2(softmax.row_max(2 * mi + half), softmax.row_sum(2 * mi + half));
          }
          float2* const values =
              reinterpret_cast<float2*>(params.parts.acc + (first + down) * Traits::kHeadDim) +
              thread % 4;
#pragma unroll
          for (int nj = 0; nj < F::kMmaN; ++nj) {
            values[nj * 4] = make_float2(acc(2 * half, mi, nj), acc(2 * half + 1, mi, nj));
          }
        }
      }
    }
    return false;
  }
};

}  // namespace fad
