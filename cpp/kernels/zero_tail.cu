#include "zero_tail.h"

#include "launch.h"

namespace fad {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 64;  // rarely is there anything to do

__global__ void tail_kernel(uint4* data, float* softmax_lse, const int* cu_seqlens, int batch,
                            int64_t rows, int64_t row_words, int64_t nheads) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = blockIdx.x * kThreads + threadIdx.x;
  const int64_t first = max(cu_seqlens[batch], 0);
  for (int64_t at = first * row_words + thread; at < rows * row_words; at += step) {
    data[at] = make_uint4(0, 0, 0, 0);
  }
  const int64_t tail = rows - first;
  for (int64_t at = thread; at < tail * nheads; at += step) {
    softmax_lse[at / tail * rows + first + at % tail] = INFINITY;
  }
}

}  // namespace

void empty_tail(void* out, float* softmax_lse, const int* cu_seqlens, int batch, std::int64_t rows,
                std::int64_t row_bytes, std::int64_t nheads, cudaStream_t stream) {
  if (rows == 0) {
    return;
  }
  launch<&tail_kernel>(kBlocks, kThreads, 0, 0, stream, static_cast<uint4*>(out), softmax_lse,
                       cu_seqlens, batch, rows, row_bytes / 16, nheads);
}

void zero_tail(void* data, const int* cu_seqlens, int batch, std::int64_t rows,
               std::int64_t row_bytes, cudaStream_t stream) {
  empty_tail(data, nullptr, cu_seqlens, batch, rows, row_bytes, /*nheads=*/0, stream);
}

}  // namespace fad
