// The sm90 family's rows of the table of kernels. Plain C++: the table and these kernels are
// compiled apart, for different architectures.
#pragma once

#include "fwd.h"
#include "fwd_params.h"
#include "fwd_shape.h"

namespace fad::sm90 {

inline FwdParams params_of(const fad::FwdParams& call, const Tree& tree) {
  FwdParams params{};
  params.q = {call.q_ptr, call.q_batch_stride, call.q_row_stride, call.q_head_stride};
  params.k = {call.k_ptr, call.k_batch_stride, call.k_row_stride, call.k_head_stride};
  params.v = {call.v_ptr, call.v_batch_stride, call.v_row_stride, call.v_head_stride};
  params.out = call.o_ptr;
  params.out_batch_stride = call.o_batch_stride;
  params.out_row_stride = call.o_row_stride;
  params.out_head_stride = call.o_head_stride;
  params.residual = call.residual;
  params.softmax_lse = static_cast<float*>(call.softmax_lse_ptr);
  params.row_max = call.row_max;
  params.sinks = call.sinks;
  params.lse_head_stride = call.unpadded_lse ? call.total_q : call.seqlen_q;
  params.lse_batch_stride = static_cast<int64_t>(call.h) * call.seqlen_q;
  params.batch = call.b;
  params.kv_batch = call.kv_batch;
  params.seqlen_q = call.seqlen_q;
  params.seqlen_k = call.seqlen_k;
  params.total_q = call.total_q;
  params.total_k = call.total_k;
  params.heads = call.h;
  params.heads_k = call.h_k;
  params.group = call.group;
  params.head_dim = call.d;
  params.head_dim_v = call.d_v;
  params.cu_seqlens_q = call.cu_seqlens_q;
  if (call.is_seqlens_k_cumulative) {
    params.cu_seqlens_k = call.cu_seqlens_k;
    params.seqused_k = call.seqused_k;
  } else {
    params.seqused_k = call.cu_seqlens_k;  // lengths: upstream's meaning of the flag
    params.seqlen_new = call.knew_ptr == nullptr ? 0 : call.seqlen_knew;
  }
  params.leftpad_k = call.leftpad_k;
  params.cache_batch_idx = call.cache_batch_idx;
  params.block_table = call.block_table;
  params.block_table_batch_stride = call.block_table_batch_stride;
  params.page_size = call.page_block_size;
  params.window_left = call.window_size_left;
  params.window_right = call.window_size_right;
  params.softcap = call.softcap;
  params.scale = call.scale_softmax;
  params.scale_log2 = call.scale_softmax_log2;
  params.split_tokens = tree.blocks_per_split * tree.keys_per_block;
  params.tile_counter = call.tile_counter;
  params.parts = {call.parts.acc,
                  call.parts.state,
                  call.num_splits,
                  static_cast<int>(call.parts.first_cta),
                  static_cast<int>(call.parts.ctas),
                  call.parts.rows};
  return params;
}

template <int kHeadDim, int kHeadDimV, int kBlockM>
bool takes(const fad::FwdParams& call, const Tree& tree) {
  const FwdParams params = params_of(call, tree);
  constexpr int kKeys = fwd_shape(kHeadDim, kHeadDimV, kBlockM).keys;
  // A block of keys lies in one split.
  return params.head_dim_v <= kHeadDimV && params.split_tokens % kKeys == 0 && supports(params);
}

// launch is compiled for Hopper; it serves both paths.
template <int kHeadDim, int kHeadDimV, int kBlockM, Path kPath, Features kCovers>
constexpr FwdKernel fwd_entry(void (*launch)(const fad::FwdParams&, unsigned, cudaStream_t)) {
  static_assert(kPath == Path::kOneCta || kPath == Path::kParts);
  constexpr FwdShape kShape = fwd_shape(kHeadDim, kHeadDimV, kBlockM);
  constexpr int kShared = shared_bytes(kShape.ctas_per_sm);
  return {Family::kSm90,
          kPath,
          kCovers,
          kBlockM,
          kShared,
          kShared,
          launch,
          kShape.ctas_per_sm,
          &takes<kHeadDim, kHeadDimV, kBlockM>,
          kHeadDimV};
}

}  // namespace fad::sm90
