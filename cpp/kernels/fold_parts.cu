#include "fold_parts.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "launch.h"
#include "tree/key_tree.h"

namespace fad {

namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;  // of a thread
constexpr int kLevels = 9;
static_assert(1 << (kLevels - 1) == kMostRuns);

struct Sums {
  float of[kColumns];
};

__device__ __forceinline__ Sums sums_at(const float* at) {
  const float4 four = *reinterpret_cast<const float4*>(at);
  return {{four.x, four.y, four.z, four.w}};
}

__device__ __forceinline__ Sums operator+(const Sums& a, const Sums& b) {
  Sums sum;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sum.of[i] = add_keeping_denormals(a.of[i], b.of[i]);
  }
  return sum;
}

// Runs of chunks, of each the query heads of a group, `part` floats apart.
__device__ __forceinline__ Sums folded(const float* at, int64_t part, int runs, int heads) {
  Sums kept[kLevels], sum;
#pragma unroll 1
  for (int run = 0; run < runs; ++run) {
    sum = sums_at(at);
    at += part;
#pragma unroll 1
    for (int head = 1; head < heads; ++head, at += part) {
      sum = sum + sums_at(at);
    }
    bool climbs = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if (climbs && (run >> level & 1) != 0) {
        sum = kept[level] + sum;
      } else if (climbs) {
        kept[level] = sum;
        climbs = false;
      }
    }
  }
  bool some = false;
#pragma unroll
  for (int level = 0; level < kLevels; ++level) {
    if ((runs >> level & 1) != 0) {
      sum = some ? kept[level] + sum : kept[level];
      some = true;
    }
  }
  return sum;
}

template <typename Element>
__device__ __forceinline__ void write(void* gradient, int64_t at, const Sums& sums, float scale,
                                      bool scales) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float sum = positive_zero(sums.of[i]);
    // A product with 1 would still flush denormals.
    static_cast<Element*>(gradient)[at + i] =
        static_cast<Element>(scales ? __fmul_rn(sum, scale) : sum);
  }
}

template <typename Element>
__global__ void fold_kernel(const __grid_constant__ BwdParams params) {
  const bool packed = params.cu_seqlens_k != nullptr;
  const int64_t all = packed ? params.total_k : static_cast<int64_t>(params.b) * params.seqlen_k;
  const int64_t rows =
      packed ? min(static_cast<int64_t>(max(params.cu_seqlens_k[params.b], 0)), all) : all;
  const int threads_a_head = params.d / kColumns;
  const int64_t part = all * params.h_k * params.d;
  const int heads = params.h_h_k_ratio / params.parts.heads;
  const int runs = params.parts.count / heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
       at < rows * params.h_k * threads_a_head; at += step) {
    const int column = static_cast<int>(at % threads_a_head) * kColumns;
    const int64_t head = at / threads_a_head % params.h_k;
    const int64_t row = at / threads_a_head / params.h_k;
    const int64_t batch = packed ? 0 : row / params.seqlen_k;
    const int64_t in_batch = row - batch * params.seqlen_k;
    const auto place = [&](int64_t batch_stride, int64_t row_stride, int64_t head_stride) {
      return batch * batch_stride + in_batch * row_stride + head * head_stride + column;
    };
    write<Element>(params.dk_ptr,
                   place(params.dk_batch_stride, params.dk_row_stride, params.dk_head_stride),
                   folded(params.dk_sums + at * kColumns, part, runs, heads),
                   params.scale_softmax_rp_dropout, true);
    if (column < params.d_v) {
      write<Element>(params.dv_ptr,
                     place(params.dv_batch_stride, params.dv_row_stride, params.dv_head_stride),
                     folded(params.dv_sums + at * kColumns, part, runs, heads), params.rp_dropout,
                     params.p_dropout < 1.f);
    }
  }
}

}  // namespace

void fold_parts(const BwdParams& params, cudaStream_t stream) {
  const int64_t rows = params.cu_seqlens_k != nullptr
                           ? params.total_k
                           : static_cast<int64_t>(params.b) * params.seqlen_k;
  const int64_t threads = rows * params.h_k * (params.d / kColumns);
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((threads + kThreads - 1) / kThreads, 1 << 16));
  if (params.is_bf16) {
    launch<&fold_kernel<__nv_bfloat16>>(blocks, kThreads, 0, 0, stream, params);
  } else {
    launch<&fold_kernel<__half>>(blocks, kThreads, 0, 0, stream, params);
  }
}

}  // namespace fad
