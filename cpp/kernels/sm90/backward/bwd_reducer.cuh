// The warps that add a row block's dq to its sums, so that the warps that compute need not wait. In
// deterministic calls they add in turns.
#pragma once

#include "bwd_tile.h"
#include "bwd_walk.h"

namespace fad::sm90 {

// Denormals are flushed, as by upstream's atomicAdd; the copy engine's add would keep them.
__device__ __forceinline__ void add_to(float* address, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// What a key block waits for. In shared memory, to save registers; only one thread uses it.
struct KeyTurns {
  unsigned* counter;  // of this key block; that of the one before lies params.h before it
  // From this row block on, the key block before has added, or will not add: no need to wait.
  int free_above;
  int m_block;  // that is added to next
};

__device__ __forceinline__ void write_turns(uint32_t at, const KeyTurns& turns) {
  const auto counter = reinterpret_cast<uint64_t>(turns.counter);
  store_shared_ints(at, make_int4(static_cast<int>(counter), static_cast<int>(counter >> 32),
                                  turns.free_above, turns.m_block));
}

__device__ __forceinline__ KeyTurns read_turns(uint32_t at) {
  const int4 turns = load_shared_ints(at);
  const uint64_t counter =
      static_cast<uint64_t>(static_cast<unsigned>(turns.y)) << 32 | static_cast<unsigned>(turns.x);
  return {reinterpret_cast<unsigned*>(counter), turns.z, turns.w};
}

template <typename T>
__device__ __forceinline__ void start_turns(const BwdParams& params, const BwdWork& work, int end,
                                            uint32_t at) {
  KeyTurns turns{progress_of(params, work, T::kKeys), 0, end - 1};
  if (work.n_block > 0) {
    turns.free_above = min(
        num_blocks(params.seqlen_q, T::kRows),
        row_blocks_end(params, work.seqlen_q, work.seqlen_k, work.n_block - 1, T::kRows, T::kKeys));
  }
  write_turns(at, turns);
}

// Waits until the key block before has added to the next row block, then steps to the one after.
__device__ __forceinline__ void await_turn(const BwdParams& params, uint32_t at) {
  KeyTurns turns = read_turns(at);
  if (turns.m_block < turns.free_above) {
    turns.free_above = progress(wait_for(turns.counter - params.h, progress(turns.m_block)));
  }
  --turns.m_block;
  write_turns(at, turns);
}

// One warp: publishes which row blocks have been added to. A release waits until the adds before it
// have reached memory; a warp of its own lets the adds of the next row block run meanwhile.
template <typename T>
__device__ __forceinline__ void end_turns(const BwdParams& params, uint32_t shared) {
  if (!params.in_turns) {
    return;
  }
  const BwdWork work = read_bwd_work(shared + T::kWorkAt);
  const auto [begin, end] = row_blocks<T>(params, work);
  unsigned* const counter = progress_of(params, work, T::kKeys);
#pragma unroll 1
  for (int m_block = end - 1; m_block >= begin; --m_block) {
    named_barrier_sync(kRowBlockAdded, T::kReducers + 32);
    if (read_thread() % 32 == 0) {
      store_release(counter, progress(m_block == begin ? 0 : m_block));
    }
    __syncwarp();
  }
}

// Each of the two warps adds one part of a row block.
template <typename T>
__device__ __forceinline__ void add_dq(const BwdParams& params, uint32_t shared) {
  static_assert(T::kReducers == 32 * T::kGroups && T::kStages == 2);
  const int part = threadIdx.x / 32 % T::kGroups;
  const int lane = threadIdx.x % 32;
  const int first_row = lane / 16;
  const int column = (T::kSplitsRows ? 0 : 64 * part) + lane % 16 * 4;
  const auto leads = [] { return read_thread() % T::kReducers == 0; };  // saves registers
  const BwdWork work = read_bwd_work(shared + T::kWorkAt);
  const auto [begin, end] = row_blocks<T>(params, work);
  if (params.in_turns && leads()) {
    start_turns<T>(params, work, end, shared + T::kTurnsAt);
  }
  float* sums = static_cast<float*>(params.dq_accum_ptr) +
                (sum_rows_before(params, work.q_row, work.bidb, work.bidh) + end * T::kRows + 64 +
                 (T::kSplitsRows ? 64 * part : 0) + first_row) *
                    T::kHeadDim +
                column;
  // Rows of 256 bytes, swizzled by their place among eight.
  const uint32_t first = shared + T::kDqAt + part * T::kDqPartBytes + first_row * 256 +
                         (lane % 16 ^ (2 * first_row)) * 16;
  const int count = end - begin;
#pragma unroll 1
  for (int turn = 0; turn < count; ++turn) {
    sums -= (T::kRows + 64) * T::kHeadDim;
    if (params.in_turns) {
      if (leads()) {
        await_turn(params, shared + T::kTurnsAt);
      }
      named_barrier_sync(kReducersMeet, T::kReducers);
    }
    barrier_wait(shared + T::kDqFull + 8 * (turn & 1), turn >> 1 & 1);
    uint32_t from = first + (turn & 1) * T::kDqBytes;
#pragma unroll 1
    for (int row = 0; row < 64; row += 2 * T::kAddsAtOnce) {
      if (T::kHeadDim % 64 == 0 || column < T::kHeadDim) {
#pragma unroll
        for (int i = 0; i < T::kAddsAtOnce; ++i) {
          add_to(sums + 2 * i * T::kHeadDim, load_shared((from ^ (i * 64)) + i * 512));
        }
      }
      from = (from ^ (T::kAddsAtOnce * 64 % 256)) + T::kAddsAtOnce * 512;
      sums += 2 * T::kAddsAtOnce * T::kHeadDim;
    }
    __syncwarp();  // lanes without columns have skipped the adds
    barrier_arrive(shared + T::kDqEmpty + 8 * (turn & 1));
    if (params.in_turns) {
      named_barrier_sync(kRowBlockAdded, T::kReducers + 32);
    }
  }
}

// A key block that no row sees. A later one may still wait for it. A counter says that this key
// block and all before it have added, hence the wait; it is short, as the key blocks before that
// still work are ones that some row sees. One thread.
template <typename T>
__device__ __forceinline__ void pass_turns(const BwdParams& params, const KeyPlace& place) {
  if (params.in_turns) {
    unsigned* const counter = progress_of(params, place, T::kKeys);
    if (place.n_block > 0) {
      wait_for(counter - params.h, progress(0));
    }
    store_release(counter, progress(0));
  }
}

}  // namespace fad::sm90
