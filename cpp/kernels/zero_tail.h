// Rows of packed tensors that belong to no sequence.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fad {

// Writes zeros to the rows from cu_seqlens[batch] on. rows: of the tensor, contiguous; row_bytes: a
// multiple of 16.
void zero_tail(void* data, const int* cu_seqlens, int batch, std::int64_t rows,
               std::int64_t row_bytes, cudaStream_t stream);

}  // namespace fad
