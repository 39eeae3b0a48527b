// The order in which CTAs add to shared gradients. A CTA works on one key block of one head. It
// adds to every row block of dq that sees its keys, and the query heads of a group add to one dk
// and dv. fp32 sums depend on the order of their terms, so each has a fixed one: a row block of dq
// takes key blocks first to last, a key block of dk and dv takes query heads first to last. Either
// one CTA works on all key blocks of a head, or CTAs take turns: each waits for the key block
// before it.
//
// There is no deadlock. A CTA waits only for CTAs with a smaller ticket (key blocks below its own,
// or earlier heads at its own key block), tickets are drawn as CTAs start, and the CTA with the
// smallest ticket that has not ended waits for no one. This holds however few CTAs fit on the GPU.
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

// The row block of a CTA of the kernels before and after the loop.
template <int kBlockM, typename Params>
__device__ __forceinline__ Place row_place(const Params& params) {
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

// A CTA's counter when it has added to the row blocks from m_block up. Row blocks go last to first,
// counters go up; the function is its own inverse.
__device__ __forceinline__ unsigned progress(int m_block) { return 0x40000000u - m_block; }

// What a CTA works on, and the state of its turns. In shared memory: held in registers beside
// upstream's loop over row blocks it cost a fifth of the time. Aligned to 128 bytes, as upstream's
// tiles follow it in shared memory: tiles 16 bytes off cost 2 %.
struct alignas(128) BwdPlace {
  int bidb, bidh, n_block;
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
// else a key block. Key blocks come in order, those of heads_in_flight heads side by side. The
// first heads of all groups come before the second ones, so that heads of one group, which wait for
// each other at every key block, do not start together.
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

// The turns of one CTA, which walks row blocks last to first. After each it publishes how far it
// is; before each it waits, unless it knows that the key block before has been there. Patches call
// all but the last of these from upstream's kernel:
//
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
  static constexpr int kLooking = Traits::kNThreads - 32;  // a thread of the last warp

  __device__ __forceinline__ static void publish(int m_block) {
    store_release(shared_place().counter, progress(m_block));
  }
};

}  // namespace fad
