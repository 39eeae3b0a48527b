// Rows of packed tensors that belong to no sequence: those from cu_seqlens[batch] on.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fad {

// Writes zeros to them. rows: of the tensor, contiguous; row_bytes: a multiple of 16.
void zero_tail(void* data, const int* cu_seqlens, int batch, std::int64_t rows,
               std::int64_t row_bytes, cudaStream_t stream);

// Makes them rows that see no key: zeros in out, as above, and +inf in softmax_lse (nheads, rows).
void empty_tail(void* out, float* softmax_lse, const int* cu_seqlens, int batch, std::int64_t rows,
                std::int64_t row_bytes, std::int64_t nheads, cudaStream_t stream);

}  // namespace fad
