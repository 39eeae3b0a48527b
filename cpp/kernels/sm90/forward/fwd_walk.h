// What the forward's producer and consumers agree on: which keys a row sees, in which blocks of
// T::kKeys keys, and which tile of rows is worked on. A CTA goes over the blocks of its tile from
// the last one down.
#pragma once

#include "fwd_params.h"
#include "sm90/barrier.h"
#include "tree/masking.h"

namespace fad::sm90 {

// A call's parameters as the kernel wants them.
struct FwdCall : FwdParams {
  int tiles;            // that CTAs take: tiles of rows, times the splits if they write parts
  int split_tiles;      // tiles of rows among them, ...
  int first_tile;       // ... and which one is the first
  int row_tiles;        // of the longest sequence
  int units;            // groups of heads
  int units_at_a_time;  // (batch, group) pairs whose tiles are worked on together
  int group_bits;  // log2 of the heads that rows of a token have room for: the group's, or more
  int heads_per_kv;
  int blocks;        // in the ring
  int split_blocks;  // blocks of keys in a split
  int part_blocks;   // and in what one CTA walks of a tile
  int box_keys;      // keys that one box holds: all of them lie in one page
  int block_boxes;   // boxes of a block: a power of two, at most 8
};

struct KeyRange {
  int begin, end;
};

// Keys that some query of [first, last] sees.
__device__ __forceinline__ KeyRange visible_keys(const FwdCall& call, int diagonal, int seqlen_k,
                                                 int first, int last) {
  const int end = min(seqlen_k, last + diagonal + 1 + call.window_right);
  const int begin = max(0, first + diagonal - call.window_left);
  return {begin, end};
}

// Blocks of T::kKeys keys that hold these keys.
template <typename T>
__device__ __forceinline__ KeyRange blocks_of(KeyRange keys) {
  if (keys.end <= keys.begin) {
    return {0, 0};
  }
  return {keys.begin / T::kKeys, (keys.end - 1) / T::kKeys + 1};
}

// A tile of rows of one group of heads: the note by which the producer hands it to the consumers.
struct Work {
  int first_row;   // in its sequence; below 0: there is no more work
  int bidb, bidh;  // the first head
  int rows;        // of the sequence: queries times heads that they have room for
  int seqlen_k;
  int q_row;  // of the sequence's first query: packed sequences follow one another
  // Row of the ring, T::kKeys to a block, where V behind the end of the sequence begins, up to the
  // end of its block; below 0: nowhere.
  int tail;
  int split;  // whose part is to be computed; 0 where a CTA walks all of them
};

// Blocks that hold the keys which some of `rows` rows see, of those that the tile is for.
template <typename T>
__device__ __forceinline__ KeyRange blocks_of_rows(const FwdCall& call, const Work& work,
                                                   int first_row, int rows) {
  const int last_row = min(first_row + rows, work.rows) - 1;
  const KeyRange seen =
      blocks_of<T>(visible_keys(call, work.seqlen_k - (work.rows >> call.group_bits), work.seqlen_k,
                                first_row >> call.group_bits, last_row >> call.group_bits));
  const int first = work.split * call.part_blocks;
  const KeyRange blocks = {max(seen.begin, first), min(seen.end, first + call.part_blocks)};
  return blocks.end > blocks.begin ? blocks : KeyRange{0, 0};
}

// Two notes take turns. The producer thread writes a note; the thread that loads Q and lane 0 of
// each warp that computes or clears tails read it.
//
//   write  after `kWorkEmpty` of the note: one arrival of each reader, after its last read. The
//          first two writes find fresh barriers, whose phase before the first counts as complete.
//   read   after `kWorkFull` of the note: the producer's arrival, after both its stores.
//
// Phase n of either barrier belongs to the note's n-th use, so that a wait names parity n % 2. A
// use ends with every reader's arrival, and lane 0 arrives after the reduction that all lanes of
// its warp came to: the producer is at most one use ahead, and no reader misses a phase. The last
// note (first_row < 0) is never freed. Ordinary loads and stores need no proxy fence.
//
// An arrival orders only what its own thread has done before it, so that each reader arrives
// itself: with a read by every lane, a __syncwarp and an arrival of lane 0, compute-sanitizer's
// racecheck reports each further use of a note.
__device__ __forceinline__ void write_work(uint32_t at, const Work& work) {
  store_shared_ints(at, make_int4(work.first_row, work.bidb, work.bidh, work.rows));
  store_shared_ints(at + 16, make_int4(work.seqlen_k, work.q_row, work.tail, work.split));
}

__device__ __forceinline__ Work read_work(uint32_t at) {
  const int4 a = load_shared_ints(at);
  const int4 b = load_shared_ints(at + 16);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// The whole warp calls; lane 0 alone reads. A reduction gives the words to all lanes, in uniform
// registers, as bounds of loops should be.
__device__ __forceinline__ Work read_work_by_warp(uint32_t at) {
  Work work{};
  if (threadIdx.x % 32 == 0) {
    work = read_work(at);
  }
  const auto all = [](int value) {  // 0 in the other lanes
    return static_cast<int>(__reduce_or_sync(~0u, static_cast<unsigned>(value)));
  };
  return {all(work.first_row), all(work.bidb),  all(work.bidh), all(work.rows),
          all(work.seqlen_k),  all(work.q_row), all(work.tail), all(work.split)};
}

}  // namespace fad::sm90
