// The warpgroups that compute: each owns 64 keys of the block. Of each row block, scores and dP
// first, then dv, dq and dk; all sums run in the order of the sm80 family (docs/adr/0019).
#pragma once

#include <cmath>

#include "bwd_sums.cuh"
#include "bwd_tile.h"
#include "bwd_walk.h"
#include "sm90/fragment.h"
#include "sm90/wgmma.h"
#include "tree/softmax_steps.h"

namespace fad::sm90 {

// dS of one score: p is its weight, before it is rounded.
__device__ __forceinline__ float score_gradient(float p, float dp, float row_sum) {
  return __fmul_rn(p, __fsub_rn(dp, row_sum));
}

// Rows from `row` on of a tile become zeros: they belong to the next packed sequence, or to none,
// and may hold NaN. All computing threads.
template <int kRows, int kBoxes>
__device__ __forceinline__ void clear_rows(uint32_t tile, int row, int thread) {
  for (int at = row * 8 + thread; at < kRows * 8; at += 256) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      store_shared(tile + box * kRows * kBoxRowBytes + at * 16, make_float4(0.f, 0.f, 0.f, 0.f));
    }
  }
}

// Packed sequences: keys behind the end of this one become zeros.
template <typename T>
__device__ __forceinline__ void clear_keys(const BwdWork& work, uint32_t shared) {
  const int keys = work.seqlen_k - work.n_block * T::kKeys;
  if (keys < T::kKeys) {
    barrier_wait(shared + T::kVFull, 0);
    const int thread = read_thread() - 128;
    clear_rows<T::kKeys, T::kBoxes>(shared + T::kKAt, keys, thread);
    clear_rows<T::kKeys, T::kBoxes>(shared + T::kVAt, keys, thread);
    fence_async_proxy();
    named_barrier_sync(kConsumersMeet, T::kConsumers);
  }
}

// Hides keys from the rows of row block m_block that do not see them.
template <typename T>
__device__ __forceinline__ void hide_keys(const BwdParams& params, uint32_t shared, int m_block,
                                          float (&scores)[T::kRows / 2]) {
  const BwdWork work = read_bwd_work(shared + T::kWorkAt);
  const KeyFragment fragment = key_fragment<T>(work);
  const int first_row = m_block * T::kRows + work.seqlen_k - work.seqlen_q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = fragment.key + 8 * r - first_row - fragment.column;
    const int begin = key - params.window_size_right;
    const int end = fragment.key + 8 * r < fragment.end ? key + params.window_size_left : -1;
#pragma unroll
    for (int j = 2 * r; j < T::kRows / 2; j += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = j / 4 * 8 + i;
        if (row < begin || row > end) {
          scores[j + i] = -INFINITY;
        }
      }
    }
  }
}

// The row blocks all of whose rows see all keys of this warpgroup.
template <typename T>
__device__ __forceinline__ RowBlocks all_seeing(const BwdParams& params, const BwdWork& work,
                                                int group) {
  const int first_key = work.n_block * T::kKeys + group * T::kGroupKeys;
  if (first_key + T::kGroupKeys > work.seqlen_k) {
    return {0, 0};
  }
  const int first_row =
      first_key + T::kGroupKeys - 1 - params.window_size_right + work.seqlen_q - work.seqlen_k;
  const int last_row = first_key + params.window_size_left + work.seqlen_q - work.seqlen_k;
  return {num_blocks(max(first_row, 0), T::kRows), max(last_row + 1, 0) / T::kRows};
}

// One warpgroup with its registers: dk and dv of its keys.
template <typename T>
struct GradientConsumer {
  using Element = typename T::Element;
  static constexpr int kScores = T::kRows / 2;        // of a thread
  static constexpr int kGradients = T::kHeadDim / 2;  // of dk and dv each
  static constexpr int kBlocks = kChunkRows / T::kRows;
  static_assert(kBlocks < 256);

  const BwdParams& params;
  uint32_t shared;
  int group;
  int lane;
  int warp;  // of the warpgroup

  // Operands that stay where they are. Of K^T, 64 columns: a box.
  uint64_t k_rows, v_rows, k_columns;
  // This thread's places in dS (row lane % 8 of matrix lane / 8 of store_transposed, whose swizzle
  // is that of the copy engine) and in dq, whose rows of 256 bytes are swizzled by 32.
  uint32_t scores_at, dq_at;

  float dk[kGradients], dv[kGradients];
  uint32_t weights[kScores / 2], gradients[kScores / 2];  // P^T and dS^T, in 16 bit
  int number;                                             // of the leaf
  int ends;                                               // of its row blocks: see pack
  Ring ring;  // of Q, dO and numbers, and of the buffers of dS and dq

  __device__ __forceinline__ GradientConsumer(const BwdParams& params_, uint32_t shared_,
                                              int group_)
      : params(params_),
        shared(shared_),
        group(group_),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(~0u, threadIdx.x / 32 % 4, 0)) {}

  __device__ __forceinline__ void run() {
    start();
    k_rows = operand(shared + T::kKAt + group * T::kGroupKeys * kBoxRowBytes, 16);
    v_rows = operand(shared + T::kVAt + group * T::kGroupKeys * kBoxRowBytes, 16);
    k_columns = operand(shared + T::kKAt + (T::kSplitsRows ? 0 : group * T::kKeyBoxBytes), 16);
    scores_at = shared + T::kScoresAt + group * T::kScoreBoxBytes +
                (lane / 16 * 8 + lane % 8) * kBoxRowBytes +
                ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
    dq_at = shared + T::kDqAt +
            T::dq_at((T::kSplitsRows ? 64 * group : 0) + 16 * warp + lane / 4,
                     T::kSplitsRows ? 0 : 64 * group) +
            lane % 4 * 8;
#pragma unroll 1
    for (number = 0;; ++number) {
      int block;
      {
        const Leaf leaf = leaf_of<T>(params, shared + T::kWorkAt, number);
        if (leaf.rows.begin >= leaf.rows.end) {
          break;
        }
        if (params.cu_seqlens_q != nullptr) {
          clear_tail(leaf.rows.end - 1);
        }
        pack(leaf);
        block = leaf.rows.end - 1 - leaf.chunk * kBlocks;
      }
#pragma unroll 1
      for (; block >= (ends & 0xff); --block) {
        add_row_block(block);
      }
      finish_leaf(leaf_of<T>(params, shared + T::kWorkAt, number));
    }
    if (params.slots != nullptr) {
      named_barrier_sync(kConsumersMeet, T::kConsumers);
      if (read_thread() == 128) {
        free_slot(params, load_shared_word(shared + T::kSlotAt));
      }
    }
  }

 private:
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kGradients; ++i) {
      dk[i] = dv[i] = 0.f;
    }
    barrier_wait(shared + T::kKFull, 0);
    const BwdWork work = read_bwd_work(shared + T::kWorkAt);
    if (params.cu_seqlens_k != nullptr) {
      clear_keys<T>(work, shared);
    }
  }

  // Packed sequences: rows behind the end of this one, in the first row block of a leaf, become
  // zeros.
  __device__ __forceinline__ void clear_tail(int m_block) const {
    const int rows = read_bwd_work(shared + T::kWorkAt).seqlen_q - m_block * T::kRows;
    if (rows < T::kRows) {
      barrier_wait(shared + T::kQFull + 8 * ring.slot, ring.parity);
      barrier_wait(shared + T::kDoFull + 8 * ring.slot, ring.parity);
      const int thread = read_thread() - 128;
      clear_rows<T::kRows, T::kBoxes>(shared + T::kQAt + ring.slot * T::kRowBytes, rows, thread);
      clear_rows<T::kRows, T::kBoxes>(shared + T::kDoAt + ring.slot * T::kRowBytes, rows, thread);
      fence_async_proxy();
      named_barrier_sync(kConsumersMeet, T::kConsumers);
    }
  }

  // The first row block of the leaf, and those all of whose rows see all keys of this warpgroup,
  // counted from the chunk's first one: in one register.
  __device__ __forceinline__ void pack(const Leaf& leaf) {
    const BwdWork work = read_bwd_work(shared + T::kWorkAt);
    const RowBlocks seeing = all_seeing<T>(params, work, group);
    const auto place = [&](int m_block) {
      return max(0, min(m_block - leaf.chunk * kBlocks, kBlocks));
    };
    ends = place(leaf.rows.begin) | place(seeing.begin) << 8 | place(seeing.end) << 16;
  }

  __device__ __forceinline__ void add_row_block(int block) {
    const uint32_t q_tile = shared + T::kQAt + ring.slot * T::kRowBytes;
    const uint32_t do_tile = shared + T::kDoAt + ring.slot * T::kRowBytes;
    const uint32_t numbers = shared + T::kNumbersAt + ring.slot * T::kNumberBytes + lane % 4 * 8;

    float scores[kScores], dp[kScores];
    barrier_wait(shared + T::kQFull + 8 * ring.slot, ring.parity);
    issue_keys_by_rows(k_rows, q_tile, scores);
    barrier_wait(shared + T::kVFull, 0);
    barrier_wait(shared + T::kDoFull + 8 * ring.slot, ring.parity);
    issue_keys_by_rows(v_rows, do_tile, dp);
    barrier_wait(shared + T::kNumbersFull + 8 * ring.slot, ring.parity);
    wgmma_wait<1>();
    hold(scores);

    if (block < (ends >> 8 & 0xff) || block >= ends >> 16) {
      const int chunk = leaf_of<T>(params, shared + T::kWorkAt, number).chunk;
      hide_keys<T>(params, shared, chunk * kBlocks + block, scores);
    }
    exponentiate(numbers, scores);
    if constexpr (T::kDvBesideScores) {
      issue_dv(do_tile, scores);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    hold(dp);
    find_score_gradients(numbers, scores, dp);
    if constexpr (!T::kDvBesideScores) {
      issue_dv(do_tile, scores);
    }
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      store_transposed(scores_at + ring.slot * T::kScoreBytes + i * 16 * kBoxRowBytes,
                       gradients + 4 * i);
    }
    fence_async_proxy();
    named_barrier_sync(kConsumersMeet, T::kConsumers);

    float dq[32];
    issue_dq_and_dk(q_tile, dq);
    wgmma_wait<1>();
    hold(dv);
    hold(weights);
    hold(dq);
    if (lane == 0) {
      barrier_arrive(shared + T::kDoEmpty + 8 * ring.slot);
    }
    hand_over(dq);
    wgmma_wait<0>();
    hold(dk);
    hold(gradients);
    barrier_arrive(shared + T::kQEmpty + 8 * ring.slot);
    ring.advance(T::kStages);
  }

  // K Q^T or V dO^T.
  __device__ __forceinline__ void issue_keys_by_rows(uint64_t keys, uint32_t tile,
                                                     float (&product)[kScores]) const {
    hold(product);
    wgmma_fence();
    const uint64_t rows = operand(tile, 16);
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 16; ++i) {
      const int in_box = i % 4 * kOperandColumns16;
      SharedProduct<Element, T::kRows>::issue(
          product, keys + (i / 4 * T::kKeyBoxBytes / 16 + in_box),
          rows + (i / 4 * T::kRowBoxBytes / 16 + in_box), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void exponentiate(uint32_t numbers, float (&scores)[kScores]) const {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 scaled = load_shared_pair(numbers + 32 * j);
      float* const s = scores + 4 * j;
      s[0] = scaled_exp2(s[0], params.scale_softmax_log2, scaled.x);
      s[1] = scaled_exp2(s[1], params.scale_softmax_log2, scaled.y);
      s[2] = scaled_exp2(s[2], params.scale_softmax_log2, scaled.x);
      s[3] = scaled_exp2(s[3], params.scale_softmax_log2, scaled.y);
    }
  }

  // dv += P^T dO
  __device__ __forceinline__ void issue_dv(uint32_t do_tile, const float (&scores)[kScores]) {
#pragma unroll
    for (int j = 0; j < kScores / 2; ++j) {
      weights[j] = packed<Element>(scores[2 * j], scores[2 * j + 1]);
    }
    hold(weights);
    hold(dv);
    wgmma_fence();
    const uint64_t do_columns = operand(do_tile, T::kRowBoxBytes);
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      RegisterProduct<Element, T::kHeadDim>::issue(dv, weights + 4 * i,
                                                   do_columns + i * kOperandRows16, true);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void find_score_gradients(uint32_t numbers,
                                                       const float (&scores)[kScores],
                                                       const float (&dp)[kScores]) {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 sums = load_shared_pair(numbers + 4 * T::kRows + 32 * j);
      const float* const s = scores + 4 * j;
      const float* const d = dp + 4 * j;
      gradients[2 * j] =
          packed<Element>(score_gradient(s[0], d[0], sums.x), score_gradient(s[1], d[1], sums.y));
      gradients[2 * j + 1] =
          packed<Element>(score_gradient(s[2], d[2], sums.x), score_gradient(s[3], d[3], sums.y));
    }
  }

  // This warpgroup's part of dq = dS K, and dk += dS^T Q.
  __device__ __forceinline__ void issue_dq_and_dk(uint32_t q_tile, float (&dq)[32]) {
    hold(gradients);
    hold(dq);
    hold(dk);
    wgmma_fence();
    const uint64_t ds_rows = operand(shared + T::kScoresAt + ring.slot * T::kScoreBytes +
                                         (T::kSplitsRows ? group * 64 * kBoxRowBytes : 0),
                                     16);
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i) {
      SharedPlainProduct<Element, 64>::issue(
          dq, ds_rows + (i / 4 * T::kScoreBoxBytes / 16 + i % 4 * kOperandColumns16),
          k_columns + i * kOperandRows16, i > 0);
    }
    wgmma_commit();
    const uint64_t q_columns = operand(q_tile, T::kRowBoxBytes);
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      RegisterProduct<Element, T::kHeadDim>::issue(dk, gradients + 4 * i,
                                                   q_columns + i * kOperandRows16, true);
    }
    wgmma_commit();
  }

  // dq goes to shared memory, for the thread that adds it.
  __device__ __forceinline__ void hand_over(const float (&dq)[32]) const {
    barrier_wait(shared + T::kDqEmpty + 8 * ring.slot, ring.parity ^ 1);
    const uint32_t part = dq_at + ring.slot * T::kDqBytes;
    const int row_bytes = T::dq_row_bytes(group);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (T::dq_row_bytes(1) == 256 || 32 * j < row_bytes) {
        const uint32_t to = part ^ (32 * j);
        store_shared(to, make_float2(dq[4 * j], dq[4 * j + 1]));
        store_shared(to + 8 * row_bytes, make_float2(dq[4 * j + 2], dq[4 * j + 3]));
      }
    }
    fence_async_proxy();
    barrier_arrive(shared + T::kDqFull + 8 * ring.slot);
  }

  // A leaf has been added up: adds it to others, keeps it for later, or ends the part.
  __device__ __forceinline__ void finish_leaf(const Leaf& leaf) {
    const BwdWork work = read_bwd_work(shared + T::kWorkAt);
    const Chunks chunks = chunks_of(params, row_blocks<T>(params, work), T::kRows);
    const int slot = static_cast<int>(load_shared_word(shared + T::kSlotAt));
    const int heads = heads_in_order(params), head = leaf.head % heads;
    const bool passes_on = params.parts.chained > 0;
    const auto add = [&](int which) {
      if (passes_on && which == 0) {
        if (read_thread() == 128) {
          wait_for(heads_added(params, slot, leaf.chunk), head);
        }
        named_barrier_sync(kConsumersMeet, T::kConsumers);
      }
      const float4* const sums = kept<T>(params, slot, which, leaf.chunk);
      add_kept<T>(sums, dk);
      add_kept<T>(sums + kGradients / 4 * T::kConsumers, dv);
    };
    const auto keep_both = [&](int which) {
      float4* const sums = kept<T>(params, slot, which, leaf.chunk);
      keep<T>(sums, dk);
      keep<T>(sums + kGradients / 4 * T::kConsumers, dv);
      if (passes_on && which == 0) {
        named_barrier_sync(kConsumersMeet, T::kConsumers);
        if (read_thread() == 128) {
          store_release(heads_added(params, slot, leaf.chunk), head + 1);
        }
      }
    };
    if (climb(chunks, leaf.chunk % params.parts.chunks, head, heads, add, keep_both)) {
      finish(work);
    }
  }

  __device__ __forceinline__ void finish(const BwdWork& work) {
    const KeyFragment fragment = key_fragment<T>(work);
    if (params.dk_sums != nullptr) {
      write_sums(params, work, fragment, params.dk_sums, dk);
      write_sums(params, work, fragment, params.dv_sums, dv);
      return;
    }
#pragma unroll
    for (int i = 0; i < kGradients; ++i) {
      dk[i] = __fmul_rn(positive_zero(dk[i]), params.scale_softmax_rp_dropout);
      dv[i] = positive_zero(dv[i]);
    }
    write_gradient(gradient_rows<Element>(params, work, params.dk_ptr, params.dk_batch_stride,
                                          params.dk_row_stride, params.dk_head_stride),
                   params.dk_row_stride, fragment, params.d, dk);
    write_gradient(gradient_rows<Element>(params, work, params.dv_ptr, params.dv_batch_stride,
                                          params.dv_row_stride, params.dv_head_stride),
                   params.dv_row_stride, fragment, params.d, dv);
  }
};

template <typename T>
__device__ __forceinline__ void compute_gradients(const BwdParams& params, uint32_t shared,
                                                  int group) {
  GradientConsumer<T>(params, shared, group).run();
}

}  // namespace fad::sm90
