#include "append_kv.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "launch.h"

namespace fad {

namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Copies one row of a head, turning the pairs of its first rotary_dim columns by the angle of
// `position`. In fp32, rounded once; source: Su et al. 2021 (RoFormer), pairs as in upstream's
// rotary.h.
template <typename Element>
__device__ void copy_rotated(const AppendParams& params, const Element* from, Element* to,
                             int head_dim, int rotary_dim, int position) {
  const int half = rotary_dim / 2;
  const auto* const cos =
      static_cast<const Element*>(params.rotary_cos) + static_cast<std::int64_t>(position) * half;
  const auto* const sin =
      static_cast<const Element*>(params.rotary_sin) + static_cast<std::int64_t>(position) * half;
  for (int pair = threadIdx.x; pair < half; pair += blockDim.x) {
    const int left = params.rotary_interleaved ? 2 * pair : pair;
    const int right = params.rotary_interleaved ? 2 * pair + 1 : pair + half;
    const float x = to_float(from[left]);
    const float y = to_float(from[right]);
    const float c = to_float(cos[pair]);
    const float s = to_float(sin[pair]);
    to[left] = from_float<Element>(__fmaf_rn(x, c, -__fmul_rn(y, s)));
    to[right] = from_float<Element>(__fmaf_rn(x, s, __fmul_rn(y, c)));
  }
  for (int column = rotary_dim + threadIdx.x; column < head_dim; column += blockDim.x) {
    to[column] = from[column];
  }
}

template <typename Element>
__device__ Element* at(const StridedRows& rows, std::int64_t batch, std::int64_t row, int head) {
  return static_cast<Element*>(rows.data) + batch * rows.batch_stride + row * rows.row_stride +
         head * rows.head_stride;
}

// Writes one head of a new key or value into the cache.
template <typename Element>
__device__ void append_row(const AppendParams& params, int batch, int token, int head,
                           bool is_key) {
  const std::int64_t position = static_cast<std::int64_t>(params.cache_seqlens[batch]) + token;
  if (token >= params.seqlen_new || position < 0 || position >= params.capacity) {
    return;
  }
  std::int64_t cache_batch =
      params.cache_batch_idx == nullptr ? batch : params.cache_batch_idx[batch];
  std::int64_t cache_row = position;
  if (params.block_table != nullptr) {
    cache_batch = params.block_table[batch * params.block_table_batch_stride +
                                     position / params.page_block_size];
    cache_row = position % params.page_block_size;
  }
  copy_rotated(params, at<Element>(is_key ? params.new_k : params.new_v, batch, token, head),
               at<Element>(is_key ? params.k_cache : params.v_cache, cache_batch, cache_row, head),
               is_key ? params.head_dim : params.head_dim_v, is_key ? params.rotary_dim : 0,
               static_cast<int>(position));
}

template <typename Element>
__device__ void rotate_query(const AppendParams& params, int batch, int token, int head) {
  if (token >= params.seqlen_q) {
    return;
  }
  // A cache_seqlens beyond the cache must not reach beyond the angles.
  const int position = params.cache_seqlens[batch] + (params.query_positions_advance ? token : 0);
  copy_rotated(params, at<Element>(params.q, batch, token, head),
               at<Element>(params.rotated_q, batch, token, head), params.head_dim,
               params.rotary_dim, max(0, min(position, params.rotary_positions - 1)));
}

// Heads of all three tensors: of keys, then of values, then of queries if they are rotated.
int num_heads(const AppendParams& params) {
  return 2 * params.nheads_k + (params.rotary_dim > 0 ? params.nheads : 0);
}

// blockIdx.x: token, blockIdx.y: head, as num_heads counts them, blockIdx.z: batch. Heads and batch
// in steps, as y and z stop at 65535.
template <typename Element>
__global__ void append_kernel(const __grid_constant__ AppendParams params, int heads) {
  const int token = blockIdx.x;
  for (int batch = blockIdx.z; batch < params.batch; batch += gridDim.z) {
    for (int head = blockIdx.y; head < heads; head += gridDim.y) {
      if (head < 2 * params.nheads_k) {
        const bool is_key = head < params.nheads_k;
        append_row<Element>(params, batch, token, is_key ? head : head - params.nheads_k, is_key);
      } else {
        rotate_query<Element>(params, batch, token, head - 2 * params.nheads_k);
      }
    }
  }
}

}  // namespace

void append_kv(const AppendParams& params, cudaStream_t stream) {
  constexpr int kMaxYz = 65535;
  const int heads = num_heads(params);
  const int tokens = std::max(params.seqlen_new, params.rotary_dim > 0 ? params.seqlen_q : 0);
  const dim3 grid(tokens, std::min(heads, kMaxYz), std::min(params.batch, kMaxYz));
  if (params.element_is_bf16) {
    launch<&append_kernel<__nv_bfloat16>>(grid, kThreads, 0, 0, stream, params, heads);
  } else {
    launch<&append_kernel<__half>>(grid, kThreads, 0, 0, stream, params, heads);
  }
}

}  // namespace fad
