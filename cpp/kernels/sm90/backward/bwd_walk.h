// What the warps of a backward's CTA agree on: its key block, and which row blocks of which heads
// see it, in the order of tree/key_tree.h.
#pragma once

#include "params.h"
#include "sm90/barrier.h"
#include "tree/lengths.h"
#include "turns.h"

namespace fad::sm90 {

// A part of a key block. It is kept in shared memory, because the loop over row blocks needs the
// registers.
struct BwdWork : KeyPlace {
  int q_row, k_row;  // of the sequence's first query and key among packed ones; dense: 0
  int seqlen_q, seqlen_k;
};

__device__ __forceinline__ BwdWork bwd_work(const BwdParams& params, const KeyPlace& place) {
  BwdWork work{place, 0, 0, params.seqlen_q, params.seqlen_k};
  if (params.cu_seqlens_q != nullptr) {
    work.q_row = params.cu_seqlens_q[place.bidb];
    work.seqlen_q = within(params.cu_seqlens_q[place.bidb + 1] - work.q_row, params.seqlen_q);
  }
  if (params.cu_seqlens_k != nullptr) {
    work.k_row = params.cu_seqlens_k[place.bidb];
    work.seqlen_k = within(params.cu_seqlens_k[place.bidb + 1] - work.k_row, params.seqlen_k);
  }
  return work;
}

constexpr int kBwdWorkBytes = 32;

__device__ __forceinline__ void write_work(uint32_t at, const BwdWork& work) {
  store_shared_ints(at, make_int4(work.bidb, work.head_k, work.n_block, work.part));
  store_shared_ints(at + 16, make_int4(work.q_row, work.k_row, work.seqlen_q, work.seqlen_k));
}

__device__ __forceinline__ BwdWork read_bwd_work(uint32_t at) {
  const int4 place = load_shared_ints(at);
  const int4 rows = load_shared_ints(at + 16);
  return {{place.x, place.y, place.z, place.w}, rows.x, rows.y, rows.z, rows.w};
}

// Those that see the key block. params: windows as numbers.
template <typename T>
__device__ __forceinline__ RowBlocks row_blocks(const BwdParams& params, const BwdWork& work) {
  return part_row_blocks(params, work, work.seqlen_q, work.seqlen_k, T::kRows, T::kKeys);
}

// One of the leaves of a part, in the order of its walk; behind the last one it has no rows.
struct Leaf {
  int chunk, head;  // counted in the whole call
  RowBlocks rows;
};

// Found again for each leaf: the loops over row blocks need the registers.
template <typename T>
__device__ __forceinline__ Leaf leaf_of(const BwdParams& params, uint32_t work_at, int number) {
  const BwdWork work = read_bwd_work(work_at);
  const RowBlocks blocks = row_blocks<T>(params, work);
  const int chunk = (blocks.end - 1) / (kChunkRows / T::kRows) - number / params.parts.heads;
  return {chunk,
          work.head_k * params.h_h_k_ratio + first_head(params, work) + number % params.parts.heads,
          leaf_row_blocks(blocks, chunk, T::kRows)};
}

}  // namespace fad::sm90
