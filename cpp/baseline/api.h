// C interface to upstream's own kernels, for benchmarks through ctypes. Every function returns 0,
// or 1 with a message in fa2_baseline_error(). All tensors are device memory on `device`, all
// strides count elements, and all last dimensions are contiguous.
//
// Packed sequences: cu_seqlens_q and cu_seqlens_k are (batch + 1) on the device, seqlen_q and
// seqlen_k the longest lengths, total_q the queries of all sequences, and tensors have no batch
// dimension, so a batch_stride of 0. Otherwise both pointers are null.
#pragma once

#include <stdint.h>

#define FA2_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  void* data;
  int64_t batch_stride, row_stride, head_stride;
} fa2_tensor;  // (batch, seqlen, nheads, head_dim) or (total, nheads, head_dim)

// window_left, window_right: keys visible on either side of the diagonal; negative: all. softcap,
// p_dropout (the probability to drop): 0 for none. alibi_slopes: (nheads), or (batch, nheads) with
// a batch stride; null for none. rng_state: (2), seed and offset of dropout.
typedef struct {
  int32_t device, is_bf16, is_causal;
  int32_t batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim;
  float softmax_scale;
  void* stream;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  int32_t total_q;
  int32_t window_left, window_right;
  float softcap, p_dropout;
  const float* alibi_slopes;
  int64_t alibi_batch_stride;
  uint64_t* rng_state;
} fa2_problem;

// Of this interface: a caller that expects another must not call the rest.
#define FA2_BASELINE_VERSION 3
FA2_EXPORT int32_t fa2_baseline_version(void);

FA2_EXPORT const char* fa2_baseline_error(void);

// Whether this build holds the kernel of a problem: 1 or 0. One feature at a time (window, softcap,
// ALiBi, dropout) is compiled.
FA2_EXPORT int32_t fa2_baseline_holds(const fa2_problem* problem, int32_t backward);

// Upstream's choice of num_splits for a problem, on the given number of SMs.
FA2_EXPORT int32_t fa2_baseline_num_splits(const fa2_problem* problem, int32_t num_sms);

// softmax_lse: (batch, nheads, seqlen_q) fp32, packed (nheads, total_q). With num_splits > 1 the
// caller owns the scratch: out_accum (num_splits, batch, nheads, seqlen_q, head_dim) and lse_accum
// without the last dimension, both fp32; otherwise they may be null. Packed sequences are not
// split.
FA2_EXPORT int32_t fa2_baseline_forward(const fa2_problem* problem, const fa2_tensor* q,
                                        const fa2_tensor* k, const fa2_tensor* v,
                                        const fa2_tensor* out, float* softmax_lse,
                                        int32_t num_splits, float* out_accum, float* lse_accum);

// dk and dv have nheads heads (the caller sums groups, as upstream does). softmax_d: (batch,
// nheads, seqlen_q rounded up to 128) fp32, packed (nheads, total_q + 128 * batch). dq_accum:
// (batch, seqlen_q rounded, nheads, head_dim) fp32, packed (total_q + 128 * batch, nheads,
// head_dim); if deterministic, zeroed, and one of these per dq_accum_split_stride elements.
FA2_EXPORT int32_t fa2_baseline_backward(const fa2_problem* problem, const fa2_tensor* dout,
                                         const fa2_tensor* q, const fa2_tensor* k,
                                         const fa2_tensor* v, const fa2_tensor* out,
                                         const float* softmax_lse, const fa2_tensor* dq,
                                         const fa2_tensor* dk, const fa2_tensor* dv,
                                         float* softmax_d, float* dq_accum, int32_t deterministic,
                                         int64_t dq_accum_split_stride);

#ifdef __cplusplus
}
#endif
