// What the computing warpgroups of every tile do: walk the leaves of a part, the products, the end.
// All sums run in the order of the sm80 family (docs/adr/0019).
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
    clear_rows<T::kKeys, T::kValueBoxes>(shared + T::kVAt, keys, thread);
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

// One warpgroup with its registers. Own: what it does with a row block, and the sums that it has of
// its keys; the first K and V arrive before `start`.
template <typename T, typename Own>
struct RowBlockWalk {
  using Element = typename T::Element;
  static constexpr int kScores = T::kRows / 2;  // of a thread
  static constexpr int kBlocks = kChunkRows / T::kRows;
  static_assert(kBlocks < 256);

  const BwdParams& params;
  uint32_t shared;
  int group;
  int lane;
  int warp;    // of the warpgroup
  int number;  // of the leaf
  int ends;    // of its row blocks: see pack
  Ring ring;   // of Q, dO and numbers, and of the buffers of dS and dq

  __device__ __forceinline__ RowBlockWalk(const BwdParams& params_, uint32_t shared_, int group_)
      : params(params_),
        shared(shared_),
        group(group_),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(~0u, threadIdx.x / 32 % 4, 0)) {}

  __device__ __forceinline__ void run() {
    own().clear_sums();
    barrier_wait(shared + T::kKFull, 0);
    if (params.cu_seqlens_k != nullptr) {
      clear_keys<T>(read_bwd_work(shared + T::kWorkAt), shared);
    }
    own().start();
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
        own().add_row_block(block);
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

 protected:
  __device__ __forceinline__ Own& own() { return static_cast<Own&>(*this); }

  // Where dO of a row block is. With one stage, a ring of two counts its phases.
  __device__ __forceinline__ int do_slot() const { return T::kDoStages == 1 ? 0 : ring.slot; }
  __device__ __forceinline__ uint32_t do_parity() const {
    return T::kDoStages == 1 ? ring.slot : ring.parity;
  }
  __device__ __forceinline__ uint32_t do_full() const {
    return shared + T::kDoFull + 8 * do_slot();
  }
  __device__ __forceinline__ uint32_t do_empty() const {
    return shared + T::kDoEmpty + 8 * do_slot();
  }
  __device__ __forceinline__ uint32_t do_tile() const {
    return shared + T::kDoAt + do_slot() * T::kDoBytes;
  }

  // Packed sequences: rows behind the end of this one, in the first row block of a leaf, become
  // zeros.
  __device__ __forceinline__ void clear_tail(int m_block) const {
    const int rows = read_bwd_work(shared + T::kWorkAt).seqlen_q - m_block * T::kRows;
    if (rows < T::kRows) {
      barrier_wait(shared + T::kQFull + 8 * ring.slot, ring.parity);
      barrier_wait(do_full(), do_parity());
      const int thread = read_thread() - 128;
      clear_rows<T::kRows, T::kBoxes>(shared + T::kQAt + ring.slot * T::kRowBytes, rows, thread);
      clear_rows<T::kRows, T::kValueBoxes>(do_tile(), rows, thread);
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

  // K Q^T or V dO^T.
  template <int kHeadDim>
  __device__ __forceinline__ void issue_keys_by_rows(uint64_t keys, uint32_t tile,
                                                     float (&product)[kScores]) const {
    hold(product);
    wgmma_fence();
    const uint64_t rows = operand(tile, 16);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
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

  // Scores of keys that rows do not see.
  __device__ __forceinline__ void hide(int block, float (&scores)[kScores]) const {
    if (block < (ends >> 8 & 0xff) || block >= ends >> 16) {
      const int chunk = leaf_of<T>(params, shared + T::kWorkAt, number).chunk;
      hide_keys<T>(params, shared, chunk * kBlocks + block, scores);
    }
  }

  // dv += P^T dO, or dk += dS^T Q: a group of its own.
  template <int kCount>
  __device__ __forceinline__ void issue_sums(float (&sums)[kCount],
                                             const uint32_t (&keys)[kScores / 2],
                                             uint32_t tile) const {
    const uint64_t columns = operand(tile, T::kRowBoxBytes);
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      RegisterProduct<Element, 2 * kCount>::issue(sums, keys + 4 * i, columns + i * kOperandRows16,
                                                  true);
    }
    wgmma_commit();
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
      own().add_sums(kept<T>(params, slot, which, leaf.chunk));
    };
    const auto keep = [&](int which) {
      own().keep_sums(kept<T>(params, slot, which, leaf.chunk));
      if (passes_on && which == 0) {
        named_barrier_sync(kConsumersMeet, T::kConsumers);
        if (read_thread() == 128) {
          store_release(heads_added(params, slot, leaf.chunk), head + 1);
        }
      }
    };
    if (climb(chunks, leaf.chunk % params.parts.chunks, head, heads, add, keep)) {
      own().finish(work);
    }
  }
};

}  // namespace fad::sm90
