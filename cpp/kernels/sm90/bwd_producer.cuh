// The warps that feed the computing ones: one thread loads K, V, Q and dO, one warp two numbers for
// each row.
#pragma once

#include <cmath>

#include "../tree/softmax_steps.h"
#include "bwd_tile.h"
#include "bwd_walk.h"
#include "tma.h"

namespace fad::sm90 {

// One thread.
template <typename T>
__device__ __forceinline__ void load_tensors(const BwdParams& params, const CUtensorMap& q_map,
                                             const CUtensorMap& k_map, const CUtensorMap& v_map,
                                             const CUtensorMap& do_map, uint32_t shared) {
  const auto load = [&](const CUtensorMap& map, uint32_t to, uint32_t full, int box_bytes, int head,
                        int row, int batch) {
    barrier_expect(full, T::kBoxes * box_bytes);
#pragma unroll
    for (int box = 0; box < T::kBoxes; ++box) {
      load_box(to + box * box_bytes, map, full, box * kBoxColumns, head, row, batch);
    }
  };
  const BwdWork work = read_bwd_work(shared + T::kWorkAt);
  const auto [begin, end] = row_blocks<T>(params, work);
  const int q_batch = params.cu_seqlens_q == nullptr ? work.bidb : 0;
  const int k_batch = params.cu_seqlens_k == nullptr ? work.bidb : 0;
  const int k_row = work.k_row + work.n_block * T::kKeys;
  const int k_head = work.bidh / params.h_h_k_ratio;

  load(k_map, shared + T::kKAt, shared + T::kKFull, T::kKeyBoxBytes, k_head, k_row, k_batch);
  Ring ring;
#pragma unroll 1
  for (int m_block = end - 1; m_block >= begin; --m_block) {
    const int row = work.q_row + m_block * T::kRows;
    barrier_wait(shared + T::kQEmpty + 8 * ring.slot, ring.parity ^ 1);
    load(q_map, shared + T::kQAt + ring.slot * T::kRowBytes, shared + T::kQFull + 8 * ring.slot,
         T::kRowBoxBytes, work.bidh, row, q_batch);
    if (m_block == end - 1) {
      load(v_map, shared + T::kVAt, shared + T::kVFull, T::kKeyBoxBytes, k_head, k_row, k_batch);
    }
    barrier_wait(shared + T::kDoEmpty + 8 * ring.slot, ring.parity ^ 1);
    load(do_map, shared + T::kDoAt + ring.slot * T::kRowBytes, shared + T::kDoFull + 8 * ring.slot,
         T::kRowBoxBytes, work.bidh, row, q_batch);
    ring.advance(T::kStages);
  }
}

// One warp. Of each row: its logarithm of the sum of exponentials, scaled for exp2, and its
// rowsum(dout * out). Rows behind the end get weights of 0.
template <typename T>
__device__ __forceinline__ void load_numbers(const BwdParams& params, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  const BwdWork work = read_bwd_work(shared + T::kWorkAt);
  const auto [begin, end] = row_blocks<T>(params, work);
  const float* const lse =
      static_cast<const float*>(params.softmax_lse_ptr) +
      (params.unpadded_lse
           ? static_cast<int64_t>(work.bidh) * params.total_q + work.q_row
           : (static_cast<int64_t>(work.bidb) * params.h + work.bidh) * params.seqlen_q);
  const float* const row_sums = static_cast<const float*>(params.dsoftmax_sum) +
                                sum_rows_before(params, work.q_row, work.bidb, work.bidh);
  Ring ring;
#pragma unroll 1
  for (int m_block = end - 1; m_block >= begin; --m_block) {
    float scaled[T::kRows / 32], sums[T::kRows / 32];
#pragma unroll
    for (int i = 0; i < T::kRows / 32; ++i) {
      const int row = m_block * T::kRows + 32 * i + lane;
      const bool inside = row < work.seqlen_q;
      scaled[i] = inside ? lse[row] : INFINITY;
      sums[i] = inside ? row_sums[row] : 0.f;
    }
    const uint32_t to = shared + T::kNumbersAt + ring.slot * T::kNumberBytes + 4 * lane;
    barrier_wait(shared + T::kQEmpty + 8 * ring.slot, ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < T::kRows / 32; ++i) {
      // The maximum that scores are taken against, in upstream's backward.
      store_shared(to + 128 * i, scaled[i] == -INFINITY
                                     ? 0.f
                                     : scaled_max(scaled[i], static_cast<float>(M_LOG2E)));
      store_shared(to + 4 * T::kRows + 128 * i, sums[i]);
    }
    barrier_arrive(shared + T::kNumbersFull + 8 * ring.slot);
    ring.advance(T::kStages);
  }
}

}  // namespace fad::sm90
