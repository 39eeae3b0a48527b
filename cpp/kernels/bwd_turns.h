// Who adds to a gradient when. A CTA works on one key block of one head and adds to every row block
// of dq that sees it; the query heads of a group add to one dk and dv. Sums in fp32 depend on the
// order, so each has one: dq of a row block takes key blocks first to last, dk and dv of a key
// block take query heads first to last. A CTA has a whole head to itself, or waits for its turn.
//
// Nothing here can wait forever: a CTA waits only for CTAs with a smaller ticket (key blocks below
// its own, or heads before its own at its own key block), tickets are handed out as CTAs start, and
// the CTA with the smallest ticket that has not ended waits for nobody. How many CTAs fit on the
// GPU, and what else runs there, plays no part.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"  // upstream
#include "params.h"
#include "row_block.h"

namespace fad {

__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Waits until a counter is at least as high as wanted, and returns it. In assembly, as a short loop
// sees the new value sooner.
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

// Blocks of all sequences before this one, without knowing their lengths: packed sequences may
// leave a block unused each.
__device__ __forceinline__ int64_t blocks_before(const int* cu_seqlens, int bidb, int seqlen,
                                                 int block) {
  return cu_seqlens == nullptr ? static_cast<int64_t>(bidb) * num_blocks(seqlen, block)
                               : static_cast<int64_t>(cu_seqlens[bidb] / block) + bidb;
}

// A row block; grids have one dimension, as y and z stop at 65535.
struct RowPlace {
  int bidb, bidh, m_block;
};

template <int kBlockM, typename Params>
__device__ __forceinline__ RowPlace row_place(const Params& params) {
  const int num_m_blocks = num_blocks(params.seqlen_q, kBlockM);
  const int head = blockIdx.x / num_m_blocks;
  return {head / params.h, head % params.h, static_cast<int>(blockIdx.x) - head * num_m_blocks};
}

// Where a row block of dq is added up, in fp32. The rows of a head stand together, like its row
// sums: their distance is then a constant, which saves upstream's loop 79 of 926 instructions (head
// dim 128), and 2 to 5 % of the time.
template <typename Traits, typename Params, typename BlockInfo>
__device__ __forceinline__ auto dq_sums(const Params& params, const BlockInfo& info, int bidb,
                                        int bidh, int m_block) {
  const int64_t before =
      params.cu_seqlens_q == nullptr
          ? (static_cast<int64_t>(bidb) * params.h + bidh) * params.seqlen_q_rounded
          : bidh * (params.total_q + 128ll * params.b) + info.sum_s_q + 128ll * bidb;
  float* const sums = static_cast<float*>(params.dq_accum_ptr) +
                      (before + m_block * Traits::kBlockM) * Traits::kHeadDim;
  return cute::make_tensor(cute::make_gmem_ptr(sums),
                           cute::Shape<cute::Int<Traits::kBlockM>, cute::Int<Traits::kHeadDim>>{},
                           cute::Stride<cute::Int<Traits::kHeadDim>, cute::_1>{});
}

// How far a CTA has come, as its counter tells it: row blocks go last to first, counters go up.
__device__ __forceinline__ unsigned progress(int m_block) { return 0x40000000u - m_block; }

// What a CTA works on, and what it needs to know for its turns. It waits in shared memory: what sat
// in registers beside upstream's loop over row blocks cost a fifth of the time. Aligned, so that
// the tiles that follow it in shared memory are, too: tiles 16 bytes off cost 2 %.
struct alignas(128) BwdPlace {
  int bidb, bidh, n_block;
  unsigned* counter;               // of this key block
  const unsigned* counter_before;  // of the key block before
  int free_above;  // row blocks from here on may be added to, as far as this CTA knows
};

__device__ __forceinline__ BwdPlace& shared_place() {
  __shared__ BwdPlace place;
  return place;
}

// Looks once how far the key block before has come, if that is not known to be far enough.
__device__ __forceinline__ void ask(int m_block) {
  BwdPlace& place = shared_place();
  // Volatile, so that it stays this thread's: the compiler would have all of them read it.
  volatile int& free_above = place.free_above;
  if (m_block < free_above) {
    free_above = progress(load_acquire(place.counter_before));  // its own inverse
  }
}

// Waits until the key block before has come far enough. A call: with another loop inside it,
// upstream's loop over row blocks is no longer an innermost one, and ptxas schedules it worse (5
// %).
static __device__ __noinline__ void wait(int m_block) {
  BwdPlace& place = shared_place();
  if (m_block < place.free_above) {
    place.free_above = progress(wait_for(place.counter_before, progress(m_block)));
  }
}

// Takes the next place: a head if a CTA works on whole heads, else a key block. Key blocks come in
// order, those of several heads side by side, and of the heads the first ones of all groups come
// before the second ones: so those who wait for each other don't start together.
template <typename Traits, bool kLocal>
__device__ __forceinline__ void take_place(const BwdParams& params) {
  if (threadIdx.x == 0) {
    const unsigned ticket = atomicAdd(params.tickets, 1u);
    const unsigned num_n_blocks =
        params.whole_heads ? 1 : num_blocks(params.seqlen_k, Traits::kBlockN);
    const unsigned heads = static_cast<unsigned>(params.b) * params.h;
    const unsigned first =
        ticket / (params.heads_in_flight * num_n_blocks) * params.heads_in_flight;
    const unsigned beside = min(static_cast<unsigned>(params.heads_in_flight), heads - first);
    const unsigned rest = ticket - first * num_n_blocks;
    const unsigned head = first + rest % beside;
    BwdPlace& place = shared_place();
    place.bidb = head / params.h;
    const int turn = head % params.h;
    place.bidh = turn % params.h_k * params.h_h_k_ratio + turn / params.h_k;
    place.n_block = rest / beside;
    if constexpr (Traits::kInTurns) {
      place.counter = params.progress + place.bidh +
                      params.h * (blocks_before(params.cu_seqlens_k, place.bidb, params.seqlen_k,
                                                Traits::kBlockN) +
                                  place.n_block);
      place.counter_before = place.counter - params.h;
      place.free_above = 0;
      if (params.in_turns && place.n_block > 0) {
        place.free_above = num_blocks(params.seqlen_q, Traits::kBlockM);
        if (kLocal) {
          // The end of upstream's range of row blocks (m_block_max) of the key block before: rows
          // further down see neither it nor any key block before it.
          const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, place.bidb);
          const int rows = place.n_block * Traits::kBlockN + info.actual_seqlen_q -
                           info.actual_seqlen_k + params.window_size_left;
          place.free_above = min(place.free_above, num_blocks(max(rows, 0), Traits::kBlockM));
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

// The turns of one CTA, which walks row blocks last to first. After each it tells how far it is;
// before each it waits, unless it knows that the key block before has been there. Patches call
// these hooks from upstream's kernel:
//
//   pass    after the barrier that follows the adding to the row block before
//   await   before a barrier that comes before the adding to this row block
//   finish  at the end; says whether dk and dv are whole and this CTA's to write
//
// What takes long has half a step to do so: telling waits until all has arrived that the CTA has
// added, asking for an answer. Two warps do it, which the others then need not wait for.
template <typename Traits>
struct Turns {
  __device__ __forceinline__ static void pass(const BwdParams& params, int m_block) {
    if constexpr (Traits::kInTurns) {
      if (params.in_turns && threadIdx.x == 0) {
        store_release(shared_place().counter, progress(m_block + 1));
      }
      if (params.in_turns && threadIdx.x == kAsking) {
        ask(m_block);
      }
    }
  }

  __device__ __forceinline__ static void await(const BwdParams& params, int m_block) {
    if constexpr (Traits::kInTurns) {
      if (params.in_turns && threadIdx.x == kAsking) {
        wait(m_block);
      }
    }
  }

  template <typename Acc>
  __device__ __forceinline__ static bool finish(const BwdParams& params, Acc& acc_dk, Acc& acc_dv) {
    if constexpr (Traits::kInTurns) {
      __syncthreads();
      if (params.in_turns && threadIdx.x == 0) {
        store_release(shared_place().counter, progress(0));
      }
    }
    const int group = params.h_h_k_ratio;
    if (group == 1) {
      return true;
    }
    const BwdPlace& place = shared_place();
    const int head = place.bidh % group;
    const int64_t block =
        (blocks_before(params.cu_seqlens_k, place.bidb, params.seqlen_k, Traits::kBlockN) +
         place.n_block) *
            params.h_k +
        place.bidh / group;
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

 private:
  static constexpr int kAsking = Traits::kNThreads - 32;  // a thread of the last warp
};

}  // namespace fad
