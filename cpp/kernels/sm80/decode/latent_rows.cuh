// Where the rows of a latent cache lie.
#pragma once

#include "few_rows_copy.cuh"
#include "sm80/row_group.cuh"

namespace fad {

// The rows of the next block that a thread copies, T::kRowsAtOnce apart: where they lie, which is
// looked up a block ahead, as page numbers are loads; nullptr: past the last key.
template <typename T>
struct LatentRows {
  KvHead from;
  PageTable table;  // pages: nullptr if the sequence lies in one piece
  int seqlen_k;
  const char* at[T::kCopiedRows];

  __device__ __forceinline__ LatentRows(const FwdParams& params, const SequenceInfo& info,
                                        const RowGroup& rows)
      : from(kv_head(params, info, rows.bidb, rows.bidh / params.h_h_k_ratio, params.k_ptr,
                     params.k_batch_stride, params.k_row_stride, params.k_head_stride)),
        table{params.block_table == nullptr
                  ? nullptr
                  : params.block_table + rows.bidb * params.block_table_batch_stride,
              params.page_block_size},
        seqlen_k(rows.seqlen_k) {}

  // first_row: of the block, that the thread copies.
  __device__ __forceinline__ void look_up(int first_key, int first_row) {
#pragma unroll
    for (int i = 0; i < T::kCopiedRows; ++i) {
      const int key = first_key + first_row + i * T::kRowsAtOnce;
      at[i] = nullptr;
      if (first_key >= 0 && key < seqlen_k) {
        const int2 place = table.pages == nullptr ? make_int2(0, key) : table.find(key);
        at[i] = from.data + place.x * from.page_bytes + place.y * from.row_bytes;
      }
    }
  }
};

}  // namespace fad
