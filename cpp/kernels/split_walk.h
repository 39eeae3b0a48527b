// How a CTA goes over the splits of its row block. Patches call these hooks from upstream's kernel:
//
//   limit       which key blocks are this CTA's
//   enter       the next split, from the last one down
//   needs_masks whether some key of the split's last blocks is hidden from some row
//   leave       the split is done; says whether there is another one
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"  // upstream
#include "softmax.h"     // upstream
#include "split_state.h"

namespace fad {

// Which row block a CTA works on. One-dimensional grid: y and z stop at 65535, and a batch may be
// larger. The row blocks of one head stay neighbours, so that they find its K and V in L2.
struct Place {
  int bidb, bidh, m_block;
};

template <typename Traits, typename Params>
__device__ __forceinline__ Place place_of(const Params& params, int cta) {
  const int num_m_blocks = (params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  const int head = cta / num_m_blocks;
  const int bidb = head / params.h;
  // Causal row blocks near the end have the most keys: start them first.
  return {bidb, head - bidb * params.h, num_m_blocks - 1 - (cta - head * num_m_blocks)};
}

// The thread's and the CTA's index, read anew where this stands: what only the end of a split needs
// must not sit in registers during the loop over key blocks, which costs up to a tenth of the time.
__device__ __forceinline__ int read_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ int read_cta() {
  int cta;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  return cta;
}

// Where this thread's part of a row block lies: the MMA gives it two rows of every 16, and of each
// row two neighbouring columns of every eight.
template <typename Traits>
struct Fragment {
  static constexpr int kMmaM = Traits::kBlockM / (16 * Traits::kNWarps);
  static constexpr int kMmaN = Traits::kHeadDim / 8;
  static constexpr int kRowStep = 16 * Traits::kNWarps;
};

template <typename Traits>
__device__ __forceinline__ void sum_row(FLASH_NAMESPACE::Softmax<2 * Fragment<Traits>::kMmaM>& s) {
  FLASH_NAMESPACE::SumOp<float> sum;
  FLASH_NAMESPACE::quad_allreduce_(s.row_sum, s.row_sum, sum);
}

template <typename Traits, typename Info>
__device__ __forceinline__ bool hides_keys(const Info& info, int m_block, int n_block_max,
                                           bool causal) {
  const int first_row_end =
      causal ? m_block * Traits::kBlockM + 1 + info.actual_seqlen_k - info.actual_seqlen_q
             : info.actual_seqlen_k;
  return n_block_max * Traits::kBlockN > min(first_row_end, info.actual_seqlen_k);
}

// One CTA owns the row block and walks all of its splits. While it works on one, the state of the
// later ones waits: half of the accumulator in shared memory, the other half in the CTA's own rows
// of the output, which are written last (fp32 state is twice the size of a 16-bit output).
template <typename Traits>
struct OwnerWalk {
  using F = Fragment<Traits>;
  static constexpr bool kWritesParts = false;
  static constexpr int kInShared = F::kMmaN / 2;
  static constexpr int kSharedBytes =
      F::kMmaM * (kInShared + 1) * sizeof(float4) * Traits::kNThreads;

  const int highest;  // end of the last split

  __device__ __forceinline__ explicit OwnerWalk(int n_block_max) : highest(n_block_max) {}

  template <typename Params>
  __device__ __forceinline__ static void limit(const Params&, int&, int&) {}

  template <typename Params>
  __device__ __forceinline__ static int enter(const Params& params, int lowest, int n_block_max) {
    return max(lowest, (n_block_max - 1) / params.split_blocks * params.split_blocks);
  }

  template <typename Params, typename Acc, typename Softmax>
  __device__ __forceinline__ bool leave(const Params& params, int lowest, int n_block_min,
                                        int& n_block_max, Acc& acc, Softmax& softmax) const {
    sum_row<Traits>(softmax);
    const bool has_later = n_block_max != highest;
    const bool has_earlier = n_block_min > lowest;
    if (has_later && has_earlier) {
      Registers registers;
#pragma unroll
      for (int mi = 0; mi < F::kMmaM; ++mi) {
        registers.state[mi] = make_float4(softmax.row_max(2 * mi), softmax.row_sum(2 * mi),
                                          softmax.row_max(2 * mi + 1), softmax.row_sum(2 * mi + 1));
#pragma unroll
        for (int nj = 0; nj < F::kMmaN; ++nj) {
          registers.acc[mi][nj] =
              make_float4(acc(0, mi, nj), acc(1, mi, nj), acc(2, mi, nj), acc(3, mi, nj));
        }
      }
      merge_and_leave(params, registers);
    } else if (has_earlier) {
      const Waiting waiting(params);
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
    } else if (has_later) {
      const Waiting waiting(params);
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
      n_block_max = n_block_min;
      return true;
    }
    // The sum is whole; upstream's epilogue adds up the four threads of a row once more.
#pragma unroll
    for (int i = 0; i < size(softmax.row_sum); ++i) {
      softmax.row_sum(i) = threadIdx.x % 4 == 0 ? softmax.row_sum(i) : 0.f;
    }
    return false;
  }

 private:
  // A thread's part of the row block, on its way through memory.
  struct Registers {
    float4 state[F::kMmaM];  // row maximum and sum, of the upper and of the lower row
    float4 acc[F::kMmaM][F::kMmaN];
  };

  // Where this thread's state waits. Indices are read anew: see read_thread.
  struct Waiting {
    float4* shared;
    char* out;
    int64_t row_bytes;
    int rows;

    template <typename Params>
    __device__ __forceinline__ explicit Waiting(const Params& params) {
      extern __shared__ char smem[];
      const int thread = read_thread();
      const auto [bidb, bidh, m_block] = place_of<Traits>(params, read_cta());
      const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
      const int row = m_block * Traits::kBlockM + thread / 32 * 16 + thread % 32 / 4;
      shared = reinterpret_cast<float4*>(smem + Traits::kSmemSize) + thread;
      rows = info.actual_seqlen_q - row;
      row_bytes = params.o_row_stride * 2;
      out = static_cast<char*>(params.o_ptr) + thread % 4 * sizeof(float2) + row * row_bytes +
            2 * (info.q_offset(params.o_batch_stride, params.o_row_stride, bidb) +
                 bidh * params.o_head_stride);
    }

    __device__ __forceinline__ float4& slot(int mi, int nj) const {
      return shared[(mi * (kInShared + 1) + nj) * Traits::kNThreads];
    }

    __device__ __forceinline__ float4& state(int mi) const { return slot(mi, kInShared); }

    template <typename Params>
    __device__ __forceinline__ static bool in_out(const Params& params, int nj) {
      return nj >= kInShared && (Traits::kEvenHeadDim || nj < params.d / 8);
    }

    __device__ __forceinline__ float2* pair(int mi, int half, int nj) const {
      return reinterpret_cast<float2*>(out + (mi * F::kRowStep + 8 * half) * row_bytes +
                                       (nj - kInShared) * 32);
    }

    template <typename Params>
    __device__ __forceinline__ void store(const Params& params, int mi, int nj,
                                          float4 value) const {
      if (nj < kInShared) {
        slot(mi, nj) = value;
      } else if (in_out(params, nj)) {
        if (mi * F::kRowStep < rows) {
          *pair(mi, 0, nj) = make_float2(value.x, value.y);
        }
        if (mi * F::kRowStep + 8 < rows) {
          *pair(mi, 1, nj) = make_float2(value.z, value.w);
        }
      }
    }

    template <typename Params>
    __device__ __forceinline__ float4 load(const Params& params, int mi, int nj) const {
      float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
      if (nj < kInShared) {
        value = slot(mi, nj);
      } else if (in_out(params, nj)) {
        if (mi * F::kRowStep < rows) {
          const float2 upper = *pair(mi, 0, nj);
          value.x = upper.x;
          value.y = upper.y;
        }
        if (mi * F::kRowStep + 8 < rows) {
          const float2 lower = *pair(mi, 1, nj);
          value.z = lower.x;
          value.w = lower.y;
        }
      }
      return value;
    }
  };

  // Merges the waiting state of the later splits into this split's, and leaves the result for the
  // earlier ones. Not inlined: its registers must not compete with those of the loop over key
  // blocks, which has none to spare.
  template <typename Params>
  __device__ __noinline__ static void merge_and_leave(const Params& params,
                                                      const Registers& registers) {
    const Waiting waiting(params);
    // From the output's rows all at once: as far as the compiler knows, a store may change what the
    // next load reads, and each of these takes as long as a good part of a block.
    float4 far[F::kMmaM][F::kMmaN - kInShared];
#pragma unroll
    for (int mi = 0; mi < F::kMmaM; ++mi) {
#pragma unroll
      for (int nj = kInShared; nj < F::kMmaN; ++nj) {
        far[mi][nj - kInShared] = waiting.load(params, mi, nj);
      }
    }
#pragma unroll
    for (int mi = 0; mi < F::kMmaM; ++mi) {
      const float4 later = waiting.state(mi);
      float4 state = registers.state[mi];
      const MergeWeights upper =
          merge_state(later.x, later.y, state.x, state.y, params.scale_softmax_log2);
      const MergeWeights lower =
          merge_state(later.z, later.w, state.z, state.w, params.scale_softmax_log2);
      waiting.state(mi) = state;
#pragma unroll
      for (int nj = 0; nj < F::kMmaN; ++nj) {
        const float4 value =
            nj < kInShared ? waiting.load(params, mi, nj) : far[mi][nj - kInShared];
        const float4 here = registers.acc[mi][nj];
        waiting.store(params, mi, nj,
                      make_float4(merge_value(value.x, upper.later, here.x, upper.earlier),
                                  merge_value(value.y, upper.later, here.y, upper.earlier),
                                  merge_value(value.z, lower.later, here.z, lower.earlier),
                                  merge_value(value.w, lower.later, here.w, lower.earlier)));
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

  template <typename Params>
  __device__ __forceinline__ static void limit(const Params& params, int& n_block_min,
                                               int& n_block_max) {
    const int first = blockIdx.y * params.split_blocks;
    n_block_min = max(n_block_min, first);
    n_block_max = min(n_block_max, first + params.split_blocks);
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
    const auto [bidb, bidh, m_block] = place_of<Traits>(params, read_cta());
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
    const int row = m_block * Traits::kBlockM + thread / 32 * 16 + thread % 32 / 4;
    const int64_t first =
        ((static_cast<int64_t>(blockIdx.y) * params.b + bidb) * params.h + bidh) * params.seqlen_q +
        row;
#pragma unroll
    for (int mi = 0; mi < F::kMmaM; ++mi) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int down = mi * F::kRowStep + 8 * half;
        if (row + down < info.actual_seqlen_q) {
          if (thread % 4 == 0) {
            params.part_state[first + down] =
                make_float2(softmax.row_max(2 * mi + half), softmax.row_sum(2 * mi + half));
          }
          float2* const values =
              reinterpret_cast<float2*>(params.part_acc + (first + down) * Traits::kHeadDim) +
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
