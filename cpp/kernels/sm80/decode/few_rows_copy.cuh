// The way of queries, keys and values from memory to the slots of few_rows.cuh.
#pragma once

#include <cute/tensor.hpp>

#include <type_traits>

#include "kernel_traits.h"  // upstream; its other headers lean on this one

#include "few_rows_traits.h"
#include "fp8.h"
#include "sm80/kv_rows.h"
#include "sm80/row_group.cuh"

namespace fad {

// Where keys or values of one head of one sequence lie in memory.
struct KvHead {
  const char* data;
  int64_t row_bytes, page_bytes;

  // Whether 16 bytes can be copied from each row's start on.
  __device__ __forceinline__ bool is_aligned() const {
    return (reinterpret_cast<int64_t>(data) | row_bytes | page_bytes) % 16 == 0;
  }
};

// Pages of a sequence.
struct PageTable {
  const int* pages;
  int page_block_size;

  // The page of a key, and the row there.
  __device__ __forceinline__ int2 find(int key) const {
    const int page = key / page_block_size;
    return make_int2(pages[page], key - page * page_block_size);
  }
};

template <int kElementBytes = 2, typename Info>
__device__ __forceinline__ KvHead kv_head(const FwdParams& params, const Info& info, int bidb,
                                          int head, void* data, int64_t batch_stride,
                                          int64_t row_stride, int64_t head_stride) {
  using Layout = KvRows</*kIndirect=*/true>;
  const int64_t first =
      Layout::offset(params, info, batch_stride, row_stride, bidb) + head * head_stride;
  return {static_cast<const char*>(data) + kElementBytes * first, kElementBytes * row_stride,
          kElementBytes * batch_stride};
}

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Where the rows of a block lie: pages hold a multiple of 16, and each of some lanes has looked up
// 16 of them.
struct BlockPages {
  int2 place;
  int first_lane;

  // Where the 16 rows around this one start. All lanes call together; `mine` is the start of the 16
  // that this lane looked up.
  __device__ __forceinline__ const char* find(const char* mine, int row) const {
    const auto start = reinterpret_cast<unsigned long long>(mine);
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffff, start, first_lane + row / 16));
  }
};

// The pages of a split's blocks, which are counted from the last keys down. The lanes of a warp
// look up several blocks at once and some time before they are copied, as page numbers are loads.
// Entries of the table past the last key may hold anything, and are not read.
template <typename Traits>
struct SplitPages {
  static constexpr int kLanes = Traits::kKeys / 16;  // of a block
  static constexpr int kBlocks = 32 / kLanes;        // looked up at once
  PageTable table;
  int n_min, n_max, seqlen_k;
  int2 even, odd;  // the last two lookups

  __device__ __forceinline__ SplitPages(const FwdParams& params, const RowGroup& rows)
      : table{Traits::kPaged && (!Traits::kFp8 || params.block_table != nullptr)
                  ? params.block_table + rows.bidb * params.block_table_batch_stride
                  : nullptr,
              params.page_block_size},
        n_min(rows.n_min),
        n_max(rows.n_max),
        seqlen_k(rows.seqlen_k) {
    even = odd = look_up(0);
  }

  __device__ __forceinline__ BlockPages of(int block) const {
    return {block / kBlocks % 2 == 0 ? even : odd, block % kBlocks * kLanes};
  }

  // Called for each block in turn, from block kBlocks / 2 or an earlier one on. There, halfway
  // through a lookup, the blocks of the lookup before it are all copied: the next takes its place.
  __device__ __forceinline__ void advance(int block) {
    if (Traits::kPaged && block % kBlocks == kBlocks / 2) {
      const int next = block / kBlocks + 1;
      const int2 places = look_up(next);
      even = next % 2 == 0 ? places : even;
      odd = next % 2 == 0 ? odd : places;
    }
  }

 private:
  __device__ __forceinline__ int2 look_up(int which) const {
    const int lane = threadIdx.x % 32;
    const int n_block = n_max - 1 - which * kBlocks - lane / kLanes;
    const int key = n_block * Traits::kKeys + lane % kLanes * 16;
    if (Traits::kFp8 && table.pages == nullptr) {
      return make_int2(0, key);
    }
    return Traits::kPaged && n_block >= n_min && key < seqlen_k ? table.find(key) : make_int2(0, 0);
  }
};

// The row of a block from which on a thread copies every kRowsAtOnce-th, the first of its chunks of
// 8 columns there, the chunk that the copy comes to, and whether there is a row for it.
template <typename Traits>
struct CopiedRows {
  int first = threadIdx.x / Traits::kCopies;
  int chunk = threadIdx.x % Traits::kCopies * Traits::kCopyChunks;
  // Every other chunk of 16 would be half of the banks: four neighbours take the odd ones.
  int landing = chunk + (Traits::kCopyChunks == 2 ? threadIdx.x % Traits::kCopies / 4 % 2 : 0);

  __device__ __forceinline__ bool has(int row) const {
    return (Traits::kThreads % Traits::kCopies == 0 || first < Traits::kRowsAtOnce) &&
           (Traits::kKeys % Traits::kRowsAtOnce == 0 || row < Traits::kKeys);
  }
};

// Starts the copy of a block of keys or values; rows from `rows` on and columns from d on are
// zeros.
template <typename Traits>
__device__ __forceinline__ void copy_block(const KvHead& from, const BlockPages& pages,
                                           int first_key, int rows, int d, char* slot) {
  using Whole = cute::uint128_t;
  // Of 8 elements: where columns end, and to which rows in e4m3 may be aligned.
  using Chunk = std::conditional_t<Traits::kFp8, uint64_t, cute::uint128_t>;
  using ChunkCopy = std::conditional_t<Traits::kFp8, cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<Chunk>,
                                       cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>>;
  constexpr int kRowsAtOnce = Traits::kRowsAtOnce;
  const CopiedRows<Traits> mine;
  const int first_row = mine.first;
  // Of the first row, or of the 16 rows that this lane looked up.
  const char* source =
      Traits::kPaged ? from.data + pages.place.x * from.page_bytes + pages.place.y * from.row_bytes
                     : from.data + (first_key + first_row) * from.row_bytes;
  // Called for each row in turn: stepping from one to the next takes few instructions.
  const auto next_source = [&](int row) {
    const char* found = source;
    if (Traits::kPaged) {
      found = pages.find(source, row) + row % 16 * from.row_bytes;
    } else {
      source += kRowsAtOnce * from.row_bytes;
    }
    return reinterpret_cast<const Chunk*>(found) + mine.chunk;
  };
  const auto to = [&](int row) { return slot + slot_offset<Traits::kHeadDim>(row, mine.landing); };
  if (rows >= Traits::kKeys && d == Traits::kHeadDim && (!Traits::kFp8 || from.is_aligned())) {
#pragma unroll
    for (int row = first_row; row < first_row + Traits::kKeys; row += kRowsAtOnce) {
      const Chunk* const chunks = next_source(row);
      if (mine.has(row)) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<Whole>::copy(*reinterpret_cast<const Whole*>(chunks),
                                                     *reinterpret_cast<Whole*>(to(row)));
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < first_row + Traits::kKeys; row += kRowsAtOnce) {
    const Chunk* const chunks = next_source(row);
    if (mine.has(row)) {
#pragma unroll
      for (int i = 0; i < Traits::kCopyChunks; ++i) {
        const bool inside = row < rows && (mine.chunk + i) * 8 < d;
        ChunkCopy::copy(inside ? chunks[i] : *reinterpret_cast<const Chunk*>(from.data),
                        reinterpret_cast<Chunk*>(to(row))[i], inside);
      }
    }
  }
}

// Turns what this thread has copied into Element, where it lies.
template <typename Traits>
__device__ __forceinline__ void widen_block(char* slot) {
  using Element = typename Traits::Element;
  const CopiedRows<Traits> mine;
#pragma unroll
  for (int row = mine.first; row < mine.first + Traits::kKeys; row += Traits::kRowsAtOnce) {
    if (mine.has(row)) {
      const auto chunk = [&](int which) {
        return reinterpret_cast<uint4*>(slot + slot_offset<Traits::kHeadDim>(row, which));
      };
      const uint4 all = *chunk(mine.landing);
      const auto put = [&](int which, uint32_t four, uint32_t next) {
        const uint2 first = widened<Element>(four);
        const uint2 last = widened<Element>(next);
        *chunk(which) = make_uint4(first.x, first.y, last.x, last.y);
      };
      const bool odd = mine.landing != mine.chunk;
      put(mine.landing, odd ? all.z : all.x, odd ? all.w : all.y);
      put(mine.landing ^ 1, odd ? all.x : all.z, odd ? all.y : all.w);
    }
  }
}

// Starts the copy of the queries of a row block, FewRowsTraits::kRows of them; rows past the last
// and columns from d on are zeros.
template <typename Traits>
__device__ __forceinline__ void copy_queries(const FwdParams& params, const SequenceInfo& info,
                                             const RowGroup& rows, char* slot) {
  using Chunk = cute::uint128_t;
#pragma unroll
  for (int first = 0; first < Traits::kRows * Traits::kChunks; first += Traits::kThreads) {
    const int row = (first + threadIdx.x) / Traits::kChunks;
    const int chunk = (first + threadIdx.x) % Traits::kChunks;
    const bool inside = row < rows.count && chunk * 8 < params.d;
    const auto* const source = reinterpret_cast<const Chunk*>(
        query_row<typename Traits::Element>(params, info, rows, inside ? row : 0));
    if (Traits::kRows * Traits::kChunks % Traits::kThreads == 0 || row < Traits::kRows) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>::copy(
          source[inside ? chunk : 0],
          *reinterpret_cast<Chunk*>(slot + slot_offset<Traits::kHeadDim>(row, chunk)), inside);
    }
  }
}

}  // namespace fad
