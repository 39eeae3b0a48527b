#include "qkvpacked.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "allocate.h"
#include "bwd.h"
#include "checks.h"

namespace fad {

using torch::stable::Tensor;

namespace {

// q, k and v, or where their gradients go: views.
Gradients parts_of(const OptionalTensor& q, const Tensor& qkv) {
  const std::int64_t dim = qkv.dim() - 3;
  const std::int64_t expected = q.has_value() ? 2 : 3;
  check(dim >= 1 && qkv.size(dim) == expected, "qkv: expected ", expected,
        " tensors in the third dimension from the end, got shape ", Shape{qkv});
  const auto part = [&](std::int64_t index) { return torch::stable::select(qkv, dim, index); };
  return {q.has_value() ? *q : part(0), part(expected - 2), part(expected - 1)};
}

// Gradients to be filled, and where: their parts.
struct Room {
  Room(const OptionalTensor& q, const Tensor& qkv) : dqkv(like(qkv)) {
    if (q.has_value()) {
      dq = like(*q);
    }
  }

  Gradients parts() const { return parts_of(dq, dqkv); }

  PackedGradients result() const { return {dq.has_value() ? *dq : allocate(dqkv, {0}), dqkv}; }

  OptionalTensor dq;
  Tensor dqkv;

 private:
  static Tensor like(const Tensor& tensor) { return allocate(tensor, tensor.sizes()); }
};

}  // namespace

Outputs qkvpacked_fwd(const Extra& extra, const OptionalTensor& q, const Tensor& qkv,
                      const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                      double dropout_p, double softmax_scale, std::int64_t window_left,
                      std::int64_t window_right, double softcap, std::int64_t split_size,
                      bool deterministic, bool deterministic_bwd) {
  const auto [queries, keys, values] = parts_of(q, qkv);
  return fwd(extra, queries, keys, values, alibi_slopes, rng_state, dropout_p, softmax_scale,
             window_left, window_right, softcap, split_size, deterministic, deterministic_bwd, {});
}

Outputs varlen_qkvpacked_fwd(const Extra& extra, const OptionalTensor& q, const Tensor& qkv,
                             const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                             const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                             std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double dropout_p,
                             double softmax_scale, std::int64_t window_left,
                             std::int64_t window_right, double softcap, std::int64_t split_size,
                             bool deterministic, bool deterministic_bwd) {
  const auto [queries, keys, values] = parts_of(q, qkv);
  const OptionalTensor none;
  return varlen_fwd(extra, queries, keys, values, cu_seqlens_q, cu_seqlens_k, none, none, none,
                    alibi_slopes, rng_state, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                    window_left, window_right, softcap, split_size, deterministic,
                    deterministic_bwd, none);
}

PackedGradients qkvpacked_bwd(const Tensor& dout, const OptionalTensor& q, const Tensor& qkv,
                              const Tensor& out, const Tensor& softmax_lse,
                              const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                              double dropout_p, double softmax_scale, std::int64_t window_left,
                              std::int64_t window_right, double softcap, bool deterministic,
                              const OptionalTensor& residual, const OptionalTensor& dlse) {
  const auto [queries, keys, values] = parts_of(q, qkv);
  const Room room(q, qkv);
  bwd_into(room.parts(), dout, queries, keys, values, out, softmax_lse,
           {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state},
           deterministic, residual, dlse);
  return room.result();
}

PackedGradients varlen_qkvpacked_bwd(const Tensor& dout, const OptionalTensor& q, const Tensor& qkv,
                                     const Tensor& out, const Tensor& softmax_lse,
                                     const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                     const OptionalTensor& alibi_slopes,
                                     const OptionalTensor& rng_state, std::int64_t max_seqlen_q,
                                     std::int64_t max_seqlen_k, double dropout_p,
                                     double softmax_scale, std::int64_t window_left,
                                     std::int64_t window_right, double softcap, bool deterministic,
                                     const OptionalTensor& residual, const OptionalTensor& dlse) {
  const auto [queries, keys, values] = parts_of(q, qkv);
  const Room room(q, qkv);
  varlen_bwd_into(
      room.parts(), dout, queries, keys, values, out, softmax_lse,
      {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
      {softmax_scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state},
      deterministic, residual, dlse);
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  zero_tail(room.dqkv, cu_seqlens_k);
  if (room.dq.has_value()) {
    zero_tail(*room.dq, cu_seqlens_q);
  }
  return room.result();
}

}  // namespace fad
