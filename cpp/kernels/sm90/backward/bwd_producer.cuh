// The warp that feeds the computing ones: one thread loads K, V, Q and dO by TMA, all of them two
// numbers for each row.
#pragma once

#include <cmath>
#include <type_traits>

#include "bwd_tile.h"
#include "bwd_walk.h"
#include "sm90/tma.h"
#include "tree/softmax_steps.h"

namespace fad::sm90 {

// Of each row of a row block: its logarithm of the sum of exponentials, scaled for exp2, and its
// rowsum(dout * out). Rows behind the end get weights of 0.
template <typename T>
__device__ __forceinline__ void load_numbers(const BwdParams& params, uint32_t shared, int head,
                                             int m_block, int slot) {
  const BwdWork work = read_bwd_work(shared + T::kWorkAt);
  const int first_row = m_block * T::kRows + threadIdx.x % 32;
  const uint32_t to = shared + T::kNumbersAt + slot * T::kNumberBytes + threadIdx.x % 32 * 4;
  const float* const lse =
      static_cast<const float*>(params.softmax_lse_ptr) + first_row +
      (params.unpadded_lse ? static_cast<int64_t>(head) * params.total_q + work.q_row
                           : (static_cast<int64_t>(work.bidb) * params.h + head) * params.seqlen_q);
  const float* const row_sums = static_cast<const float*>(params.dsoftmax_sum) + first_row +
                                sum_rows_before(params, work.q_row, work.bidb, head);
  float scaled[T::kRows / 32], sums[T::kRows / 32];
#pragma unroll
  for (int i = 0; i < T::kRows / 32; ++i) {
    const bool inside = first_row + 32 * i < work.seqlen_q;
    scaled[i] = inside ? lse[32 * i] : INFINITY;
    sums[i] = inside ? row_sums[32 * i] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < T::kRows / 32; ++i) {
    // The maximum that scores are taken against, in upstream's backward.
    store_shared(to + 128 * i,
                 scaled[i] == -INFINITY ? 0.f : scaled_max(scaled[i], static_cast<float>(M_LOG2E)));
    store_shared(to + 4 * T::kRows + 128 * i, sums[i]);
  }
  barrier_arrive(shared + T::kNumbersFull + 8 * slot);
}

// One warp: every thread stores numbers, the first one loads tensors.
template <typename T>
__device__ __forceinline__ void load_inputs(const BwdParams& params, const CUtensorMap& q_map,
                                            const CUtensorMap& k_map, const CUtensorMap& v_map,
                                            const CUtensorMap& do_map, uint32_t shared) {
  // boxes: a constant, of which there is one for each width.
  const auto load = [&](auto boxes, const CUtensorMap& map, uint32_t to, uint32_t full,
                        int box_bytes, int head, int row, int batch) {
    if (threadIdx.x == 0) {
      barrier_expect(full, boxes * box_bytes);
#pragma unroll
      for (int box = 0; box < boxes; ++box) {
        load_box(to + box * box_bytes, map, full, box * kBoxColumns, head, row, batch);
      }
    }
  };
  const auto load_rows = [&](auto boxes, const CUtensorMap& map, uint32_t to, uint32_t full,
                             int head, int m_block) {
    const BwdWork work = read_bwd_work(shared + T::kWorkAt);  // read again: saves registers
    load(boxes, map, to, full, T::kRowBoxBytes, head, work.q_row + m_block * T::kRows,
         params.cu_seqlens_q == nullptr ? work.bidb : 0);
  };
  const auto load_keys = [&](auto boxes, const CUtensorMap& map, uint32_t to, uint32_t full) {
    const BwdWork work = read_bwd_work(shared + T::kWorkAt);
    load(boxes, map, to, full, T::kKeyBoxBytes, work.head_k, work.k_row + work.n_block * T::kKeys,
         params.cu_seqlens_k == nullptr ? work.bidb : 0);
  };
  const std::integral_constant<int, T::kBoxes> boxes;
  const std::integral_constant<int, T::kValueBoxes> value_boxes;
  load_keys(boxes, k_map, shared + T::kKAt, shared + T::kKFull);
  bool first = true;
  Ring ring;
#pragma unroll 1
  for (int number = 0;; ++number) {
    const auto [chunk, head, blocks] = leaf_of<T>(params, shared + T::kWorkAt, number);
    if (blocks.begin >= blocks.end) {
      break;
    }
#pragma unroll 1
    for (int m_block = blocks.end - 1; m_block >= blocks.begin; --m_block) {
      barrier_wait(shared + T::kQEmpty + 8 * ring.slot, ring.parity ^ 1);
      load_rows(boxes, q_map, shared + T::kQAt + ring.slot * T::kRowBytes,
                shared + T::kQFull + 8 * ring.slot, head, m_block);
      if (first) {
        load_keys(value_boxes, v_map, shared + T::kVAt, shared + T::kVFull);
        first = false;
      }
      // With one stage of dO, the ring of two counts its phases.
      const int do_slot = T::kDoStages == 1 ? 0 : ring.slot;
      const uint32_t do_parity = T::kDoStages == 1 ? ring.slot : ring.parity;
      barrier_wait(shared + T::kDoEmpty + 8 * do_slot, do_parity ^ 1);
      load_rows(value_boxes, do_map, shared + T::kDoAt + do_slot * T::kDoBytes,
                shared + T::kDoFull + 8 * do_slot, head, m_block);
      load_numbers<T>(params, shared, head, m_block, ring.slot);
      ring.advance(T::kStages);
    }
  }
}

}  // namespace fad::sm90
