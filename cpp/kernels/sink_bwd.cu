#include "sink_bwd.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"
#include "tree/arithmetic.h"
#include "tree/lengths.h"

namespace fad {

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // of a row: neighbouring threads, each of which takes 8 columns in 64
constexpr int kRowsAtOnce = kThreads / kLanes;
constexpr int kWarps = 32;  // of a CTA that adds up sequences, one to a warp

template <int kFirst, int kCount>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int lane = kFirst; lane < kFirst * kCount; lane *= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, lane));
  }
  return x;
}

// Eight elements of a row, from 16 bytes on.
template <typename Element>
struct Eight {
  Element of[8];

  __device__ __forceinline__ explicit Eight(const Element* at) {
    *reinterpret_cast<uint4*>(of) = *reinterpret_cast<const uint4*>(at);
  }
};

template <typename Element>
__global__ __launch_bounds__(kThreads) void rows_kernel(const __grid_constant__ BwdParams params,
                                                        const float* sinks, float* sums) {
  const int blocks = (params.seqlen_q + kSinkRows - 1) / kSinkRows;
  // Neighbouring CTAs work on neighbouring heads, whose rows lie side by side.
  const int group = blockIdx.x / params.h;
  const int bidh = blockIdx.x - group * params.h;
  const int bidb = group / blocks;
  const int block = group - bidb * blocks;
  const int64_t head = static_cast<int64_t>(bidb) * params.h + bidh;
  const bool packed = params.cu_seqlens_q != nullptr;
  const int64_t first = packed ? params.cu_seqlens_q[bidb] : 0;
  const int seqlen =
      packed ? within(params.cu_seqlens_q[bidb + 1] - static_cast<int>(first), params.seqlen_q)
             : params.seqlen_q;
  const int begin = block * kSinkRows;
  const float sink = sinks[bidh];
  const int lane = threadIdx.x % kLanes;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kSinkRows; i += kRowsAtOnce) {
    const int row = begin + i + static_cast<int>(threadIdx.x) / kLanes;
    float sum = 0.f;
    if (row < seqlen) {
      const Element* const dout =
          static_cast<const Element*>(params.do_ptr) + bidb * params.do_batch_stride +
          (first + row) * params.do_row_stride + bidh * params.do_head_stride;
      const Element* const out = static_cast<const Element*>(params.o_ptr) +
                                 bidb * params.o_batch_stride +
                                 (first + row) * params.o_row_stride + bidh * params.o_head_stride;
      const int64_t in_rows = packed ? first + row : bidb * int64_t{params.seqlen_q} + row;
      const auto* const residual = static_cast<const __nv_bfloat16*>(params.residual) +
                                   (in_rows * params.h + bidh) * params.d;
      for (int column = lane * 8; column < params.d; column += kLanes * 8) {
        const Eight<Element> a(dout + column), b(out + column);
        float exact[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          exact[j] = static_cast<float>(b.of[j]);
        }
        if (params.residual != nullptr) {
          const Eight<__nv_bfloat16> lost(residual + column);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            exact[j] = __fadd_rn(exact[j], static_cast<float>(lost.of[j]));
          }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sum = __fmaf_rn(static_cast<float>(a.of[j]), exact[j], sum);
        }
      }
    }
    sum = sum_of_lanes<1, kLanes>(sum);
    if (row < seqlen && lane == 0) {
      const int64_t at =
          packed ? bidh * int64_t{params.total_q} + first + row : head * params.seqlen_q + row;
      const float lse = static_cast<const float*>(params.softmax_lse_ptr)[at];
      const float probability = exp2_approx(__fmul_rn(__fsub_rn(sink, lse), 1.44269504f));
      total = __fmaf_rn(-probability, params.dlse == nullptr ? sum : sum - params.dlse[at], total);
    }
  }
  __shared__ float of_warps[kThreads / 32];
  total = sum_of_lanes<kLanes, 32 / kLanes>(total);
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = total;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    total = threadIdx.x < kThreads / 32 ? of_warps[threadIdx.x] : 0.f;
    total = sum_of_lanes<1, kThreads / 32>(total);
    if (threadIdx.x == 0) {
      sums[head * blocks + block] = total;
    }
  }
}

// A CTA to a head. Blocks behind the end of a sequence hold 0, which changes no sum.
__global__ __launch_bounds__(32 * kWarps) void sequences_kernel(const float* sums, float* dsink,
                                                                int batch, int blocks) {
  __shared__ float of_sequences[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  float total = 0.f;
  for (int begin = 0; begin < batch; begin += kWarps) {
    float sum = 0.f;
    if (begin + warp < batch) {
      const float* const of =
          sums + (static_cast<int64_t>(begin + warp) * gridDim.x + blockIdx.x) * blocks;
      for (int block = lane; block < blocks; block += 32) {
        sum = __fadd_rn(sum, of[block]);
      }
    }
    sum = sum_of_lanes<1, 32>(sum);
    __syncthreads();
    of_sequences[warp] = sum;
    __syncthreads();
    for (int i = 0; i < min(kWarps, batch - begin); ++i) {
      total = __fadd_rn(total, of_sequences[i]);
    }
  }
  if (threadIdx.x == 0) {
    dsink[blockIdx.x] = total;
  }
}

}  // namespace

void sink_bwd(const BwdParams& params, const float* sinks, float* sums, float* dsink,
              cudaStream_t stream) {
  const int blocks = (params.seqlen_q + kSinkRows - 1) / kSinkRows;
  const auto ctas = static_cast<unsigned>(params.b * params.h * blocks);
  if (params.is_bf16) {
    launch<&rows_kernel<__nv_bfloat16>>(ctas, kThreads, 0, 0, stream, params, sinks, sums);
  } else {
    launch<&rows_kernel<__half>>(ctas, kThreads, 0, 0, stream, params, sinks, sums);
  }
  launch<&sequences_kernel>(params.h, 32 * kWarps, 0, 0, stream, sums, dsink, params.b, blocks);
}

}  // namespace fad
