// The forward ops. Head dims are multiples of 8 and at most 256, nheads a multiple of nheads_k; v
// and out may have another head dim than q and k. Rows may be strided. A row that sees no key has
// out 0, and softmax_lse +inf or that of its sink.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

#include "params.h"

namespace fad {

using Outputs = std::tuple<torch::stable::Tensor, torch::stable::Tensor>;
using ThreeOutputs =
    std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor>;
using FourOutputs = std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor,
                               torch::stable::Tensor>;

// Where a forward leaves what only some ops return; nullptr: it is not wanted.
struct Extra {
  OptionalTensor* residual = nullptr;  // what rounding takes from out, like it, bfloat16
  OptionalTensor* row_max = nullptr;   // each row's largest score, like softmax_lse; -inf: none
};

// The ops of a function whose first argument is that.
template <auto kRun>
struct ForwardOps;
template <typename... Arguments, Outputs (*kRun)(const Extra&, Arguments...)>
struct ForwardOps<kRun> {
  static Outputs plain(Arguments... arguments) { return kRun({}, arguments...); }

  static ThreeOutputs with_residual(Arguments... arguments) {
    OptionalTensor residual;
    const auto [out, softmax_lse] = kRun({&residual}, arguments...);
    return {out, softmax_lse, *residual};
  }

  static ThreeOutputs with_row_max(Arguments... arguments) {
    OptionalTensor row_max;
    const auto [out, softmax_lse] = kRun({nullptr, &row_max}, arguments...);
    return {out, softmax_lse, *row_max};
  }

  static FourOutputs with_both(Arguments... arguments) {
    OptionalTensor residual, row_max;
    const auto [out, softmax_lse] = kRun({&residual, &row_max}, arguments...);
    return {out, softmax_lse, *row_max, *residual};
  }
};

// q: (batch, seqlen_q, nheads, head_dim), fp16 or bf16
// k, v: (batch, seqlen_k, nheads_k, head_dim), like q
// alibi_slopes: (nheads) or (batch, nheads), fp32
// rng_state, int64: (2), seed and offset of dropout, or (batch, 1), a seed of each sequence
// deterministic_bwd is for autograd
// learnable_sink: (nheads), fp32: one more score of each row, without a value
// Returns out, shaped like q, contiguous, and softmax_lse: (batch, nheads, seqlen_q), fp32.
Outputs fwd(const Extra& extra, const torch::stable::Tensor& q, const torch::stable::Tensor& k,
            const torch::stable::Tensor& v, const OptionalTensor& alibi_slopes,
            const OptionalTensor& rng_state, double dropout_p, double softmax_scale,
            std::int64_t window_left, std::int64_t window_right, double softcap,
            std::int64_t split_size, bool deterministic, bool deterministic_bwd,
            const OptionalTensor& learnable_sink);

// q: (total_q, nheads, head_dim)
// k, v: (total_k, nheads_k, head_dim), or pages: (num_blocks, page_block_size, nheads_k, head_dim),
// which may be e4m3
// cu_seqlens_q, cu_seqlens_k: (batch + 1), int32; seqused_k, leftpad_k: (batch), int32
// block_table: (batch, blocks of the longest sequence), int32
// Returns out, shaped like q, contiguous, and softmax_lse: (nheads, total_q), fp32.
Outputs varlen_fwd(const Extra& extra, const torch::stable::Tensor& q,
                   const torch::stable::Tensor& k, const torch::stable::Tensor& v,
                   const torch::stable::Tensor& cu_seqlens_q,
                   const torch::stable::Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                   const OptionalTensor& leftpad_k, const OptionalTensor& block_table,
                   const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                   std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double dropout_p,
                   double softmax_scale, std::int64_t window_left, std::int64_t window_right,
                   double softcap, std::int64_t split_size, bool deterministic,
                   bool deterministic_bwd, const OptionalTensor& learnable_sink);

// q: (batch, seqlen_q, nheads, head_dim)
// k_cache, v_cache: (batch of the cache, capacity, nheads_k, head_dim), or pages: (num_blocks,
// page_block_size, nheads_k, head_dim); appended to in place; or e4m3, and not appended to
// v_cache none: q and k_cache have head_dim 576, whose first 512 columns are the values; not
// appended to
// k, v: (batch, seqlen_new, nheads_k, head_dim) or none
// cache_seqlens, cache_batch_idx, cache_leftpad: (batch), int32; block_table as above
// rotary_cos, rotary_sin: (positions, rotary_dim / 2), like q
// Returns out, shaped like q, contiguous, and softmax_lse: (batch, nheads, seqlen_q), fp32.
Outputs kvcache_fwd(const torch::stable::Tensor& q, torch::stable::Tensor k_cache,
                    OptionalTensor v_cache, const OptionalTensor& k, const OptionalTensor& v,
                    const OptionalTensor& cache_seqlens, const OptionalTensor& rotary_cos,
                    const OptionalTensor& rotary_sin, const OptionalTensor& cache_batch_idx,
                    const OptionalTensor& cache_leftpad, const OptionalTensor& block_table,
                    const OptionalTensor& alibi_slopes, double softmax_scale,
                    std::int64_t window_left, std::int64_t window_right, double softcap,
                    bool rotary_interleaved, std::int64_t split_size, bool deterministic,
                    const OptionalTensor& learnable_sink);

// family, path (both as in kernels/fwd.h), rows to a CTA, splits of the longest sequence, tokens to
// a split (0: one split), launches, scratch bytes, head dim of v as the kernel takes it.
using PlanOutputs = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                               std::int64_t, std::int64_t, std::int64_t>;

// The plan of a call whose longest sequences are seqlen_q and seqlen_k, on the device and in the
// dtype of `like`. packed: sequences stand one after another, as in varlen_fwd; page_size: keys to
// a page, 0 where k and v are not in pages; cache_index: there is a cache_batch_idx; kv_fp8: k and
// v are e4m3; keep_residual: as of fwd_with_residual.
PlanOutputs plan(const torch::stable::Tensor& like, std::int64_t batch, std::int64_t seqlen_q,
                 std::int64_t seqlen_k, std::int64_t nheads, std::int64_t nheads_k,
                 std::int64_t head_dim, std::int64_t head_dim_v, std::int64_t window_left,
                 std::int64_t window_right, bool has_alibi, bool has_softcap, bool has_dropout,
                 bool packed, std::int64_t page_size, bool cache_index, bool kv_fp8,
                 bool keep_residual, std::int64_t split_size, bool deterministic);

}  // namespace fad
