// dk and dv of a key block: where sums lie, and how gradients are written.
#pragma once

#include "bwd_tile.h"
#include "bwd_walk.h"
#include "sm90/fragment.h"
#include "tree/softmax_steps.h"

namespace fad::sm90 {

// Where a thread's part of dk or dv lies: eights of columns of the keys `key` and `key + 8`.
struct KeyFragment {
  int key;     // in the sequence
  int end;     // of the sequence
  int column;  // of the first of two neighbouring columns, in each eight
};

// Where the sums of a key of the part are, in fp32.
__device__ __forceinline__ int64_t sums_at(const BwdParams& params, const BwdWork& work, int key) {
  const int64_t total = params.cu_seqlens_k == nullptr
                            ? static_cast<int64_t>(params.b) * params.seqlen_k
                            : params.total_k;
  const int64_t first = params.cu_seqlens_k == nullptr
                            ? static_cast<int64_t>(work.bidb) * params.seqlen_k
                            : work.k_row;
  return ((work.part * total + first + key) * params.h_k + work.head_k) * params.d;
}

template <int kCount>
__device__ __forceinline__ void write_sums(const BwdParams& params, const BwdWork& work,
                                           const KeyFragment& at, float* sums,
                                           const float (&acc)[kCount]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = at.key + 8 * r;
    float* const row = sums + sums_at(params, work, key) + at.column;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      if (key < at.end && 8 * j + at.column < params.d) {
        *reinterpret_cast<float2*>(row + 8 * j) =
            make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
      }
    }
  }
}

// Kept sums of dk and dv, as threads hold them.
template <typename T>
__device__ __forceinline__ float4* kept(const BwdParams& params, int slot, int which, int chunk) {
  return reinterpret_cast<float4*>(params.slots + kept_at(params, slot, which, chunk) *
                                                      (2 * T::kKeys * T::kHeadDim)) +
         (read_thread() - 128);
}

template <typename T, int kCount>
__device__ __forceinline__ void add_kept(const float4* sums, float (&acc)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float4 sum = __ldcg(sums + j * T::kConsumers);
    acc[4 * j] = add_keeping_denormals(sum.x, acc[4 * j]);
    acc[4 * j + 1] = add_keeping_denormals(sum.y, acc[4 * j + 1]);
    acc[4 * j + 2] = add_keeping_denormals(sum.z, acc[4 * j + 2]);
    acc[4 * j + 3] = add_keeping_denormals(sum.w, acc[4 * j + 3]);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void keep(float4* sums, float (&acc)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    __stcg(sums + j * T::kConsumers,
           make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
    acc[4 * j] = acc[4 * j + 1] = acc[4 * j + 2] = acc[4 * j + 3] = 0.f;
  }
}

// Rounds and writes a thread's part of dk or dv. Four threads exchange columns, so that each stores
// eight of them at once.
template <typename Element, int kCount>
__device__ __forceinline__ void write_gradient(Element* gradient, int64_t row_stride,
                                               const KeyFragment& at, int head_dim,
                                               const float (&acc)[kCount]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = at.key + 8 * r;
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const a = acc + 4 * (j + i) + 2 * r;
        pairs[i] = packed<Element>(a[0], a[1]);
      }
      const uint4 eight = quad_transpose(pairs[0], pairs[1], pairs[2], pairs[3]);
      const int column = 8 * j + 4 * at.column;  // at.column is twice the thread's place of four
      if (key < at.end && column < head_dim) {
        *reinterpret_cast<uint4*>(gradient + key * row_stride + column) = eight;
      }
    }
  }
}

// The first of a key head's rows of dk or dv.
template <typename Element>
__device__ __forceinline__ Element* gradient_rows(const BwdParams& params, const BwdWork& work,
                                                  void* gradient, int64_t batch_stride,
                                                  int64_t row_stride, int64_t head_stride) {
  return static_cast<Element*>(gradient) +
         (params.cu_seqlens_k == nullptr ? work.bidb * batch_stride : work.k_row * row_stride) +
         work.head_k * head_stride;
}

// The eights of columns of two keys that a thread holds of dk and dv.
template <typename T>
__device__ __forceinline__ KeyFragment key_fragment(const BwdWork& work) {
  const int thread = T::kSharesKeys ? read_thread() % 128 : read_thread() - 128;
  return {work.n_block * T::kKeys + thread / 32 * 16 + thread % 32 / 4, work.seqlen_k,
          thread % 4 * 2};
}

// Of a key block that no row sees. All threads of the CTA.
template <typename T>
__device__ __forceinline__ void write_zeros(const BwdParams& params, const BwdWork& work) {
  using Element = typename T::Element;
  Element* const dk = gradient_rows<Element>(params, work, params.dk_ptr, params.dk_batch_stride,
                                             params.dk_row_stride, params.dk_head_stride);
  Element* const dv = gradient_rows<Element>(params, work, params.dv_ptr, params.dv_batch_stride,
                                             params.dv_row_stride, params.dv_head_stride);
  constexpr int kEights = T::kHeadDim / 8;
  for (int at = threadIdx.x; at < T::kKeys * kEights; at += T::kThreads) {
    const int64_t key = work.n_block * T::kKeys + at / kEights;
    const int column = at % kEights * 8;
    if (key >= work.seqlen_k || column >= params.d) {
      continue;
    }
    if (params.dk_sums != nullptr) {
      const int64_t first = sums_at(params, work, static_cast<int>(key)) + column;
      for (float* const sums : {params.dk_sums + first, params.dv_sums + first}) {
        reinterpret_cast<float4*>(sums)[0] = reinterpret_cast<float4*>(sums)[1] = float4{};
      }
    } else {
      *reinterpret_cast<uint4*>(dk + key * params.dk_row_stride + column) = uint4{};
      if (column < params.d_v) {
        *reinterpret_cast<uint4*>(dv + key * params.dv_row_stride + column) = uint4{};
      }
    }
  }
}

}  // namespace fad::sm90
