// The way of queries, keys and values from memory to the slots of few_rows.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "kernel_traits.h"  // upstream; its other headers lean on this one

#include "few_rows_traits.h"
#include "kv_rows.h"
#include "row_group.cuh"

namespace fad {

// Where keys or values of one head of one sequence lie in memory.
struct KvHead {
  const char* data;
  int64_t row_bytes, page_bytes;
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

template <typename Info>
__device__ __forceinline__ KvHead kv_head(const FwdParams& params, const Info& info, int bidb,
                                          int head, void* data, int64_t batch_stride,
                                          int64_t row_stride, int64_t head_stride) {
  using Layout = KvRows</*kIndirect=*/true>;
  const int64_t first =
      Layout::offset(params, info, batch_stride, row_stride, bidb) + head * head_stride;
  return {static_cast<const char*>(data) + 2 * first, 2 * row_stride, 2 * batch_stride};
}

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Where the rows of a block lie: pages hold a multiple of 16, and each of a warp's lanes looks up
// 16 of them. Made some time before the copy, as the page number is a load. Entries of the table
// from seqlen_k on may hold anything, and are not read.
template <typename Traits>
struct BlockPages {
  int2 place;

  __device__ __forceinline__ BlockPages(const PageTable& table, int first_key, int seqlen_k) {
    if constexpr (Traits::kPaged) {
      const int key = first_key + threadIdx.x % (Traits::kKeys / 16) * 16;
      place = key < seqlen_k ? table.find(key) : make_int2(0, 0);
    }
  }

  // Where the 16 rows around this one start. All lanes call together; `mine` is the start of the 16
  // that this lane looked up.
  __device__ __forceinline__ static const char* find(const char* mine, int row) {
    const auto start = reinterpret_cast<unsigned long long>(mine);
    return reinterpret_cast<const char*>(
        __shfl_sync(0xffffffff, start, row / 16, Traits::kKeys / 16));
  }
};

// Starts the copy of a block of keys or values; rows from `rows` on and columns from d on are
// zeros.
template <typename Traits>
__device__ __forceinline__ void copy_block(const KvHead& from, const BlockPages<Traits>& pages,
                                           int first_key, int rows, int d, char* slot) {
  using Chunk = cute::uint128_t;
  constexpr int kRowsAtOnce = Traits::kRowsAtOnce;
  const int first_row = threadIdx.x / Traits::kChunks;
  const int chunk = threadIdx.x % Traits::kChunks;
  const auto is_mine = [&](int row) {
    return (Traits::kThreads % Traits::kChunks == 0 || first_row < kRowsAtOnce) &&
           (Traits::kKeys % kRowsAtOnce == 0 || row < Traits::kKeys);
  };
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
    return reinterpret_cast<const Chunk*>(found) + chunk;
  };
  const auto to = [&](int row) -> Chunk& {
    return *reinterpret_cast<Chunk*>(slot + slot_offset<Traits::kHeadDim>(row, chunk));
  };
  if (rows >= Traits::kKeys && d == Traits::kHeadDim) {
#pragma unroll
    for (int row = first_row; row < first_row + Traits::kKeys; row += kRowsAtOnce) {
      const Chunk* const piece = next_source(row);
      if (is_mine(row)) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<Chunk>::copy(*piece, to(row));
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < first_row + Traits::kKeys; row += kRowsAtOnce) {
    const Chunk* const piece = next_source(row);
    if (is_mine(row)) {
      const bool inside = row < rows && chunk * 8 < d;
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>::copy(
          inside ? *piece : *reinterpret_cast<const Chunk*>(from.data), to(row), inside);
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
