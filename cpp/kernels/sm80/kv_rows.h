// Where key and value rows lie: in one piece per sequence, or (kIndirect) possibly in pages, or in
// a sequence that cache_batch_idx picks. Patches load blocks of rows through here.
#pragma once

#include <cute/tensor.hpp>

#include "utils.h"  // upstream

namespace fad {

// Which sequence of the cache belongs to a sequence of the batch.
template <typename Params>
__device__ __forceinline__ int cache_index(const Params& params, int bidb) {
  return params.cache_batch_idx == nullptr ? bidb : params.cache_batch_idx[bidb];
}

template <bool kIndirect>
struct KvRows {
  // Offset of a sequence's first row, in elements.
  template <typename Params, typename Info>
  __device__ __forceinline__ static int64_t offset(const Params& params, const Info& info,
                                                   int64_t batch_stride, int64_t row_stride,
                                                   int bidb) {
    if (kIndirect && params.block_table != nullptr) {
      return 0;
    }
    return info.k_offset(batch_stride, row_stride, kIndirect ? cache_index(params, bidb) : bidb);
  }

  // Copies key block n_block of `from` (copies, rows, columns, blocks) to shared memory; rows from
  // max_rows on are left out, or cleared. A page holds whole rows, so each row finds its own.
  template <int kBlockN, bool kEvenRows, bool kEvenColumns, bool kClearRows, typename Params,
            typename Copy, typename From, typename To, typename Identity, typename Columns>
  __device__ __forceinline__ static void copy(const Params& params, int bidb, int64_t page_stride,
                                              int64_t row_stride, const Copy& tiled_copy,
                                              const From& from, int n_block, To& to,
                                              const Identity& identity, const Columns& columns,
                                              int max_rows = 0) {
    using namespace cute;
    if constexpr (kIndirect) {
      if (params.block_table != nullptr) {
        const int* const pages = params.block_table + bidb * params.block_table_batch_stride;
#pragma unroll
        for (int m = 0; m < size<1>(to); ++m) {
          const int row_in_block = get<0>(identity(0, m, 0));
          if (kEvenRows || row_in_block < max_rows) {
            const int row = n_block * kBlockN + row_in_block;
            const int page = row / params.page_block_size;
            const int64_t shift = pages[page] * page_stride +
                                  (row - page * params.page_block_size - row_in_block) * row_stride;
#pragma unroll
            for (int k = 0; k < size<2>(to); ++k) {
              if (kEvenColumns || columns(k)) {
                const auto source = from(_, m, k, 0);
                cute::copy(tiled_copy, make_tensor(source.data() + shift, source.layout()),
                           to(_, m, k));
              } else {
                clear(to(_, m, k));
              }
            }
          } else if (kClearRows) {
            clear(to(_, m, _));
          }
        }
        return;
      }
    }
    FLASH_NAMESPACE::copy<kEvenRows, kEvenColumns, kClearRows>(tiled_copy, from(_, _, _, n_block),
                                                               to, identity, columns, max_rows);
  }
};

}  // namespace fad
