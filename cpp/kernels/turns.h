// The order in which CTAs of a backward add to shared gradients, for every family. A CTA works on
// one key block of one head. It adds to every row block of dq that sees its keys, and the query
// heads of a group add to one dk and dv. fp32 sums depend on the order of their terms, so each has
// a fixed one: a row block of dq takes key blocks first to last, a key block of dk and dv takes
// query heads first to last. CTAs take turns: each waits for the key block before it.
//
// There is no deadlock. A CTA waits only for CTAs with a smaller ticket (key blocks below its own,
// or earlier heads at its own key block), tickets are drawn as CTAs start, and the CTA with the
// smallest ticket that has not ended waits for no one. This holds however few CTAs fit on the GPU.
#pragma once

#include <cstdint>

#include "sm80/row_block.h"

namespace fad {

__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Waits until a counter is at least as high as wanted, and returns it. In assembly: a loop of three
// instructions sees the new value sooner than what the compiler makes of a C++ loop.
__device__ __forceinline__ unsigned wait_for(const unsigned* counter, unsigned wanted) {
  unsigned value;
  asm volatile(
      "{\n"
      "  .reg .pred waits;\n"
      "again:\n"
      "  ld.acquire.gpu.global.u32 %0, [%1];\n"
      "  setp.lt.u32 waits, %0, %2;\n"
      "  @waits bra again;\n"
      "}\n"
      : "=&r"(value)
      : "l"(counter), "r"(wanted)
      : "memory");
  return value;
}

// A CTA's counter when it has added to the row blocks from m_block up. Row blocks go last to first,
// counters go up; the function is its own inverse.
__device__ __forceinline__ unsigned progress(int m_block) { return 0x40000000u - m_block; }

// Blocks of all sequences before this one, without knowing their lengths: of packed sequences, each
// may leave one block unused.
__device__ __forceinline__ int64_t blocks_before(const int* cu_seqlens, int bidb, int seqlen,
                                                 int block) {
  return cu_seqlens == nullptr ? static_cast<int64_t>(bidb) * num_blocks(seqlen, block)
                               : static_cast<int64_t>(cu_seqlens[bidb] / block) + bidb;
}

// A key block of a head.
struct KeyPlace {
  int bidb, bidh, n_block;
};

// The key block that belongs to a ticket; num_n_blocks: of each head. Key blocks are in order,
// those of heads_in_flight heads at the same time. The first heads of all groups come before the
// second ones, so that heads of one group, which wait for each other at every key block, do not
// start together.
template <typename Params>
__device__ __forceinline__ KeyPlace place_of_ticket(const Params& params, unsigned ticket,
                                                    unsigned num_n_blocks) {
  const unsigned heads = static_cast<unsigned>(params.b) * params.h;
  const unsigned first = ticket / (params.heads_in_flight * num_n_blocks) * params.heads_in_flight;
  const unsigned beside = min(static_cast<unsigned>(params.heads_in_flight), heads - first);
  const unsigned rest = ticket - first * num_n_blocks;
  const unsigned head = first + rest % beside;
  const int turn = head % params.h;
  return {static_cast<int>(head / params.h),
          turn % params.h_k * params.h_h_k_ratio + turn / params.h_k,
          static_cast<int>(rest / beside)};
}

// The counter of a key block of a head: to which row blocks of dq it has been added. That of the
// key block before lies params.h before it.
template <typename Params>
__device__ __forceinline__ unsigned* progress_of(const Params& params, const KeyPlace& place,
                                                 int block_n) {
  return params.progress + place.bidh +
         params.h * (blocks_before(params.cu_seqlens_k, place.bidb, params.seqlen_k, block_n) +
                     place.n_block);
}

// The end of the row blocks that see this key block or one before it, where the left window is a
// number (kUnlimited: none).
template <typename Params>
__device__ __forceinline__ int row_blocks_end(const Params& params, int seqlen_q, int seqlen_k,
                                              int n_block, int block_m, int block_n) {
  const int rows = (n_block + 1) * block_n + seqlen_q - seqlen_k + params.window_size_left;
  return num_blocks(max(rows, 0), block_m);
}

// Which key block of dk and dv the query heads of a group add up, counted over all sequences.
template <typename Params>
__device__ __forceinline__ int64_t group_of(const Params& params, const KeyPlace& place,
                                            int block_n) {
  return (blocks_before(params.cu_seqlens_k, place.bidb, params.seqlen_k, block_n) +
          place.n_block) *
             params.h_k +
         place.bidh / params.h_h_k_ratio;
}

// Rows of dq's sums and of the row sums before a head's own: the rows of a head are contiguous,
// packed sequences 128 rows apart. sum_s_q: where the sequence starts among packed ones.
template <typename Params>
__device__ __forceinline__ int64_t sum_rows_before(const Params& params, int sum_s_q, int bidb,
                                                   int bidh) {
  return params.cu_seqlens_q == nullptr
             ? (static_cast<int64_t>(bidb) * params.h + bidh) * params.seqlen_q_rounded
             : bidh * (params.total_q + 128ll * params.b) + sum_s_q + 128ll * bidb;
}

}  // namespace fad
