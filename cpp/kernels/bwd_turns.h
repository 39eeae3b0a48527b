// Who adds to a gradient when. A CTA works on one key block of one head and adds to every row block
// of dq that sees it; the query heads of a group add to one dk and dv. Sums in fp32 depend on the
// order, so each has one: dq of a row block takes key blocks first to last, dk and dv of a key
// block take query heads first to last, and a CTA waits for its turn.
//
// Nothing here can wait forever: a CTA waits only for CTAs with a smaller ticket (key blocks below
// its own, or heads before its own at its own key block), tickets are handed out as CTAs start, and
// the CTA with the smallest ticket that has not ended waits for nobody. How many CTAs fit on the
// GPU, and what else runs there, plays no part.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"  // upstream
#include "params.h"

namespace fad {

__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void wait_until(const unsigned* address, unsigned value) {
  while (load_acquire(address) != value) {
  }
}

// Blocks of all sequences before this one, without knowing their lengths: packed sequences may
// leave a block unused each.
__device__ __forceinline__ int64_t blocks_before(const int* cu_seqlens, int bidb, int seqlen,
                                                 int block) {
  return cu_seqlens == nullptr ? static_cast<int64_t>(bidb) * ((seqlen + block - 1) / block)
                               : static_cast<int64_t>(cu_seqlens[bidb] / block) + bidb;
}

// A row block; grids have one dimension, as y and z stop at 65535.
struct RowPlace {
  int bidb, bidh, m_block;
};

template <int kBlockM, typename Params>
__device__ __forceinline__ RowPlace row_place(const Params& params) {
  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const int head = blockIdx.x / num_m_blocks;
  return {head / params.h, head % params.h, static_cast<int>(blockIdx.x) - head * num_m_blocks};
}

// What a CTA works on, and what it needs to know for its turns. It waits in shared memory: what sat
// in registers beside upstream's loop over row blocks cost a fifth of the time.
struct BwdPlace {
  int bidb, bidh, n_block;
  int window_start;     // queries before the first that sees key 0, if the window is limited
  unsigned* row_turns;  // of the head's first row block
};

__device__ __forceinline__ BwdPlace& shared_place() {
  __shared__ BwdPlace place;
  return place;
}

// Takes the next place: key blocks in order, several heads side by side, so that those who wait for
// each other don't start together.
template <typename Traits>
__device__ __forceinline__ void take_place(const BwdParams& params) {
  if (threadIdx.x == 0) {
    const unsigned ticket = atomicAdd(params.tickets, 1u);
    const unsigned num_n_blocks = (params.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN;
    const unsigned heads = static_cast<unsigned>(params.b) * params.h;
    const unsigned first =
        ticket / (params.heads_in_flight * num_n_blocks) * params.heads_in_flight;
    const unsigned beside = min(static_cast<unsigned>(params.heads_in_flight), heads - first);
    const unsigned rest = ticket - first * num_n_blocks;
    const unsigned head = first + rest % beside;
    BwdPlace& place = shared_place();
    place.bidb = head / params.h;
    place.bidh = head % params.h;
    place.n_block = rest / beside;
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, place.bidb);
    place.window_start = info.actual_seqlen_q - info.actual_seqlen_k + params.window_size_left;
    place.row_turns =
        params.row_turns + place.bidh +
        params.h * blocks_before(params.cu_seqlens_q, place.bidb, params.seqlen_q, Traits::kBlockM);
  }
  __syncthreads();
}

// The turns of one CTA. A turn is a group of 2^turn_shift row blocks, which the CTA walks last to
// first: few turns cost little, many turns let the next CTA follow closely. Patches call these
// hooks from upstream's kernel:
//
//   await   before adding to dq of a row block; waits at the first one of a group
//   pass    after a barrier that follows the adding; passes the turn on after the last one
//   finish  at the end; says whether dk and dv are whole and this CTA's to write
template <typename Traits, bool kLocal>
struct Turns {
  __device__ __forceinline__ static void await(const BwdParams& params, int m_block,
                                               int first_m_block) {
    const int last = (1 << params.turn_shift) - 1;
    if (params.in_turns && (m_block == first_m_block || (m_block & last) == last) &&
        threadIdx.x == Traits::kNThreads - 32) {
      wait_until(row_turn(params, m_block), turn(params, m_block));
    }
  }

  __device__ __forceinline__ static void pass(const BwdParams& params, int m_block, bool at_end) {
    if (params.in_turns && (at_end || (m_block & ((1 << params.turn_shift) - 1)) == 0) &&
        threadIdx.x == 0) {
      store_release(row_turn(params, m_block), turn(params, m_block) + 1);
    }
  }

  template <typename Acc>
  __device__ __forceinline__ static bool finish(const BwdParams& params, int last_m_block,
                                                Acc& acc_dk, Acc& acc_dv) {
    const int group = params.h_h_k_ratio;
    if (params.in_turns || group > 1) {
      __syncthreads();
      pass(params, last_m_block, /*at_end=*/true);
    }
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
        wait_until(params.key_turns + block, head);
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
  __device__ __forceinline__ static unsigned* row_turn(const BwdParams& params, int m_block) {
    return shared_place().row_turns + (m_block >> params.turn_shift) * params.h;
  }

  // Key blocks of a group of row blocks before this one. With a window the first is where
  // upstream's m range of a key block (m_block_max) begins to reach into the group.
  __device__ __forceinline__ static unsigned turn(const BwdParams& params, int m_block) {
    const BwdPlace& place = shared_place();
    if constexpr (!kLocal) {
      return place.n_block;
    }
    const int lowest = m_block >> params.turn_shift << params.turn_shift;
    const int begin = lowest * Traits::kBlockM - place.window_start;
    return place.n_block - (begin > 0 ? begin / Traits::kBlockN : 0);
  }
};

}  // namespace fad
