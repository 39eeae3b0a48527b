// The order in which CTAs of a backward add to dq, for every family. A CTA works on a part of one
// key block of one key head (tree/key_tree.h), and adds to dq of every row block that it walks.
// fp32 sums depend on the order of their terms: a row block takes key blocks first to last. So CTAs
// take turns: each waits for the key block before it, of the same part; and for the query head
// before, where the heads of a group pass on sums of dk and dv.
//
// There is no deadlock. A CTA waits only for CTAs with a smaller ticket, tickets are drawn as CTAs
// start, and the CTA with the smallest ticket that has not ended waits for no one. This holds
// however few CTAs fit on the GPU.
#pragma once

#include <cstdint>

#include "sm80/row_block.h"
#include "tree/key_tree.h"

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

// Blocks of all sequences before this one, without knowing their lengths: of packed sequences, each
// may leave one block unused.
__device__ __forceinline__ int64_t blocks_before(const int* cu_seqlens, int bidb, int seqlen,
                                                 int block) {
  return cu_seqlens == nullptr ? static_cast<int64_t>(bidb) * num_blocks(seqlen, block)
                               : static_cast<int64_t>(cu_seqlens[bidb] / block) + bidb;
}

// A part of a key block of a key head.
struct KeyPlace {
  int bidb, head_k, n_block, part;
};

// What belongs to a ticket; num_n_blocks: of each head. Key blocks are in order, those of
// shares_in_flight parts of heads at the same time. The first parts of all heads come before the
// second ones, since heads of a group that wait for each other should not start together.
template <typename Params>
__device__ __forceinline__ KeyPlace place_of_ticket(const Params& params, unsigned ticket,
                                                    unsigned num_n_blocks) {
  const unsigned parts = params.parts.count;
  const unsigned shares = static_cast<unsigned>(params.b) * params.h_k * parts;
  const unsigned first =
      ticket / (params.shares_in_flight * num_n_blocks) * params.shares_in_flight;
  const unsigned beside = min(static_cast<unsigned>(params.shares_in_flight), shares - first);
  const unsigned rest = ticket - first * num_n_blocks;
  const unsigned share = first + rest % beside;
  const unsigned part = share / params.h_k;
  return {static_cast<int>(part / parts), static_cast<int>(share % params.h_k),
          static_cast<int>(rest / beside), static_cast<int>(part % parts)};
}

// The counter of a CTA: how far it has come in the walk of `steps_before`. A CTA has one for each
// thread that adds to dq, which are to other columns.
template <typename Params>
__device__ __forceinline__ unsigned* progress_of(const Params& params, const KeyPlace& place,
                                                 int block_n, int thread = 0) {
  const int64_t block =
      blocks_before(params.cu_seqlens_k, place.bidb, params.seqlen_k, block_n) + place.n_block;
  const int64_t cta = (block * params.parts.count + place.part) * params.h_k + place.head_k;
  return params.progress + kTurnCounters * cta + thread;
}

// The counter of the key block before.
template <typename Params>
__device__ __forceinline__ const unsigned* progress_before(const Params& params,
                                                           const unsigned* progress) {
  return progress - kTurnCounters * params.parts.count * params.h_k;
}

// The end of the row blocks that see this key block or one before it, where the left window is a
// number (kUnlimited: none). To the row blocks from there on nobody adds before the next key block.
template <typename Params>
__device__ __forceinline__ int row_blocks_end(const Params& params, int seqlen_q, int seqlen_k,
                                              int n_block, int block_m, int block_n) {
  const int rows = (n_block + 1) * block_n + seqlen_q - seqlen_k + params.window_size_left;
  return min(num_blocks(seqlen_q, block_m), num_blocks(max(rows, 0), block_m));
}

// The row blocks of a part that see its key block, where windows are numbers. Both families walk
// the same ones, to the last: an additional one may change the sign of a zero.
template <typename Params>
__device__ __forceinline__ RowBlocks part_row_blocks(const Params& params, const KeyPlace& place,
                                                     int seqlen_q, int seqlen_k, int block_m,
                                                     int block_n) {
  const int first_row = place.n_block * block_n + seqlen_q - seqlen_k - params.window_size_right;
  const int end = row_blocks_end(params, seqlen_q, seqlen_k, place.n_block, block_m, block_n);
  const int64_t blocks = static_cast<int64_t>(params.parts.chunks) * (kChunkRows / block_m);
  const int64_t first = place.part / (params.h_h_k_ratio / params.parts.heads) * blocks;
  return {static_cast<int>(max(static_cast<int64_t>(max(first_row, 0) / block_m), first)),
          static_cast<int>(min(static_cast<int64_t>(end), first + blocks))};
}

// The chunks of a part that its row blocks lie in; there are some.
template <typename Params>
__device__ __forceinline__ Chunks chunks_of(const Params& params, const RowBlocks& part,
                                            int block_m) {
  const int each = kChunkRows / block_m;
  return {part.begin / each % params.parts.chunks, (part.end - 1) / each % params.parts.chunks};
}

// The row blocks of a chunk (of the sequence), of those of its part.
__device__ __forceinline__ RowBlocks leaf_row_blocks(const RowBlocks& part, int chunk,
                                                     int block_m) {
  const int first = chunk * (kChunkRows / block_m);
  return {max(part.begin, first), min(part.end, first + kChunkRows / block_m)};
}

// Counters go up with the walk, which is that of every key block: chunks last to first, the heads
// of a group first to last, row blocks last to first. A counter that has come to
// steps_before(...) - m_block says that row block m_block and all before it have been added to.
__device__ __forceinline__ int steps_before(int seqlen_q, int group, int chunk, int head,
                                            int block_m) {
  const int leaves = (num_blocks(seqlen_q, kChunkRows) - 1 - chunk) * group + head;
  return (leaves + chunk + 1) * (kChunkRows / block_m);
}

// The first query head of a part, in its group.
template <typename Params>
__device__ __forceinline__ int first_head(const Params& params, const KeyPlace& place) {
  return place.part % (params.h_h_k_ratio / params.parts.heads) * params.parts.heads;
}

// Memory for sums of dk and dv. Chained CTAs share that of their key block. Else there is a slot
// for each CTA that may be resident, or fewer: a CTA takes over that of a CTA that has ended, in
// the order of tickets, so that the one with the smallest ticket always gets one. One thread.
template <typename Params>
__device__ __forceinline__ int take_slot(const Params& params, unsigned ticket,
                                         const KeyPlace& place, int block_n) {
  if (params.parts.chained > 0) {
    const int64_t block =
        blocks_before(params.cu_seqlens_k, place.bidb, params.seqlen_k, block_n) + place.n_block;
    return static_cast<int>(block * params.h_k + place.head_k);
  }
  if (params.slots == nullptr || ticket < static_cast<unsigned>(params.num_slots)) {
    return static_cast<int>(ticket);
  }
  return static_cast<int>(wait_for(params.freed_slots + 1 + ticket - params.num_slots, 1)) - 1;
}

// At the end, behind a barrier of all threads that have used it. One thread.
template <typename Params>
__device__ __forceinline__ void free_slot(const Params& params, int slot) {
  if (params.slots != nullptr && params.parts.chained == 0) {
    const unsigned number = atomicAdd(params.freed_slots, 1u);
    store_release(params.freed_slots + 1 + number, slot + 1);
  }
}

// Where a slot holds the sums that `climb` names: a chunk's where heads pass them on.
template <typename Params>
__device__ __forceinline__ int64_t kept_at(const Params& params, int slot, int which, int chunk) {
  const int chained = params.parts.chained;
  const int place = chained == 0 ? which - (params.parts.heads == 1 ? 1 : 0)
                    : which == 0 ? chunk
                                 : chained - 1 + which;
  return static_cast<int64_t>(slot) * params.slot_sums + place;
}

// How many query heads of a group have been added to the sums of a chunk.
template <typename Params>
__device__ __forceinline__ unsigned* heads_added(const Params& params, int slot, int chunk) {
  return params.freed_slots + static_cast<int64_t>(slot) * params.parts.chained + chunk;
}

// The query heads that are added up one after another, and which of them a head is.
template <typename Params>
__device__ __forceinline__ int heads_in_order(const Params& params) {
  return params.parts.chained > 0 ? params.h_h_k_ratio : params.parts.heads;
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
