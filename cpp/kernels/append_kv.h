// Before attention over a KV cache: writes new keys and values into it and applies rotary
// embedding, to new keys in place and to queries in a copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fad {

// Rows (batch, seqlen, heads, head_dim) of 16-bit elements; strides in elements.
struct StridedRows {
  void* data;
  std::int64_t batch_stride, row_stride, head_stride;
};

struct AppendParams {
  int batch, head_dim, head_dim_v, element_is_bf16;
  // New keys and values, each (batch, seqlen_new, nheads_k, head_dim), and the caches they go to.
  int seqlen_new, nheads_k;
  StridedRows new_k, new_v, k_cache, v_cache;
  int capacity;  // tokens of one sequence that the cache holds; rows beyond it are dropped
  const int* cache_seqlens;    // (batch): tokens already there
  const int* cache_batch_idx;  // (batch) or nullptr
  const int* block_table;      // (batch, pages of a sequence) or nullptr
  std::int64_t block_table_batch_stride;
  int page_block_size;
  // Queries; without rotary embedding they are not touched.
  int seqlen_q, nheads;
  StridedRows q, rotated_q;
  // Rotary tables (positions, rotary_dim / 2), of the elements' type; rotary_dim 0: none.
  int rotary_dim;
  bool rotary_interleaved;
  bool query_positions_advance;  // causal or windowed: query i stands at cache_seqlens + i
  int rotary_positions;
  const void* rotary_cos;
  const void* rotary_sin;
};

void append_kv(const AppendParams& params, cudaStream_t stream);

}  // namespace fad
