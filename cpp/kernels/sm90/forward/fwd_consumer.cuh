// The warpgroups that compute: each owns 64 rows of the tile. Scores of a block are computed while
// the values of the block after it are added.
#pragma once

#include <type_traits>

#include "fwd_products.cuh"
#include "fwd_rows.cuh"
#include "fwd_softmax.cuh"
#include "fwd_tile.h"
#include "fwd_waiting.cuh"
#include "fwd_walk.h"
#include "sm90/barrier.h"
#include "sm90/wgmma.h"

namespace fad::sm90 {

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The ring of blocks and the barriers, as one warpgroup uses them. Every warpgroup takes every
// block of the tile, and as many turns as the tile has blocks, minus one.
template <typename T>
struct Supply {
  const FwdCall& call;
  uint32_t shared;
  int group;
  int lane;
  Ring ring;

  __device__ __forceinline__ uint32_t block_at(const Ring& at) const {
    return shared + T::kRingAt + at.slot * T::kBlockBytes;
  }

  __device__ __forceinline__ Ring take() {
    const Ring taken = ring;
    ring.advance(call.blocks);
    return taken;
  }

  __device__ __forceinline__ void wait_full(const Ring& at) const {
    barrier_wait(shared + T::kFull + 8 * at.slot, at.parity);
  }

  // The same, and not before these values are there: no arithmetic has 0xffffffff as its result.
  // The compiler may move arithmetic behind a wait, but not behind its operand.
  __device__ __forceinline__ void wait_full_after(const float (&values)[2], const Ring& at) const {
    const uint32_t bits = __float_as_uint(values[0]) & __float_as_uint(values[1]);
    barrier_wait(shared + T::kFull + 8 * at.slot, at.parity ^ (bits == 0xffffffffu ? 1u : 0u));
  }

  __device__ __forceinline__ void free_block(const Ring& at) const {
    if (lane == 0) {
      barrier_arrive(shared + T::kEmpty + 8 * at.slot);
    }
  }

  __device__ __forceinline__ void wait_queries(int turn) const {
    barrier_wait(shared + T::kQFull + 8 * group, turn & 1);
  }

  __device__ __forceinline__ void free_queries() const {
    __syncwarp();  // the other lanes are done with theirs
    if (lane == 0) {
      barrier_arrive(shared + T::kQEmpty + 8 * group);
    }
  }

  __device__ __forceinline__ void await_turn() const {
    if constexpr (T::kTakesTurns) {
      named_barrier_sync(1 + group, 256);
    }
  }

  __device__ __forceinline__ void end_turn() const {
    if constexpr (T::kTakesTurns) {
      named_barrier_arrive(group + 1 == T::kWarpgroups ? 1 : 2 + group, 256);
    }
  }

  // Blocks of the ring, and whole steps, that this warpgroup leaves to the others.
  __device__ __forceinline__ void pass(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_full(ring);
      __syncwarp();  // no lane may still wait for a phase that lane 0 lets pass
      free_block(ring);
      ring.advance(call.blocks);
    }
  }

  __device__ __forceinline__ void pass_turn() const {
    await_turn();
    end_turn();
  }

  __device__ __forceinline__ void pass_steps(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      pass(2);
      pass_turn();
    }
  }
};

// Which keys a warpgroup's rows see.
template <typename T>
struct RowKeys {
  KeyRange tile;  // blocks of the whole tile
  KeyRange own;   // and of this warpgroup's rows
  int first_row;  // of this warpgroup
  int diagonal;   // position of query 0 among the keys
  int seqlen_k;
  int seen_begin, seen_end;  // keys that all rows of this warp see
  KeyRange inside;           // blocks that all rows of this warpgroup see

  __device__ __forceinline__ RowKeys(const FwdCall& call, const Work& work, int group, int warp)
      : tile(blocks_of_rows<T>(call, work, work.first_row, T::kRows)),
        own{0, 0},
        diagonal(work.seqlen_k - (work.rows >> call.group_bits)),
        seqlen_k(work.seqlen_k) {
    first_row = work.first_row + group * kGroupRows;
    if (first_row < work.rows) {
      own = blocks_of_rows<T>(call, work, first_row, kGroupRows);
    }
    const int warp_row = first_row + 16 * warp;
    const int first_token = warp_row >> call.group_bits;
    const int last_token = (warp_row + 15) >> call.group_bits;
    seen_end = min(seqlen_k, first_token + diagonal + 1 + call.window_right);
    seen_begin = last_token + diagonal - call.window_left;
    if constexpr (T::kLoopsInside) {
      const int begin =
          ((first_row + kGroupRows - 1) >> call.group_bits) + diagonal - call.window_left;
      const int end =
          min(seqlen_k, (first_row >> call.group_bits) + diagonal + 1 + call.window_right);
      inside = {(max(begin, 0) + T::kKeys - 1) / T::kKeys, max(end, 0) / T::kKeys};
    }
  }

  __device__ __forceinline__ void cap(const FwdCall& call, float (&scores)[T::kKeys / 2]) const {
    if constexpr (T::kSoftcap) {
#pragma unroll
      for (int j = 0; j < T::kKeys / 2; ++j) {
        scores[j] = tanh_approx(__fmul_rn(scores[j], call.softcap));
      }
    }
  }

  // -inf for the keys that a row does not see.
  __device__ __forceinline__ void hide(const FwdCall& call, int row_in_group, int lane, int block,
                                       float (&scores)[T::kKeys / 2]) const {
    const int key = block * T::kKeys;
    if (key + T::kKeys > seen_end || key < seen_begin) {
      const int column = key + lane % 4 * 2;
      const int row = first_row + row_in_group;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = ((row + 8 * r) >> call.group_bits) + diagonal;
        const int end = min(seqlen_k, position + 1 + call.window_right) - column;
        const int begin = position - call.window_left - column;
#pragma unroll
        for (int j = 2 * r; j < T::kKeys / 2; j += 4) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = j / 4 * 8 + i;
            if (at >= end || at < begin) {
              scores[j + i] = -INFINITY;
            }
          }
        }
      }
    }
  }
};

// One warpgroup with its registers.
template <typename T>
struct Consumer {
  const FwdCall& call;
  int group;
  int thread;  // of the warpgroup
  int lane;
  int row_in_group;  // the thread's first row; the other one is 8 below it
  uint32_t queries;
  uint32_t shared;
  Supply<T> supply;
  RowEnds<T> ends;

  float scores[T::kKeys / 2];
  float acc[T::kHeadDimV / 2];
  Weights<T> weights;
  QueryWords<T> query_words;
  StepScales<T::kSteps> scales;
  RowState rows;
  bool empty_acc;
  Waiting<T> waiting;
  RowState done;  // the split before, until it is merged

  __device__ __forceinline__ Consumer(const FwdCall& call_, uint32_t shared_, int group_)
      : call(call_),
        group(group_),
        thread(threadIdx.x % 128),
        lane(thread % 32),
        row_in_group(thread / 32 * 16 + lane / 4),
        queries(shared_ + group * T::kQGroupBytes),
        shared(shared_),
        supply{call, shared, group, lane, {}},
        ends{call, shared, group, lane, row_in_group} {}

  __device__ __forceinline__ void run() {
    if (T::kTakesTurns && group + 1 == T::kWarpgroups) {
      supply.end_turn();
    }
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      barrier_wait(shared + T::kWorkFull + 8 * (turn & 1), turn >> 1 & 1);
      const Work work = ends.work_of(turn);
      if (work.first_row < 0) {
        return;
      }
      const RowKeys<T> keys(call, work, group, thread / 32);
      rows = RowState{};
      if (keys.own.end > keys.own.begin) {
        attend(turn, keys);
      } else {
        leave_to_others(turn, keys.tile);
      }
      if (call.parts.acc != nullptr) {
        ends.store_part(turn, rows, acc);
      } else {
        ends.end(turn, rows, acc);
      }
    }
  }

 private:
  __device__ __forceinline__ void leave_to_others(int turn, KeyRange blocks) {
    if (blocks.end > blocks.begin) {
      supply.pass(T::kRingQueryBlocks + 1);
      supply.pass_steps(blocks.end - blocks.begin - 1);
      supply.pass(1);
    }
    if constexpr (T::kQueriesInShared) {
      supply.wait_queries(turn);
      supply.free_queries();
    }
#pragma unroll
    for (int j = 0; j < T::kHeadDimV / 2; ++j) {
      acc[j] = 0.f;
    }
  }

  __device__ __forceinline__ void attend(int turn, const RowKeys<T>& keys) {
    const int hidden_after = keys.tile.end - keys.own.end;
    int block = keys.own.end - 1;
    waiting = Waiting<T>{};
    waiting.shared = shared + T::kStateAt + (group * T::kStateColumns * 128 + thread) * 16;

    take_ring_queries();
    if (hidden_after > 0) {
      supply.pass(1);
      supply.pass_steps(hidden_after - 1);
    }
    take_queries(turn);
    first_scores(keys, block);
    if (hidden_after > 0) {
      supply.pass(1);
      supply.pass_turn();
    }
    if constexpr (T::kWaitsLast) {
      supply.wait_full(supply.ring);
    }
#pragma unroll 1
    for (;;) {
      const int split_begin = max(keys.own.begin, block / call.split_blocks * call.split_blocks);
#pragma unroll 1
      while (block > split_begin) {
        if (T::kLoopsInside && block <= keys.inside.end && block > keys.inside.begin) {
          const int last = max(split_begin, keys.inside.begin);
#pragma unroll 1
          do {
            --block;
            step<false, false>(turn, keys, block);
          } while (block > last);
        } else {
          --block;
          step<false, true>(turn, keys, block);
        }
      }
      if (block == keys.own.begin) {
        break;
      }
      --block;
      step<true, true>(turn, keys, block);
    }
    if constexpr (!T::kQueriesInRegisters) {
      supply.free_queries();
    }
    const int hidden_before = keys.own.begin - keys.tile.begin;
    if (hidden_before > 0) {
      supply.pass(1);
      supply.pass_turn();
    }
    last_values(turn, hidden_before);
  }

  // The part of Q that comes through the ring.
  __device__ __forceinline__ void take_ring_queries() {
    if constexpr (T::kQueriesThroughRing) {
      Ring own_queries = supply.ring;
      int in_block = group * T::kRingBoxes * T::kQBoxBytes;
      if constexpr (T::kRingQueryBlocks > 1) {  // one for each warpgroup
        for (int before = 0; before < group; ++before) {
          own_queries.advance(call.blocks);
        }
        in_block = 0;
      }
      supply.wait_full(own_queries);
      load_query_words<T>(supply.block_at(own_queries) + in_block, thread, query_words);
      // Arriving at a barrier orders loads before what other threads do, not before what the copy
      // engine does: without the fence it overwrote words that were still being read.
      fence_async_proxy();
      supply.pass(T::kRingQueryBlocks);
    }
  }

  __device__ __forceinline__ void take_queries(int turn) {
    if constexpr (T::kQueriesInShared) {
      supply.wait_queries(turn);
    }
    if constexpr (T::kRegisterQueries > 0 && !T::kQueriesThroughRing) {
      load_query_words<T>(queries, thread, query_words);
    }
    if constexpr (T::kQueriesInRegisters && T::kQueriesInShared) {
      fence_async_proxy();  // as above
      supply.free_queries();
    }
  }

  __device__ __forceinline__ void first_scores(const RowKeys<T>& keys, int block) {
    supply.wait_full(supply.ring);
    hold(scores);
    wgmma_fence();
    issue_scores<T>(queries, query_words, supply.block_at(supply.ring), scores);
    wgmma_commit();
    wgmma_wait<0>();
    hold(scores);
    supply.free_block(supply.ring);
    supply.ring.advance(call.blocks);
    keys.cap(call, scores);
    keys.hide(call, row_in_group, lane, block, scores);
    find_maxima<T>(call.scale_log2, scores, rows, scales);
    exponentiate<T>(call.scale_log2, scores, rows, scales);
    pack_weights<T>(scores, weights);
    empty_acc = true;
  }

  // Scores of `block`, and the values of the block after it. kNewSplit: that one was the first of
  // its split. kHides: a mask may cut `block`.
  template <bool kNewSplit, bool kHides>
  __device__ __forceinline__ void step(int turn, const RowKeys<T>& keys, int block) {
    const Ring k_at = supply.take();
    const Ring v_at = supply.take();
    if constexpr (!T::kWaitsLast) {
      supply.wait_full(k_at);
    }
    supply.wait_full(v_at);
    hold(scores);
    hold(acc);
    hold(weights);
    [[maybe_unused]] const float last_factor[2] = {scales.factor[T::kSteps - 1][0],
                                                   scales.factor[T::kSteps - 1][1]};
    supply.await_turn();
    wgmma_fence();
    issue_scores<T>(queries, query_words, supply.block_at(k_at), scores);
    wgmma_commit();
    issue_values<T>(supply.block_at(v_at), 0, weights, !empty_acc, acc);
    wgmma_commit();
    supply.end_turn();
    wgmma_wait<1>();
    hold(scores);
    supply.free_block(k_at);
    if constexpr (kNewSplit) {
      done = rows;
      rows = RowState{};
    }
    keys.cap(call, scores);
    if constexpr (kHides) {
      keys.hide(call, row_in_group, lane, block, scores);
    }
    find_maxima<T>(call.scale_log2, scores, rows, scales);
    if constexpr (T::kSteps == 2) {
      wgmma_wait<0>();
      hold(acc);
      rescale(acc, last_factor);
      hold(acc);
      wgmma_fence();
      issue_values<T>(supply.block_at(v_at), 1, weights, true, acc);
      wgmma_commit();
    }
    [[maybe_unused]] WaitingLines<T> lines{};
    if constexpr (kNewSplit) {
      lines = find_lines(turn);  // as part of the softmax: the products are under way
    }
    exponentiate<T>(call.scale_log2, scores, rows, scales);
    if constexpr (T::kWaitsLast) {
      supply.wait_full_after(rows.sum, supply.ring);  // the next keys, or the last values
    }
    wgmma_wait<0>();
    hold(acc);
    hold(weights);
    supply.free_block(v_at);
    if constexpr (kNewSplit) {
      pack_weights<T>(scores, weights);  // leaves the registers of the scores to the merge
      keep_state(turn, lines);
      empty_acc = true;
    } else {
      rescale(acc, scales.factor[0]);
      empty_acc = false;
      pack_weights<T>(scores, weights);
    }
  }

  // The values of the first block, and the merge of the first split.
  __device__ __forceinline__ void last_values(int turn, int hidden_before) {
    const WaitingLines<T> lines = find_lines(turn);
    supply.wait_full(supply.ring);
    hold(acc);
    hold(weights);
    wgmma_fence();
    issue_values<T>(supply.block_at(supply.ring), 0, weights, !empty_acc, acc);
    wgmma_commit();
    [[maybe_unused]] float4 far[T::kLastFarLoads];  // the registers of scores and Q are free
    if constexpr (T::kWaitsInLines) {
#pragma unroll
      for (int j = 0; j < T::kLastFarLoads; ++j) {
        far[j] = load_four_if(lines.whole && waiting.any, lines.at(j));
      }
    }
    wgmma_wait<0>();
    hold(acc);
    if constexpr (T::kSteps == 2) {
      rescale(acc, scales.factor[1]);
      hold(acc);
      wgmma_fence();
      issue_values<T>(supply.block_at(supply.ring), 1, weights, true, acc);
      wgmma_commit();
      wgmma_wait<0>();
      hold(acc);
    }
    supply.free_block(supply.ring);
    supply.ring.advance(call.blocks);
    if (hidden_before > 0) {
      supply.pass_steps(hidden_before - 1);
      supply.pass(1);
    }
    const RowWeights merge_weights = merge_rows<T>(call, waiting, rows);
    if (waiting.any) {
      if (T::kWaitsInLines && lines.whole) {
        if constexpr (T::kWaitsInLines) {
          merge_lines<T, false>(waiting, lines, merge_weights, far, acc);
        }
      } else {
        find_out(turn);
        merge_waiting<T, false>(waiting, merge_weights, acc);
      }
    }
    __syncwarp();  // the rows of the output are free
  }

  // A split is done: the state of the later ones is merged into it and kept with it.
  __device__ __forceinline__ void keep_state(int turn, const WaitingLines<T>& lines) {
    const RowWeights merge_weights = merge_rows<T>(call, waiting, done);
    if (T::kWaitsInLines && lines.whole) {
      if constexpr (T::kWaitsInLines) {
        if (waiting.any) {
          float4 far[T::kFarLoads];
#pragma unroll
          for (int j = 0; j < T::kFarLoads; ++j) {
            far[j] = load_four(lines.at(j));
          }
          merge_lines<T, true>(waiting, lines, merge_weights, far, acc);
        } else {
          keep_in_lines<T>(waiting, lines, acc);
        }
      }
    } else {
      find_out(turn);
      merge_waiting<T, true>(waiting, merge_weights, acc);
    }
    waiting.rows = done;
    waiting.any = true;
  }

  __device__ __forceinline__ void find_out(int turn) {
    if constexpr (Waiting<T>::kUsesOut) {
      const Work work = ends.work_of(turn);
      waiting.out_columns = call.head_dim_v / 8;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        typename T::Element* const row = ends.out_row(work, r);
        waiting.out[r] = row == nullptr ? nullptr : reinterpret_cast<float*>(row) + lane % 4 * 2;
      }
    }
  }

  __device__ __forceinline__ WaitingLines<T> find_lines(int turn) const {
    WaitingLines<T> lines{};
    if constexpr (T::kWaitsInLines) {
      const Work work = ends.work_of(turn);
      const int row = work.first_row + group * kGroupRows + thread / 32 * 16;
      const bool all_heads = call.group == 1 << call.group_bits;
      lines.whole =
          __all_sync(~0u, all_heads && row + 16 <= work.rows && call.head_dim_v == T::kHeadDimV);
      const auto bytes_to = [&](int rows) {
        return static_cast<int64_t>(sizeof(typename T::Element)) *
               ends.offset(rows, call.out_row_stride, call.out_head_stride);
      };
      lines.four_rows = bytes_to(4);  // from a multiple of 16 rows and up to 3: heads do not carry
      lines.eight_rows = bytes_to(8);
      lines.first = reinterpret_cast<char*>(ends.row_of_out(work, row + lane / 8)) + lane % 8 * 16;
    }
    return lines;
  }
};

template <typename T>
__device__ __forceinline__ void consume(const FwdCall& call, uint32_t shared, int group) {
  Consumer<T>(call, shared, group).run();
}

}  // namespace fad::sm90
