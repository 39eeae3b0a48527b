// The warpgroups that compute, where each owns 64 keys of the block: of each row block, scores and
// dP first, then dv, dq and dk.
#pragma once

#include "bwd_row_blocks.cuh"

namespace fad::sm90 {

// dk and dv of the warpgroup's keys.
template <typename T>
struct GradientConsumer : RowBlockWalk<T, GradientConsumer<T>> {
  using Walk = RowBlockWalk<T, GradientConsumer<T>>;
  using Element = typename T::Element;
  using Walk::group, Walk::kScores, Walk::lane, Walk::params, Walk::ring, Walk::shared, Walk::warp;

  static constexpr int kGradients = T::kHeadDim / 2;  // of dk and dv each

  // Operands that stay where they are. Of K^T, 64 columns: a box.
  uint64_t k_rows, v_rows, k_columns;
  // This thread's places in dS (row lane % 8 of matrix lane / 8 of store_transposed, whose swizzle
  // is that of the copy engine) and in dq, whose rows of 256 bytes are swizzled by 32.
  uint32_t scores_at, dq_at;

  float dk[kGradients], dv[kGradients];
  uint32_t weights[kScores / 2], gradients[kScores / 2];  // P^T and dS^T, in 16 bit

  using Walk::Walk;

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < kGradients; ++i) {
      dk[i] = dv[i] = 0.f;
    }
  }

  __device__ __forceinline__ void start() {
    k_rows = operand(shared + T::kKAt + group * T::kGroupKeys * kBoxRowBytes, 16);
    v_rows = operand(shared + T::kVAt + group * T::kGroupKeys * kBoxRowBytes, 16);
    k_columns = operand(shared + T::kKAt + (T::kSplitsRows ? 0 : group * T::kKeyBoxBytes), 16);
    scores_at = shared + T::kScoresAt + group * T::kScoreBoxBytes +
                (lane / 16 * 8 + lane % 8) * kBoxRowBytes +
                ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
    dq_at = shared + T::kDqAt +
            T::dq_at((T::kSplitsRows ? 64 * group : 0) + 16 * warp + lane / 4,
                     T::kSplitsRows ? 0 : 64 * group) +
            lane % 4 * 8;
  }

  __device__ __forceinline__ void add_row_block(int block) {
    const uint32_t q_tile = shared + T::kQAt + ring.slot * T::kRowBytes;
    const uint32_t do_tile = this->do_tile();
    const uint32_t numbers = shared + T::kNumbersAt + ring.slot * T::kNumberBytes + lane % 4 * 8;

    float scores[kScores], dp[kScores];
    barrier_wait(shared + T::kQFull + 8 * ring.slot, ring.parity);
    this->template issue_keys_by_rows<T::kHeadDim>(k_rows, q_tile, scores);
    barrier_wait(shared + T::kVFull, 0);
    barrier_wait(this->do_full(), this->do_parity());
    this->template issue_keys_by_rows<T::kHeadDim>(v_rows, do_tile, dp);
    barrier_wait(shared + T::kNumbersFull + 8 * ring.slot, ring.parity);
    wgmma_wait<1>();
    hold(scores);

    this->hide(block, scores);
    this->exponentiate(numbers, scores);
    if constexpr (T::kDvBesideScores) {
      issue_dv(do_tile, scores);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    hold(dp);
    find_score_gradients(numbers, scores, dp);
    if constexpr (!T::kDvBesideScores) {
      issue_dv(do_tile, scores);
    }
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      store_transposed(scores_at + ring.slot * T::kScoreBytes + i * 16 * kBoxRowBytes,
                       gradients + 4 * i);
    }
    fence_async_proxy();
    named_barrier_sync(kConsumersMeet, T::kConsumers);

    float dq[T::kDqColumns / 2];
    issue_dq_and_dk(q_tile, dq);
    wgmma_wait<1>();
    hold(dv);
    hold(weights);
    hold(dq);
    if (lane == 0) {
      barrier_arrive(this->do_empty());
    }
    hand_over(dq);
    wgmma_wait<0>();
    hold(dk);
    hold(gradients);
    barrier_arrive(shared + T::kQEmpty + 8 * ring.slot);
    ring.advance(T::kStages);
  }

  __device__ __forceinline__ void add_sums(const float4* sums) {
    add_kept<T>(sums, dk);
    add_kept<T>(sums + kGradients / 4 * T::kConsumers, dv);
  }

  __device__ __forceinline__ void keep_sums(float4* sums) {
    keep<T>(sums, dk);
    keep<T>(sums + kGradients / 4 * T::kConsumers, dv);
  }

  __device__ __forceinline__ void finish(const BwdWork& work) {
    const KeyFragment fragment = key_fragment<T>(work);
    if (params.dk_sums != nullptr) {
      write_sums(params, work, fragment, params.dk_sums, dk);
      write_sums(params, work, fragment, params.dv_sums, dv);
      return;
    }
#pragma unroll
    for (int i = 0; i < kGradients; ++i) {
      dk[i] = __fmul_rn(positive_zero(dk[i]), params.scale_softmax_rp_dropout);
      dv[i] = positive_zero(dv[i]);
    }
    write_gradient(gradient_rows<Element>(params, work, params.dk_ptr, params.dk_batch_stride,
                                          params.dk_row_stride, params.dk_head_stride),
                   params.dk_row_stride, fragment, params.d, dk);
    write_gradient(gradient_rows<Element>(params, work, params.dv_ptr, params.dv_batch_stride,
                                          params.dv_row_stride, params.dv_head_stride),
                   params.dv_row_stride, fragment, params.d_v, dv);
  }

 private:
  // dv += P^T dO
  __device__ __forceinline__ void issue_dv(uint32_t do_tile, const float (&scores)[kScores]) {
#pragma unroll
    for (int j = 0; j < kScores / 2; ++j) {
      weights[j] = packed<Element>(scores[2 * j], scores[2 * j + 1]);
    }
    hold(weights);
    hold(dv);
    wgmma_fence();
    this->issue_sums(dv, weights, do_tile);
  }

  __device__ __forceinline__ void find_score_gradients(uint32_t numbers,
                                                       const float (&scores)[kScores],
                                                       const float (&dp)[kScores]) {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 sums = load_shared_pair(numbers + 4 * T::kRows + 32 * j);
      const float* const s = scores + 4 * j;
      const float* const d = dp + 4 * j;
      gradients[2 * j] =
          packed<Element>(score_gradient(s[0], d[0], sums.x), score_gradient(s[1], d[1], sums.y));
      gradients[2 * j + 1] =
          packed<Element>(score_gradient(s[2], d[2], sums.x), score_gradient(s[3], d[3], sums.y));
    }
  }

  // This warpgroup's part of dq = dS K, and dk += dS^T Q.
  __device__ __forceinline__ void issue_dq_and_dk(uint32_t q_tile, float (&dq)[T::kDqColumns / 2]) {
    hold(gradients);
    hold(dq);
    hold(dk);
    wgmma_fence();
    const uint64_t ds_rows = operand(shared + T::kScoresAt + ring.slot * T::kScoreBytes +
                                         (T::kSplitsRows ? group * 64 * kBoxRowBytes : 0),
                                     16);
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i) {
      SharedPlainProduct<Element, T::kDqColumns>::issue(
          dq, ds_rows + (i / 4 * T::kScoreBoxBytes / 16 + i % 4 * kOperandColumns16),
          k_columns + i * kOperandRows16, i > 0);
    }
    wgmma_commit();
    this->issue_sums(dk, gradients, q_tile);
  }

  // dq goes to shared memory, for the thread that adds it.
  __device__ __forceinline__ void hand_over(const float (&dq)[T::kDqColumns / 2]) const {
    barrier_wait(shared + T::kDqEmpty + 8 * ring.slot, ring.parity ^ 1);
    const uint32_t part = dq_at + ring.slot * T::kDqBytes;
    const int row_bytes = T::dq_row_bytes(group);
#pragma unroll
    for (int j = 0; j < T::kDqColumns / 8; ++j) {
      if (T::dq_row_bytes(0) == T::dq_row_bytes(1) || 32 * j < row_bytes) {
        const uint32_t to = part ^ (32 * j);
        store_shared(to, make_float2(dq[4 * j], dq[4 * j + 1]));
        store_shared(to + 8 * row_bytes, make_float2(dq[4 * j + 2], dq[4 * j + 3]));
      }
    }
    fence_async_proxy();
    barrier_arrive(shared + T::kDqFull + 8 * ring.slot);
  }
};

}  // namespace fad::sm90
