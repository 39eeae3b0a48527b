// dk and dv of a key block: where the sums lie that a caller or the query heads before leave, and
// how gradients are written.
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

// fp32 sums that the caller keeps: (batch, seqlen_k, nheads, head_dim), or packed.
template <int kCount, typename Visit>
__device__ __forceinline__ void each_sum(const BwdParams& params, const BwdWork& work,
                                         const KeyFragment& at, float* sums, float (&acc)[kCount],
                                         Visit visit) {
  const int64_t first = params.cu_seqlens_k == nullptr
                            ? static_cast<int64_t>(work.bidb) * params.seqlen_k
                            : work.k_row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = at.key + 8 * r;
    float* const row = sums + ((first + key) * params.h + work.bidh) * params.d + at.column;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      if (key < at.end && 8 * j + at.column < params.d) {
        visit(reinterpret_cast<float2*>(row + 8 * j), acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
      }
    }
  }
}

// The sums of a group's query heads, first to last. Returns whether this head is the last one.
template <typename T, int kCount>
__device__ __forceinline__ bool add_heads(const BwdParams& params, const BwdWork& work, int thread,
                                          float (&dk)[kCount], float (&dv)[kCount]) {
  const int group = params.h_h_k_ratio;
  if (group == 1) {
    return true;
  }
  const int head = work.bidh % group;
  const int64_t block = group_of(params, work, T::kKeys);
  float4* const sums =
      reinterpret_cast<float4*>(params.key_sums + block * (2 * T::kKeys * T::kHeadDim)) + thread;
  constexpr int kEights = kCount / 4;
  const auto add = [&](float (&acc)[kCount], int first) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float4 sum = __ldcg(sums + (first + j) * T::kConsumers);
      acc[4 * j] = __fadd_rn(sum.x, acc[4 * j]);
      acc[4 * j + 1] = __fadd_rn(sum.y, acc[4 * j + 1]);
      acc[4 * j + 2] = __fadd_rn(sum.z, acc[4 * j + 2]);
      acc[4 * j + 3] = __fadd_rn(sum.w, acc[4 * j + 3]);
    }
  };
  const auto leave = [&](const float (&acc)[kCount], int first) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      __stcg(sums + (first + j) * T::kConsumers,
             make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
    }
  };
  if (head > 0) {
    if (thread == 0) {
      wait_for(params.key_turns + block, head);
    }
    named_barrier_sync(kConsumersMeet, T::kConsumers);
    add(dk, 0);
    add(dv, kEights);
  }
  if (head == group - 1) {
    return true;
  }
  leave(dk, 0);
  leave(dv, kEights);
  named_barrier_sync(kConsumersMeet, T::kConsumers);
  if (thread == 0) {
    store_release(params.key_turns + block, head + 1);
  }
  return false;
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

         work.bidh / params.h_h_k_ratio * head_stride;
}

// The eights of columns of two keys that a thread holds of dk and dv.
template <typename T>
__device__ __forceinline__ KeyFragment key_fragment(const BwdWork& work) {
  const int thread = read_thread() - 128;
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
    if (key < work.seqlen_k && column < params.d) {
      *reinterpret_cast<uint4*>(dk + key * params.dk_row_stride + column) = uint4{};
      *reinterpret_cast<uint4*>(dv + key * params.dv_row_stride + column) = uint4{};
    }
  }
}

}  // namespace fad::sm90
