// The walk over leaves (tree/key_tree.h) and the turns (turns.h) around and inside upstream's
// backward, which adds up one leaf.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

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

// Where a row block of dq is added up, in fp32. The row blocks of a head are contiguous, like its
// row sums: their distance is then a constant, which saves upstream's loop 79 of 926 instructions
// (head dim 128), and 2 to 5 % of the time.
template <typename Traits, typename Layout, typename Params, typename BlockInfo>
__device__ __forceinline__ auto dq_tile(Layout layout, const Params& params, const BlockInfo& info,
                                        int bidb, int bidh, int m_block) {
  const int64_t before = sum_rows_before(params, info.sum_s_q, bidb, bidh);
  float* const sums = static_cast<float*>(params.dq_accum_ptr) +
                      (before + m_block * Traits::kBlockM) * Traits::kHeadDim;
  return cute::make_tensor(cute::make_gmem_ptr(sums), layout);
}

// In any order, to be cleared.
template <typename Traits, typename... Arguments>
__device__ __forceinline__ auto dq_words(const Arguments&... arguments) {
  return dq_tile<Traits>(
      cute::Layout<cute::Shape<cute::Int<Traits::kBlockM>, cute::Int<Traits::kHeadDim>>,
                   cute::Stride<cute::Int<Traits::kHeadDim>, cute::_1>>{},
      arguments...);
}

// Upstream gives a thread one column in 32 of one row in 8. Up to four of a row are neighbours
// here, so that they are read and written together.
template <typename Traits>
constexpr int kDqTogether = Traits::kHeadDim % 128 == 0 ? 4
                            : Traits::kHeadDim == 64    ? 2
                                                        : 1;

template <typename Traits, typename... Arguments>
__device__ __forceinline__ auto dq_sums(const Arguments&... arguments) {
  using cute::Int;
  using cute::Shape;
  using cute::Stride;
  constexpr int kTogether = kDqTogether<Traits>;
  using Rows = Shape<cute::_8, Int<Traits::kBlockM / 8>>;
  using RowStrides = Stride<Int<Traits::kHeadDim>, Int<8 * Traits::kHeadDim>>;
  using Columns = Shape<cute::_32, Shape<Int<kTogether>, Int<Traits::kHeadDim / 32 / kTogether>>>;
  using ColumnStrides = Stride<Int<kTogether>, Stride<cute::_1, Int<32 * kTogether>>>;
  return dq_tile<Traits>(cute::Layout<Shape<Rows, Columns>, Stride<RowStrides, ColumnStrides>>{},
                         arguments...);
}

// What a CTA works on, and the state of its turns. In shared memory: held in registers beside
// upstream's loop over row blocks it cost a fifth of the time. Aligned to 128 bytes, as upstream's
// tiles follow it in shared memory: tiles 16 bytes off cost 2 %.
struct alignas(128) BwdPlace : KeyPlace {
  RowBlocks blocks;  // of the part
  RowBlocks rows;    // of the leaf
  int chunk, head;   // of the leaf, counted in the whole call
  int seqlen_q, seqlen_k;
  int slot;
  // Row blocks from here on are free: the key block before has added to them, or never will. Grows
  // downwards as the CTA reads the counter.
  int free_above;
  int steps;                       // see steps_before
  unsigned* counter;               // of this key block
  const unsigned* counter_before;  // of the key block before
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
    free_above = place.steps - static_cast<int>(load_acquire(place.counter_before));
  }
}

// Waits until row block m_block is free. Not inlined: with another loop inside it, upstream's loop
// over row blocks is no innermost loop any more, and ptxas schedules it 5 % slower.
static __device__ __noinline__ void wait(int m_block) {
  BwdPlace& place = shared_place();
  if (m_block < place.free_above) {
    place.free_above =
        place.steps - static_cast<int>(wait_for(place.counter_before, place.steps - m_block));
  }
}

// The leaf of place.chunk and place.head. One thread.
template <typename Traits>
__device__ __forceinline__ void take_leaf(const BwdParams& params, BwdPlace& place) {
  place.rows = leaf_row_blocks(place.blocks, place.chunk, Traits::kBlockM);
  place.steps = steps_before(place.seqlen_q, params.h_h_k_ratio, place.chunk,
                             place.head % params.h_h_k_ratio, Traits::kBlockM);
  place.free_above = place.n_block == 0
                         ? 0
                         : row_blocks_end(params, place.seqlen_q, place.seqlen_k, place.n_block - 1,
                                          Traits::kBlockM, Traits::kBlockN);
}

// Draws a ticket, and takes the part and the first leaf that belong to it.
template <typename Traits>
__device__ __forceinline__ void take_place(const BwdParams& params) {
  if (threadIdx.x == 0) {
    const unsigned ticket = atomicAdd(params.tickets, 1u);
    BwdPlace& place = shared_place();
    static_cast<KeyPlace&>(place) =
        place_of_ticket(params, ticket, num_blocks(params.seqlen_k, Traits::kBlockN));
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, place.bidb);
    place.seqlen_q = info.actual_seqlen_q;
    place.seqlen_k = info.actual_seqlen_k;
    place.blocks = part_row_blocks(params, place, place.seqlen_q, place.seqlen_k, Traits::kBlockM,
                                   Traits::kBlockN);
    place.slot = take_slot(params, ticket, place, Traits::kBlockN);
    place.counter = progress_of(params, place, Traits::kBlockN);
    place.counter_before = progress_before(params, place.counter);
    place.chunk = max(place.blocks.end - 1, 0) / (kChunkRows / Traits::kBlockM);
    place.head = place.head_k * params.h_h_k_ratio + first_head(params, place);
    take_leaf<Traits>(params, place);
  }
  __syncthreads();
}

// Goes on to the part's next leaf, if there is one.
template <typename Traits>
__device__ __forceinline__ bool next_leaf(const BwdParams& params) {
  __syncthreads();
  if (threadIdx.x == 0) {
    BwdPlace& place = shared_place();
    if ((place.head + 1) % params.parts.heads != 0) {
      ++place.head;
    } else {
      place.head -= params.parts.heads - 1;
      --place.chunk;
    }
    take_leaf<Traits>(params, place);
  }
  __syncthreads();
  const BwdPlace& place = shared_place();
  const bool more = place.rows.begin < place.rows.end;
  if (!more && threadIdx.x == 0) {
    free_slot(params, place.slot);
  }
  return more;
}

// The turns of one CTA, which walks row blocks last to first. After each it publishes how far it
// is; before each it waits, unless it knows that the key block before has been there. Patches call
// these from upstream's kernel:
//
//   nothing  of a key block that no row sees: whether its zeros have been written
//   pass     after the barrier that follows the adding to the row block before
//   await    before a barrier that comes before the adding to this row block
//   read     behind that barrier: what dq holds
//   add      to dq
//   finish   at the end of a leaf; returns whether dk and dv are complete and to be rounded
//
// What takes long overlaps half a step of the loop: the release waits until all that the CTA has
// added has arrived, the look for an answer from L2. One thread each of two warps does it, so that
// the other warps go on.
template <typename Traits>
struct Turns {
  __device__ __forceinline__ static RowBlocks rows() { return shared_place().rows; }

  __device__ __forceinline__ static void pass(int m_block) {
    if constexpr (Traits::kInTurns) {
      if (threadIdx.x == 0) {
        publish(m_block + 1);
      }
      if (threadIdx.x == kLooking) {
        look(m_block);
      }
    }
  }

  __device__ __forceinline__ static void await(int m_block) {
    if constexpr (Traits::kInTurns) {
      if (threadIdx.x == kLooking) {
        wait(m_block);
      }
    }
  }

  // Early, so that the answers come while dq of this key block is computed.
  template <typename Sums, typename Acc>
  __device__ __forceinline__ static auto read(const Sums& sums, const Acc& acc) {
    auto before = cute::make_fragment_like(acc);
    if constexpr (Traits::kInTurns) {
      each_together(acc, [&](int i) {
        const Together together = __ldcg(reinterpret_cast<const Together*>(&sums(i)));
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          before(i + j * kApart) = reinterpret_cast<const float*>(&together)[j];
        }
      });
    }
    return before;
  }

  template <typename Sums, typename Acc>
  __device__ __forceinline__ static void add(Sums& sums, const Acc& before, const Acc& acc) {
    if constexpr (Traits::kInTurns) {
      each_together(acc, [&](int i) {
        Together together;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          reinterpret_cast<float*>(&together)[j] =
              add_keeping_denormals(before(i + j * kApart), acc(i + j * kApart));
        }
        __stcg(reinterpret_cast<Together*>(&sums(i)), together);
      });
    } else {
#pragma unroll
      for (int i = 0; i < size(acc); ++i) {
        atomicAdd(&sums(i), acc(i));
      }
    }
  }

  template <typename Acc>
  __device__ __forceinline__ static bool finish(const BwdParams& params, Acc& acc_dk, Acc& acc_dv) {
    const BwdPlace& place = shared_place();
    if constexpr (Traits::kInTurns) {
      __syncthreads();
      if (threadIdx.x == 0) {
        publish(place.rows.begin);
      }
    }
    const int heads = heads_in_order(params), head = place.head % heads;
    const bool passes_on = params.parts.chained > 0;
    const auto kept = [&](int which) {
      return params.slots +
             kept_at(params, place.slot, which, place.chunk) *
                 (2 * Traits::kBlockN * Traits::kHeadDim) +
             threadIdx.x;
    };
    const auto add = [&](int which) {
      if (passes_on && which == 0) {
        if (threadIdx.x == 0) {
          wait_for(heads_added(params, place.slot, place.chunk), head);
        }
        __syncthreads();
      }
      const float* const sums = kept(which);
#pragma unroll
      for (int i = 0; i < size(acc_dk); ++i) {
        acc_dk(i) = add_keeping_denormals(__ldcg(sums + i * Traits::kNThreads), acc_dk(i));
        acc_dv(i) =
            add_keeping_denormals(__ldcg(sums + (i + size(acc_dk)) * Traits::kNThreads), acc_dv(i));
      }
    };
    const auto keep = [&](int which) {
      float* const sums = kept(which);
#pragma unroll
      for (int i = 0; i < size(acc_dk); ++i) {
        __stcg(sums + i * Traits::kNThreads, acc_dk(i));
        __stcg(sums + (i + size(acc_dk)) * Traits::kNThreads, acc_dv(i));
      }
      if (passes_on && which == 0) {
        __syncthreads();
        if (threadIdx.x == 0) {
          store_release(heads_added(params, place.slot, place.chunk), head + 1);
        }
      }
    };
    if (!climb(chunks_of(params, place.blocks, Traits::kBlockM), place.chunk % params.parts.chunks,
               head, heads, add, keep)) {
      return false;
    }
    if (params.dk_sums != nullptr) {
      write_sums(params, acc_dk, acc_dv);
      return false;
    }
#pragma unroll
    for (int i = 0; i < size(acc_dk); ++i) {
      acc_dk(i) = positive_zero(acc_dk(i));
      acc_dv(i) = positive_zero(acc_dv(i));
    }
    return true;
  }

  __device__ __forceinline__ static bool nothing(const BwdParams& params) {
    if (params.dk_sums == nullptr) {
      return false;
    }
    typename Traits::TiledMmadKV mma;
    auto zeros = cute::partition_fragment_C(
        mma, cute::Shape<cute::Int<Traits::kBlockN>, cute::Int<Traits::kHeadDim>>{});
    cute::clear(zeros);
    write_sums(params, zeros, zeros);
    return true;
  }

 private:
  // Neighbouring columns of dq's sums that a thread reads and writes at once, and how far apart it
  // holds them.
  static constexpr int kTogether = kDqTogether<Traits>;
  static constexpr int kApart = Traits::kBlockM / 8;
  using Together =
      std::conditional_t<kTogether == 4, float4, std::conditional_t<kTogether == 2, float2, float>>;

  // Visits the first element of each of these.
  template <typename Acc, typename Visit>
  __device__ __forceinline__ static void each_together(const Acc& acc, Visit visit) {
#pragma unroll
    for (int i = 0; i < size(acc); i += kTogether * kApart) {
#pragma unroll
      for (int row = 0; row < kApart; ++row) {
        visit(i + row);
      }
    }
  }

  // The part's sums of each element of dk and dv that this thread holds.
  template <typename Acc>
  __device__ __forceinline__ static void write_sums(const BwdParams& params, const Acc& acc_dk,
                                                    const Acc& acc_dv) {
    const BwdPlace& place = shared_place();
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, place.bidb);
    const bool packed = info.sum_s_k != -1;
    const int64_t total =
        packed ? params.total_k : static_cast<int64_t>(params.b) * params.seqlen_k;
    const int64_t first =
        place.part * total +
        (packed ? info.sum_s_k : static_cast<int64_t>(place.bidb) * params.seqlen_k);
    typename Traits::TiledMmadKV mma;
    const auto places =
        mma.get_thread_slice(threadIdx.x)
            .partition_C(cute::make_identity_tensor(
                cute::Shape<cute::Int<Traits::kBlockN>, cute::Int<Traits::kHeadDim>>{}));
#pragma unroll
    for (int i = 0; i < size(acc_dk); ++i) {
      const int key = place.n_block * Traits::kBlockN + cute::get<0>(places(i));
      const int column = cute::get<1>(places(i));
      if (key < place.seqlen_k && column < params.d) {
        const int64_t at = ((first + key) * params.h_k + place.head_k) * params.d + column;
        params.dk_sums[at] = acc_dk(i);
        params.dv_sums[at] = acc_dv(i);
      }
    }
  }

  static constexpr int kLooking = Traits::kNThreads - 32;  // a thread of the last warp

  __device__ __forceinline__ static void publish(int m_block) {
    const BwdPlace& place = shared_place();
    store_release(place.counter, place.steps - m_block);
  }
};

}  // namespace fad
