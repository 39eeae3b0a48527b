// Turns (turns.h) inside upstream's backward. Either one CTA works on all key blocks of a head, or
// CTAs take turns.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"  // upstream
#include "params.h"
#include "row_block.h"
#include "turns.h"

namespace fad {

// The row block of a CTA of the kernels before and after the loop.
template <int kBlockM, typename Params>
__device__ __forceinline__ Place row_place(const Params& params) {
  const int num_m_blocks = num_blocks(params.seqlen_q, kBlockM);
  const int head = blockIdx.x / num_m_blocks;
  return {head / params.h, head % params.h, static_cast<int>(blockIdx.x) - head * num_m_blocks};
}

// Where a row block of dq is added up, in fp32. The rows of a head are contiguous, like its row
// sums: their distance is then a constant, which saves upstream's loop 79 of 926 instructions (head
// dim 128), and 2 to 5 % of the time.
template <typename Traits, typename Params, typename BlockInfo>
__device__ __forceinline__ auto dq_sums(const Params& params, const BlockInfo& info, int bidb,
                                        int bidh, int m_block) {
  const int64_t before = sum_rows_before(params, info.sum_s_q, bidb, bidh);
  float* const sums = static_cast<float*>(params.dq_accum_ptr) +
                      (before + m_block * Traits::kBlockM) * Traits::kHeadDim;
  return cute::make_tensor(cute::make_gmem_ptr(sums),
                           cute::Shape<cute::Int<Traits::kBlockM>, cute::Int<Traits::kHeadDim>>{},
                           cute::Stride<cute::Int<Traits::kHeadDim>, cute::_1>{});
}

// What a CTA works on, and the state of its turns. In shared memory: held in registers beside
// upstream's loop over row blocks it cost a fifth of the time. Aligned to 128 bytes, as upstream's
// tiles follow it in shared memory: tiles 16 bytes off cost 2 %.
struct alignas(128) BwdPlace : KeyPlace {
  unsigned* counter;               // of this key block
  const unsigned* counter_before;  // of the key block before
  // Row blocks from here on are free: the key block before has added to them, or never will. Grows
  // downwards as the CTA reads the counter.
  int free_above;
};

__device__ __forceinline__ BwdPlace& shared_place() {
  __shared__ BwdPlace place;
  return place;
}

// Reads the counter of the key block before once, unless row block m_block is known to be free.
__device__ __forceinline__ void look(int m_block) {
  BwdPlace& place = shared_place();
  // Volatile keeps the read in this thread: the compiler would hoist it to all threads.
  volatile int& free_above = place.free_above;
  if (m_block < free_above) {
    free_above = progress(load_acquire(place.counter_before));
  }
}

// Waits until row block m_block is free. Not inlined: with another loop inside it, upstream's loop
// over row blocks is no innermost loop any more, and ptxas schedules it 5 % slower.
static __device__ __noinline__ void wait(int m_block) {
  BwdPlace& place = shared_place();
  if (m_block < place.free_above) {
    place.free_above = progress(wait_for(place.counter_before, progress(m_block)));
  }
}

// Draws a ticket, and takes the place that belongs to it: a head where CTAs work on whole heads,
// else a key block.
template <typename Traits, bool kLocal>
__device__ __forceinline__ void take_place(const BwdParams& params) {
  if (threadIdx.x == 0) {
    const unsigned ticket = atomicAdd(params.tickets, 1u);
    BwdPlace& place = shared_place();
    static_cast<KeyPlace&>(place) = place_of_ticket(
        params, ticket, params.whole_heads ? 1 : num_blocks(params.seqlen_k, Traits::kBlockN));
    if constexpr (Traits::kInTurns) {
      place.counter = progress_of(params, place, Traits::kBlockN);
      place.counter_before = place.counter - params.h;
      place.free_above = 0;
      if (params.in_turns && place.n_block > 0) {
        place.free_above = num_blocks(params.seqlen_q, Traits::kBlockM);
        if (kLocal) {
          // The end of upstream's range of row blocks (m_block_max) of the key block before: rows
          // further down see neither it nor any key block before it.
          const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, place.bidb);
          place.free_above =
              min(place.free_above,
                  row_blocks_end(params, info.actual_seqlen_q, info.actual_seqlen_k,
                                 place.n_block - 1, Traits::kBlockM, Traits::kBlockN));
        }
      }
    }
  }
  __syncthreads();
}

// Whether the CTA has another key block to work on. Each of its threads adds to the same elements
// of dq every time, so that the key blocks of a whole head need no turns.
template <typename Traits>
__device__ __forceinline__ bool next_place(const BwdParams& params) {
  if (!params.whole_heads) {
    return false;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ++shared_place().n_block;
  }
  __syncthreads();
  return shared_place().n_block * Traits::kBlockN < params.seqlen_k;
}

// The turns of one CTA, which walks row blocks last to first. After each it publishes how far it
// is; before each it waits, unless it knows that the key block before has been there. Patches call
// all but the last of these from upstream's kernel:
//
//   start   once dk and dv are 0: adds what the caller has given
//   pass    after the barrier that follows the adding to the row block before
//   await   before a barrier that comes before the adding to this row block
//   finish  at the end; returns whether dk and dv are complete and this CTA's to write
//   leave   after upstream's kernel, which may have returned early
//
// What takes long overlaps half a step of the loop: the release waits until all that the CTA has
// added has arrived, the look for an answer from L2. One thread each of two warps does it, so that
// the other warps go on.
template <typename Traits>
struct Turns {
  // Whether dk and dv go to sums that the caller keeps.
  __device__ __forceinline__ static bool keeps_sums(const BwdParams& params) {
    return Traits::kMayKeepSums && params.dk_sums != nullptr;
  }

  template <typename Acc>
  __device__ __forceinline__ static void start(const BwdParams& params, Acc& acc_dk, Acc& acc_dv) {
    if (keeps_sums(params)) {
      const auto load = [](const float* sum, float& value) { value = *sum; };
      each_sum(params, params.dk_sums, acc_dk, load);
      each_sum(params, params.dv_sums, acc_dv, load);
    }
  }

  __device__ __forceinline__ static void pass(const BwdParams& params, int m_block) {
    if constexpr (Traits::kInTurns) {
      if (params.in_turns && threadIdx.x == 0) {
        publish(m_block + 1);
      }
      if (params.in_turns && threadIdx.x == kLooking) {
        look(m_block);
      }
    }
  }

  __device__ __forceinline__ static void await(const BwdParams& params, int m_block) {
    if constexpr (Traits::kInTurns) {
      if (params.in_turns && threadIdx.x == kLooking) {
        wait(m_block);
      }
    }
  }

  template <typename Acc>
  __device__ __forceinline__ static bool finish(const BwdParams& params, Acc& acc_dk, Acc& acc_dv) {
    if constexpr (Traits::kInTurns) {
      __syncthreads();
      if (params.in_turns && threadIdx.x == 0) {
        publish(0);
      }
    }
    if (keeps_sums(params)) {
      const auto store = [](float* sum, float value) { *sum = value; };
      each_sum(params, params.dk_sums, acc_dk, store);
      each_sum(params, params.dv_sums, acc_dv, store);
      return false;
    }
    const int group = params.h_h_k_ratio;
    if (group == 1) {
      return true;
    }
    const BwdPlace& place = shared_place();
    const int head = place.bidh % group;
    const int64_t block = group_of(params, place, Traits::kBlockN);
    float* const sums =
        params.key_sums + block * (2 * Traits::kBlockN * Traits::kHeadDim) + threadIdx.x;
    if (head > 0) {
      if (threadIdx.x == 0) {
        wait_for(params.key_turns + block, head);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < size(acc_dk); ++i) {
        acc_dk(i) = __fadd_rn(__ldcg(sums + i * Traits::kNThreads), acc_dk(i));
      }
#pragma unroll
      for (int i = 0; i < size(acc_dv); ++i) {
        acc_dv(i) = __fadd_rn(__ldcg(sums + (i + size(acc_dk)) * Traits::kNThreads), acc_dv(i));
      }
    }
    if (head == group - 1) {
      return true;
    }
#pragma unroll
    for (int i = 0; i < size(acc_dk); ++i) {
      __stcg(sums + i * Traits::kNThreads, acc_dk(i));
    }
#pragma unroll
    for (int i = 0; i < size(acc_dv); ++i) {
      __stcg(sums + (i + size(acc_dk)) * Traits::kNThreads, acc_dv(i));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      store_release(params.key_turns + block, head + 1);
    }
    return false;
  }

  // Upstream's kernel returns early where no row sees the key block, and then has not come to
  // `finish`. A later key block may still wait for this one, so the CTA publishes here. A counter
  // says that this key block and all before it have added, hence the wait; it is short, as the key
  // blocks before that still work are ones that some row sees. Key blocks beyond the end of the
  // sequence publish nothing: all later ones lie there too, and none of them adds to a row.
  __device__ __forceinline__ static void leave(const BwdParams& params) {
    if constexpr (Traits::kInTurns) {
      const BwdPlace& place = shared_place();
      if (params.in_turns && threadIdx.x == 0 && *place.counter != progress(0)) {
        const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, place.bidb);
        if (place.n_block * Traits::kBlockN < info.actual_seqlen_k) {
          if (place.n_block > 0) {
            wait_for(place.counter_before, progress(0));
          }
          publish(0);
        }
      }
    }
  }

 private:
  // Visits the caller's sum of each element of dk or dv that this thread holds.
  template <typename Acc, typename Visit>
  __device__ __forceinline__ static void each_sum(const BwdParams& params, float* sums, Acc& acc,
                                                  Visit visit) {
    const BwdPlace& place = shared_place();
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, place.bidb);
    const int64_t first =
        info.sum_s_k == -1 ? static_cast<int64_t>(place.bidb) * params.seqlen_k : info.sum_s_k;
    typename Traits::TiledMmadKV mma;
    const auto places =
        mma.get_thread_slice(threadIdx.x)
            .partition_C(cute::make_identity_tensor(
                cute::Shape<cute::Int<Traits::kBlockN>, cute::Int<Traits::kHeadDim>>{}));
#pragma unroll
    for (int i = 0; i < size(acc); ++i) {
      const int key = place.n_block * Traits::kBlockN + cute::get<0>(places(i));
      const int column = cute::get<1>(places(i));
      if (key < info.actual_seqlen_k && column < params.d) {
        visit(sums + ((first + key) * params.h + place.bidh) * params.d + column, acc(i));
      }
    }
  }

  static constexpr int kLooking = Traits::kNThreads - 32;  // a thread of the last warp

  __device__ __forceinline__ static void publish(int m_block) {
    store_release(shared_place().counter, progress(m_block));
  }
};

}  // namespace fad
