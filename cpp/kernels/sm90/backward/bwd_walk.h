// What the warps of a backward's CTA agree on: its key block, and which row blocks see it. They are
// walked from the last one down.
#pragma once

#include "params.h"
#include "sm90/barrier.h"
#include "tree/lengths.h"
#include "turns.h"

namespace fad::sm90 {

// A key block of a head. It is kept in shared memory, because the loop over row blocks needs the
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
  store_shared_ints(at, make_int4(work.bidb, work.bidh, work.n_block, 0));
  store_shared_ints(at + 16, make_int4(work.q_row, work.k_row, work.seqlen_q, work.seqlen_k));
}

__device__ __forceinline__ BwdWork read_bwd_work(uint32_t at) {
  const int4 place = load_shared_ints(at);
  const int4 rows = load_shared_ints(at + 16);
  return {{place.x, place.y, place.z}, rows.x, rows.y, rows.z, rows.w};
}

struct RowBlocks {
  int begin, end;
};

// Those that see a key block: the sm80 family's, to the last one, as an additional one may change
// the sign of a zero. params: windows as numbers.
template <typename T>
__device__ __forceinline__ RowBlocks row_blocks(const BwdParams& params, const BwdWork& work) {
  const int end =
      min(num_blocks(work.seqlen_q, T::kRows),
          row_blocks_end(params, work.seqlen_q, work.seqlen_k, work.n_block, T::kRows, T::kKeys));
  const int first_row = work.n_block * T::kKeys + work.seqlen_q - work.seqlen_k;
  return {max(0, (first_row - params.window_size_right) / T::kRows), end};
}

}  // namespace fad::sm90
