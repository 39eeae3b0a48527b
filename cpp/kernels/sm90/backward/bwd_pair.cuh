// The warpgroups that compute, where both work on the same 64 keys. Registers hold one gradient of
// a key block of so many columns: the first warpgroup computes P and dv, the second one dS and dk,
// and each of them some columns of dq. P goes through shared memory, in fp32, each thread's part to
// the thread that holds the same elements of dP.
#pragma once

#include "bwd_row_blocks.cuh"

namespace fad::sm90 {

// What both have.
template <typename T, typename Own, int kGroup>
struct PairConsumer : RowBlockWalk<T, Own> {
  using Walk = RowBlockWalk<T, Own>;
  using Element = typename T::Element;
  using Walk::kScores, Walk::lane, Walk::params, Walk::ring, Walk::shared, Walk::warp;
  static constexpr int kGradients = (kGroup == 0 ? T::kHeadDimV : T::kHeadDim) / 2;
  static constexpr int kParts = T::dq_parts(kGroup);  // of dq
  static constexpr int kFirstPart = kGroup == 0 ? 0 : T::dq_parts(0);

  uint64_t key_rows;    // K or V
  uint32_t weights_at;  // this thread's P in fp32
  uint32_t dq_at;       // and its places in a part of dq
  float sums[kGradients];
  uint32_t keys[kScores / 2];  // P^T or dS^T, in 16 bit

  __device__ __forceinline__ PairConsumer(const BwdParams& params_, uint32_t shared_)
      : Walk(params_, shared_, 0) {}

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < kGradients; ++i) {
      sums[i] = 0.f;
    }
  }

  __device__ __forceinline__ void start() {
    key_rows = operand(shared + (kGroup == 0 ? T::kKAt : T::kVAt), 16);
    weights_at = shared + T::kWeightsAt + threadIdx.x % 128 * 16;
    dq_at = shared + T::kDqAt + T::dq_at(16 * warp + lane / 4, 0) + lane % 4 * 8;
  }

  __device__ __forceinline__ void add_sums(const float4* kept) { add_kept<T>(kept, sums); }
  __device__ __forceinline__ void keep_sums(float4* kept) { keep<T>(kept, sums); }

 protected:
  __device__ __forceinline__ uint32_t q_tile() const {
    return shared + T::kQAt + ring.slot * T::kRowBytes;
  }
  __device__ __forceinline__ uint32_t numbers() const {
    return shared + T::kNumbersAt + ring.slot * T::kNumberBytes + lane % 4 * 8;
  }

  // Parts of dq = dS K, each a group of its own.
  __device__ __forceinline__ void issue_dq(float (&dq)[kParts][32]) const {
    const uint64_t ds_rows = operand(shared + T::kScoresAt + ring.slot * T::kScoreBytes, 16);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      hold(dq[part]);
      wgmma_fence();
      const uint64_t columns =
          operand(shared + T::kKAt + (kFirstPart + part) * T::kKeyBoxBytes, 16);
#pragma unroll
      for (int i = 0; i < T::kKeys / 16; ++i) {
        SharedPlainProduct<Element, 64>::issue(dq[part], ds_rows + i * kOperandColumns16,
                                               columns + i * kOperandRows16, i > 0);
      }
      wgmma_commit();
    }
  }

  // A part of dq goes to shared memory, for the thread that adds it.
  __device__ __forceinline__ void hand_over(int part, const float (&dq)[32]) const {
    const DqBuffer<T> buffer(ring.slot, kFirstPart + part);
    barrier_wait(shared + T::kDqEmpty + 8 * buffer.number, buffer.parity ^ 1);
    const uint32_t to = dq_at + buffer.number * T::kDqBufferBytes;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      store_shared(to ^ (32 * j), make_float2(dq[4 * j], dq[4 * j + 1]));
      store_shared((to ^ (32 * j)) + 8 * 256, make_float2(dq[4 * j + 2], dq[4 * j + 3]));
    }
    fence_async_proxy();
    barrier_arrive(shared + T::kDqFull + 8 * buffer.number);
  }
};

template <typename T>
struct WeightConsumer : PairConsumer<T, WeightConsumer<T>, 0> {
  using Pair = PairConsumer<T, WeightConsumer<T>, 0>;
  using Element = typename T::Element;
  using Pair::keys, Pair::kGradients, Pair::kParts, Pair::kScores, Pair::lane, Pair::params,
      Pair::ring, Pair::shared, Pair::sums, Pair::warp, Pair::weights_at, Pair::Pair;

  __device__ __forceinline__ void add_row_block(int block) {
    float scores[kScores];
    barrier_wait(shared + T::kQFull + 8 * ring.slot, ring.parity);
    this->template issue_keys_by_rows<T::kHeadDim>(this->key_rows, this->q_tile(), scores);
    barrier_wait(shared + T::kNumbersFull + 8 * ring.slot, ring.parity);
    wgmma_wait<0>();
    hold(scores);
    this->hide(block, scores);
    this->exponentiate(this->numbers(), scores);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float* const s = scores + 4 * j;
      store_shared(weights_at + j * 128 * 16, make_float4(s[0], s[1], s[2], s[3]));
      keys[2 * j] = packed<Element>(s[0], s[1]);
      keys[2 * j + 1] = packed<Element>(s[2], s[3]);
    }
    named_barrier_arrive(kWeightsStored + warp, 64);
    barrier_arrive(shared + T::kQEmpty + 8 * ring.slot);
    barrier_wait(this->do_full(), this->do_parity());
    hold(keys);
    hold(sums);
    wgmma_fence();
    this->issue_sums(sums, keys, this->do_tile());

    named_barrier_sync(kConsumersMeet, T::kConsumers);
    float dq[kParts][32];
    this->issue_dq(dq);
    wgmma_wait<kParts>();
    hold(sums);
    hold(keys);
    if (lane == 0) {
      barrier_arrive(this->do_empty());
    }
    wgmma_wait<kParts - 1>();
    hold(dq[0]);
    this->hand_over(0, dq[0]);
    if constexpr (kParts > 1) {
      wgmma_wait<0>();
      hold(dq[1]);
      this->hand_over(1, dq[1]);
    }
    ring.advance(T::kStages);
  }

  __device__ __forceinline__ void finish(const BwdWork& work) {
    const KeyFragment fragment = key_fragment<T>(work);
    if (params.dv_sums != nullptr) {
      write_sums(params, work, fragment, params.dv_sums, sums);
      return;
    }
#pragma unroll
    for (int i = 0; i < kGradients; ++i) {
      sums[i] = positive_zero(sums[i]);
    }
    write_gradient(gradient_rows<Element>(params, work, params.dv_ptr, params.dv_batch_stride,
                                          params.dv_row_stride, params.dv_head_stride),
                   params.dv_row_stride, fragment, params.d_v, sums);
  }
};

template <typename T>
struct ScoreConsumer : PairConsumer<T, ScoreConsumer<T>, 1> {
  using Pair = PairConsumer<T, ScoreConsumer<T>, 1>;
  using Element = typename T::Element;
  using Pair::keys, Pair::kGradients, Pair::kParts, Pair::kScores, Pair::lane, Pair::params,
      Pair::ring, Pair::shared, Pair::sums, Pair::warp, Pair::weights_at, Pair::Pair;

  // Where this thread writes dS: row lane % 8 of matrix lane / 8 of store_transposed, whose swizzle
  // is that of the copy engine.
  uint32_t scores_at;

  __device__ __forceinline__ void start() {
    Pair::start();
    scores_at = shared + T::kScoresAt + (lane / 16 * 8 + lane % 8) * kBoxRowBytes +
                ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
    barrier_wait(shared + T::kVFull, 0);
  }

  __device__ __forceinline__ void add_row_block(int) {
    float dp[kScores];
    barrier_wait(this->do_full(), this->do_parity());
    this->template issue_keys_by_rows<T::kHeadDimV>(this->key_rows, this->do_tile(), dp);
    barrier_wait(shared + T::kNumbersFull + 8 * ring.slot, ring.parity);
    wgmma_wait<0>();
    hold(dp);
    if (lane == 0) {
      barrier_arrive(this->do_empty());
    }
    named_barrier_sync(kWeightsStored + warp, 64);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 row_sums = load_shared_pair(this->numbers() + 4 * T::kRows + 32 * j);
      const float4 p = load_shared(weights_at + j * 128 * 16);
      const float* const d = dp + 4 * j;
      keys[2 * j] = packed<Element>(score_gradient(p.x, d[0], row_sums.x),
                                    score_gradient(p.y, d[1], row_sums.y));
      keys[2 * j + 1] = packed<Element>(score_gradient(p.z, d[2], row_sums.x),
                                        score_gradient(p.w, d[3], row_sums.y));
    }
#pragma unroll
    for (int i = 0; i < T::kRows / 16; ++i) {
      store_transposed(scores_at + ring.slot * T::kScoreBytes + i * 16 * kBoxRowBytes,
                       keys + 4 * i);
    }
    fence_async_proxy();
    named_barrier_sync(kConsumersMeet, T::kConsumers);

    float dq[kParts][32];
    this->issue_dq(dq);
    hold(keys);
    hold(sums);
    wgmma_fence();
    this->issue_sums(sums, keys, this->q_tile());
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part == kParts - 1) {
        wgmma_wait<1>();
      } else {
        wgmma_wait<2>();
      }
      hold(dq[part]);
      this->hand_over(part, dq[part]);
    }
    wgmma_wait<0>();
    hold(sums);
    hold(keys);
    barrier_arrive(shared + T::kQEmpty + 8 * ring.slot);
    ring.advance(T::kStages);
  }

  __device__ __forceinline__ void finish(const BwdWork& work) {
    const KeyFragment fragment = key_fragment<T>(work);
    if (params.dk_sums != nullptr) {
      write_sums(params, work, fragment, params.dk_sums, sums);
      return;
    }
#pragma unroll
    for (int i = 0; i < kGradients; ++i) {
      sums[i] = __fmul_rn(positive_zero(sums[i]), params.scale_softmax_rp_dropout);
    }
    write_gradient(gradient_rows<Element>(params, work, params.dk_ptr, params.dk_batch_stride,
                                          params.dk_row_stride, params.dk_head_stride),
                   params.dk_row_stride, fragment, params.d, sums);
  }
};

}  // namespace fad::sm90
