// The threads that add dq of row blocks to their sums, in deterministic calls in turns: one, or one
// for the columns of each warpgroup where these have buffers of their own. The copy engine does the
// work: one instruction adds a tile, or a part of it, which lies in its sums as in shared memory.
#pragma once

#include "bwd_tile.h"
#include "bwd_walk.h"
#include "sm90/tma.h"

namespace fad::sm90 {

template <typename T, int kGroup>
__device__ __forceinline__ void add_dq(const BwdParams& params, uint32_t shared) {
  Ring ring;
  unsigned* const counter =
      progress_of(params, read_bwd_work(shared + T::kWorkAt), T::kKeys, kGroup);
  unsigned seen = 0;  // of the counter of the key block before
#pragma unroll 1
  for (int number = 0;; ++number) {
    const auto [chunk, head, blocks] = leaf_of<T>(params, shared + T::kWorkAt, number);
    if (blocks.begin >= blocks.end) {
      break;
    }
    const BwdWork work = read_bwd_work(shared + T::kWorkAt);
    float* sums = static_cast<float*>(params.dq_accum_ptr) +
                  (sum_rows_before(params, work.q_row, work.bidb, head) + blocks.end * T::kRows) *
                      T::kHeadDim;
    const unsigned steps =
        steps_before(work.seqlen_q, params.h_h_k_ratio, chunk, head % params.h_h_k_ratio, T::kRows);
    const int taken = work.n_block == 0 || !params.in_turns
                          ? 0
                          : row_blocks_end(params, work.seqlen_q, work.seqlen_k, work.n_block - 1,
                                           T::kRows, T::kKeys);
#pragma unroll 1
    for (int m_block = blocks.end - 1; m_block >= blocks.begin; --m_block) {
      sums -= T::kRows * T::kHeadDim;
      const auto add = [&](float* to, int buffer, uint32_t full) {
        barrier_wait(shared + T::kDqFull + 8 * buffer, full);
        if (m_block < taken && seen < steps - m_block) {
          seen = wait_for(progress_before(params, counter), steps - m_block);
        }
        fence_global_async_proxy();
        add_bulk(to, shared + T::kDqAt + buffer * T::kDqBufferBytes, T::kDqBufferBytes);
        wait_bulk_read();
        barrier_arrive(shared + T::kDqEmpty + 8 * buffer);
      };
      if constexpr (T::kSharesKeys) {
#pragma unroll 1
        for (int i = 0; i < T::dq_parts(kGroup); ++i) {
          const int part = kGroup * T::dq_parts(0) + i;
          const DqBuffer<T> buffer(ring.slot, part);
          add(sums + part * (T::kDqPartBytes / 4), buffer.number, buffer.parity);
        }
      } else {
        add(sums, ring.slot, ring.parity);
      }
      if (params.in_turns) {
        wait_bulk_added();
        store_release(counter, steps - m_block);
      }
      ring.advance(T::kStages);
    }
  }
  wait_bulk_added();
}

}  // namespace fad::sm90
