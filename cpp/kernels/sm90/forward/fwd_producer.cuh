// The warps that feed the consumers: one takes tiles and loads K (and what goes through the ring of
// Q), one loads Q, one clears rows of V behind the end of a sequence, one loads V.
#pragma once

#include "fwd_tile.h"
#include "fwd_walk.h"
#include "sm90/barrier.h"
#include "sm90/tma.h"
#include "tree/lengths.h"

namespace fad::sm90 {

// Tiles of the last rows first: where the mask is causal they take longest. All heads of a batch
// of heads, whose K and V fit in L2, before the next. Parts of the first split of all tiles before
// those of the next: they share keys, and it is the last splits that a mask cuts.
template <typename T>
__device__ __forceinline__ Work work_of(const FwdCall& call, int number) {
  const int split = number / call.split_tiles;
  const int tile = call.first_tile + number - split * call.split_tiles;
  const int section = tile / (call.units_at_a_time * call.row_tiles);
  const int first_unit = section * call.units_at_a_time;
  const int here = min(call.units_at_a_time, call.batch * call.units - first_unit);
  const int rest = tile - first_unit * call.row_tiles;
  const int row_tile = rest / here;
  const int unit = first_unit + rest - row_tile * here;
  Work work;
  work.split = split;
  work.first_row = (call.row_tiles - 1 - row_tile) * T::kRows;
  work.bidb = unit / call.units;
  work.bidh = (unit - work.bidb * call.units) * call.group;
  const int b = work.bidb;
  work.q_row = call.cu_seqlens_q == nullptr ? 0 : call.cu_seqlens_q[b];
  work.rows =
      within(call.cu_seqlens_q == nullptr ? call.seqlen_q : call.cu_seqlens_q[b + 1] - work.q_row,
             call.seqlen_q)
      << call.group_bits;
  const int pad = call.leftpad_k == nullptr ? 0 : call.leftpad_k[b];
  const int first_k = call.cu_seqlens_k == nullptr ? 0 : call.cu_seqlens_k[b];
  int length = call.cu_seqlens_k == nullptr ? call.seqlen_k : call.cu_seqlens_k[b + 1] - first_k;
  length = (call.seqused_k == nullptr ? length : call.seqused_k[b]) + call.seqlen_new - pad;
  work.seqlen_k = within(length, call.seqlen_k - pad);
  return work;
}

// Tile number `turn` of this CTA, where each CTA has a fixed list of tiles: CTAs in ascending, then
// in descending order, so that each gets long and short ones.
__device__ __forceinline__ int dealt_tile(int turn) {
  const int cta = static_cast<int>(blockIdx.x);
  const int ctas = static_cast<int>(gridDim.x);
  return turn * ctas + (turn % 2 == 0 ? cta : ctas - 1 - cta);
}

// The number of a tile that no other CTA takes; call.tiles or above: none is left. taken: how many
// this CTA took before.
__device__ __forceinline__ int next_tile(const FwdCall& call, int taken) {
  return call.tile_counter == nullptr ? dealt_tile(taken)
                                      : static_cast<int>(atomicAdd(call.tile_counter, 1u));
}

// Boxes `begin` to `end` of Q, of one warpgroup's rows.
template <typename T>
__device__ __forceinline__ void load_query_boxes(const FwdCall& call, const CUtensorMap& q_map,
                                                 const Work& work, int group, int begin, int end,
                                                 uint32_t to, uint32_t full) {
  const int row = work.q_row + ((work.first_row + group * kGroupRows) >> call.group_bits);
  const int batch = call.cu_seqlens_q == nullptr ? work.bidb : 0;
#pragma unroll
  for (int box = begin; box < end; ++box) {
    load_box(to + (box - begin) * T::kQBoxBytes, q_map, full, box * kBoxColumns, work.bidh, row,
             batch);
  }
}

// A warp's loads of a tile's keys, or values, in kBoxes boxes to a row. A block of them is one box
// for every 64 columns or, in pages, several, each loaded by a lane of its own: where 32 of them
// lie is found at once, since reading the page table takes long.
template <typename T, int kBoxes>
struct BlockLoads {
  const FwdCall& call;
  const CUtensorMap& map;
  const Work& work;
  uint32_t shared;
  int lane = threadIdx.x % 32;
  int first = -1;         // number of lane 0's box in the sequence
  int row = 0;            // of this lane's
  int sequence_of_k = 0;  // a page, if there are pages

  __device__ __forceinline__ void find_boxes() {
    const int key = (first + lane) * call.box_keys;
    const int64_t b = work.bidb;
    if (call.block_table != nullptr) {
      // Behind the end there may be no page: rows that no page has are zeros.
      const bool used = key < work.seqlen_k;
      const int page = key / call.page_size;
      row = used ? key - page * call.page_size : call.page_size;
      sequence_of_k = used ? call.block_table[b * call.block_table_batch_stride + page] : 0;
    } else {
      row = key + (call.cu_seqlens_k == nullptr ? 0 : call.cu_seqlens_k[b]) +
            (call.leftpad_k == nullptr ? 0 : call.leftpad_k[b]);
      sequence_of_k = call.cu_seqlens_k != nullptr      ? 0
                      : call.cache_batch_idx != nullptr ? call.cache_batch_idx[b]
                                                        : work.bidb;
    }
  }

  // Into a place of the ring; full: the barrier that counts the bytes.
  __device__ __forceinline__ void load(int block, const Ring& ring, uint32_t full) {
    const int number = block * call.block_boxes;
    if (first != number / 32 * 32) {
      first = number / 32 * 32;
      find_boxes();
    }
    const int box = lane - number % 32;  // of the block
    barrier_wait(shared + T::kEmpty + 8 * ring.slot, ring.parity ^ 1);
    if (lane == 0) {
      barrier_expect(full, kBoxes * T::kBoxBytes);
    }
    __syncwarp();
    if (box >= 0 && box < call.block_boxes) {
      const uint32_t to =
          shared + T::kRingAt + ring.slot * T::kBlockBytes + box * call.box_keys * kBoxRowBytes;
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        load_box(to + i * T::kBoxBytes, map, full, i * kBoxColumns, work.bidh / call.heads_per_kv,
                 row, sequence_of_k);
      }
    }
  }
};

// Each block of V comes to the ring after the next block of K, as the consumers need them: this
// warp and the one that loads V skip each other's places.
template <typename T>
__device__ __forceinline__ void load_keys(const FwdCall& call, const CUtensorMap& q_map,
                                          const CUtensorMap& k_map, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  Ring ring;
  int taken = 0;
  for (int turn = 0;; ++turn) {
    Work work;
    KeyRange blocks{};
    for (;;) {
      const int tile = __shfl_sync(~0u, lane == 0 ? next_tile(call, taken) : 0, 0);
      ++taken;
      if (tile >= call.tiles) {
        work.first_row = -1;
        break;
      }
      work = work_of<T>(call, tile);
      if (work.first_row < work.rows) {
        blocks = blocks_of_rows<T>(call, work, work.first_row, T::kRows);
        // Rows without keys get their zeros here, or where parts are merged.
        if (blocks.end > blocks.begin || call.parts.acc == nullptr) {
          break;
        }
      }
    }
    const bool done = work.first_row < 0;
    const int count = blocks.end - blocks.begin;

    // The block that holds the end of the sequence is the first one loaded.
    const bool may_have_tail =
        call.cu_seqlens_k != nullptr || call.seqused_k != nullptr || call.leftpad_k != nullptr;
    const int behind = work.seqlen_k - (blocks.end - 1) * T::kKeys;
    const bool tail = may_have_tail && count > 0 && behind < T::kKeys;
    // V's first block comes to the ring after Q's and two blocks of K, or the only one.
    const int tail_slot = (ring.slot + T::kRingQueryBlocks + (count == 1 ? 1 : 2)) % call.blocks;
    work.tail = tail ? tail_slot * T::kKeys + behind : -1;

    const int note = turn & 1;
    barrier_wait(shared + T::kWorkEmpty + 8 * note, (turn >> 1 & 1) ^ 1);
    if (lane == 0) {
      write_work(shared + T::kWorkAt + 32 * note, work);
      barrier_arrive(shared + T::kWorkFull + 8 * note);
    }
    if (done) {
      return;
    }
    if (count == 0) {
      continue;
    }
#pragma unroll 1
    for (int block = 0; block < T::kRingQueryBlocks; ++block) {
      barrier_wait(shared + T::kEmpty + 8 * ring.slot, ring.parity ^ 1);
      const uint32_t full = shared + T::kFull + 8 * ring.slot;
      const uint32_t to = shared + T::kRingAt + ring.slot * T::kBlockBytes;
      constexpr int kGroups = T::kWarpgroups / (T::kQueriesThroughRing ? T::kRingQueryBlocks : 1);
      constexpr int kGroupBytes = T::kRingBoxes * T::kQBoxBytes;
      if (lane == 0) {
        barrier_expect(full, kGroups * kGroupBytes);
#pragma unroll 1
        for (int i = 0; i < kGroups; ++i) {
          load_query_boxes<T>(call, q_map, work, block * kGroups + i, 0, T::kRingBoxes,
                              to + i * kGroupBytes, full);
        }
      }
      __syncwarp();
      ring.advance(call.blocks);
    }
    BlockLoads<T, T::kBoxes> loads{call, k_map, work, shared};
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      loads.load(block, ring, shared + T::kFull + 8 * ring.slot);
      ring.advance(call.blocks);
      if (block < blocks.end - 1) {
        ring.advance(call.blocks);  // V's place
      }
    }
    ring.advance(call.blocks);
  }
}

template <typename T>
__device__ __forceinline__ void load_values(const FwdCall& call, const CUtensorMap& v_map,
                                            uint32_t shared) {
  Ring ring;
  for (int turn = 0;; ++turn) {
    const int note = turn & 1;
    barrier_wait(shared + T::kWorkFull + 8 * note, turn >> 1 & 1);
    const Work work = read_work_by_warp(shared + T::kWorkAt + 32 * note);
    if (work.first_row < 0) {
      return;
    }
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(shared + T::kWorkEmpty + 8 * note);
    }
    const KeyRange blocks = blocks_of_rows<T>(call, work, work.first_row, T::kRows);
    if (blocks.end == blocks.begin) {
      continue;
    }
#pragma unroll 1
    for (int block = 0; block < T::kRingQueryBlocks + 1; ++block) {  // of Q, and the first of K
      ring.advance(call.blocks);
    }
    BlockLoads<T, T::kValueBoxes> loads{call, v_map, work, shared};
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      if (block > blocks.begin) {
        ring.advance(call.blocks);  // K's place
      }
      const bool tail = work.tail >= 0 && block == blocks.end - 1;
      loads.load(block, ring,
                 shared + (tail ? T::kTailLoaded + 8 * note : T::kFull + 8 * ring.slot));
      ring.advance(call.blocks);
    }
  }
}

// One thread.
template <typename T>
__device__ __forceinline__ void load_queries(const FwdCall& call, const CUtensorMap& q_map,
                                             uint32_t shared) {
  uint32_t parity = 0;
  for (int turn = 0;; ++turn) {
    const int note = turn & 1;
    barrier_wait(shared + T::kWorkFull + 8 * note, turn >> 1 & 1);
    const Work work = read_work(shared + T::kWorkAt + 32 * note);
    barrier_arrive(shared + T::kWorkEmpty + 8 * note);
    if (work.first_row < 0) {
      return;
    }
    constexpr int kGroups = T::kQueriesInShared ? T::kWarpgroups : 0;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t full = shared + T::kQFull + 8 * group;
      barrier_wait(shared + T::kQEmpty + 8 * group, parity ^ 1);
      barrier_expect(full, T::kQGroupBytes);
      load_query_boxes<T>(call, q_map, work, group, T::kRingBoxes, T::kBoxes,
                          shared + group * T::kQGroupBytes, full);
    }
    parity ^= 1;
  }
}

// One warp. What lies behind the end of a sequence may be NaN, and 0 * NaN is NaN.
template <typename T>
__device__ __forceinline__ void clear_tails(uint32_t shared) {
  const int lane = threadIdx.x % 32;
  uint32_t parities = 0;  // a bit for each note
  for (int turn = 0;; ++turn) {
    const int note = turn & 1;
    barrier_wait(shared + T::kWorkFull + 8 * note, turn >> 1 & 1);
    const Work work = read_work_by_warp(shared + T::kWorkAt + 32 * note);
    if (work.first_row < 0) {
      return;
    }
    if (work.tail >= 0) {
      barrier_wait(shared + T::kTailLoaded + 8 * note, parities >> note & 1);
      parities ^= 1u << note;
      const int slot = work.tail / T::kKeys;
      const uint32_t block = shared + T::kRingAt + slot * T::kBlockBytes;
      for (int row = work.tail % T::kKeys + lane / 8; row < T::kKeys; row += 4) {
#pragma unroll
        for (int box = 0; box < T::kValueBoxes; ++box) {
          store_shared(block + box * T::kBoxBytes + row * kBoxRowBytes + lane % 8 * 16,
                       make_float4(0.f, 0.f, 0.f, 0.f));
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(shared + T::kFull + 8 * slot);
      }
    }
    if (lane == 0) {
      barrier_arrive(shared + T::kWorkEmpty + 8 * note);
    }
  }
}

}  // namespace fad::sm90
