// Forward over a KV cache that new keys and values are appended to.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "allocate.h"
#include "checks.h"
#include "device.h"
#include "fwd.h"
#include "kernels/append_kv.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

StridedRows rows_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

int* data(const OptionalTensor& tensor) {
  return tensor.has_value() ? static_cast<int*>(tensor->data_ptr()) : nullptr;
}

// The cache is written in place: it can't be copied to align it.
void check_rows(const Tensor& cache, const char* name) {
  const std::uintptr_t bytes = is_e4m3(cache) ? 8 : 16;
  bool good =
      cache.stride(3) == 1 && reinterpret_cast<std::uintptr_t>(cache.data_ptr()) % bytes == 0;
  for (int dim = 0; dim < 3; ++dim) {
    good = good && (cache.stride(dim) % 8 == 0 || cache.size(dim) == 1);
  }
  check(good, name, ": expected rows that start at multiples of ", bytes,
        " bytes, the last dimension contiguous, got ", Described{cache});
}

void check_rotary(const Tensor& rotary_cos, const Tensor& rotary_sin, const Tensor& q,
                  std::int64_t capacity) {
  check_attention_input(rotary_cos, "rotary_cos", q, 2);
  check_attention_input(rotary_sin, "rotary_sin", q, 2);
  check(rotary_cos.is_contiguous(), "rotary_cos: expected a contiguous tensor, got ",
        Described{rotary_cos});
  check(rotary_sin.is_contiguous(), "rotary_sin: expected a contiguous tensor, got ",
        Described{rotary_sin});
  const std::int64_t half = rotary_cos.size(1);
  check(half > 0 && 2 * half <= q.size(3) && half % 8 == 0,
        "rotary_cos: expected a rotary_dim that is a multiple of 16 and at most head_dim, got ",
        2 * half);
  check(rotary_cos.size(0) >= capacity, "rotary_cos: expected at least ", capacity,
        " positions, the capacity of the cache, got ", rotary_cos.size(0));
  check_shape(rotary_sin, "rotary_sin", {rotary_cos.size(0), half});
}

// The values of a cache of multi-head latent attention, which its keys hold.
Tensor latent_values(Tensor& k_cache, const Tensor& q) {
  check_attention_input(k_cache, "k_cache", q, 4);
  check(q.size(3) == kLatentHeadDim && k_cache.size(3) == kLatentHeadDim,
        "v_cache: expected a tensor, got None, which takes a head_dim of ", kLatentHeadDim,
        " of q and k_cache, got ", q.size(3), " and ", k_cache.size(3));
  return torch::stable::narrow(k_cache, 3, 0, kLatentHeadDimV);
}

}  // namespace

Outputs kvcache_fwd(const Tensor& q, Tensor k_cache, OptionalTensor given_v_cache,
                    const OptionalTensor& k, const OptionalTensor& v,
                    const OptionalTensor& cache_seqlens, const OptionalTensor& rotary_cos,
                    const OptionalTensor& rotary_sin, const OptionalTensor& cache_batch_idx,
                    const OptionalTensor& cache_leftpad, const OptionalTensor& block_table,
                    const OptionalTensor& alibi_slopes, double softmax_scale,
                    std::int64_t window_left, std::int64_t window_right, double softcap,
                    bool rotary_interleaved, std::int64_t split_size, bool deterministic,
                    const OptionalTensor& learnable_sink) {
  check_attention_input(q, "q", q, 4);
  const bool latent = !given_v_cache.has_value();
  Tensor v_cache = latent ? latent_values(k_cache, q) : *given_v_cache;
  check_cached(k_cache, "k_cache", v_cache, "v_cache", q, 4);
  check_rows(k_cache, "k_cache");
  check_rows(v_cache, "v_cache");
  check_heads(q, k_cache, v_cache, latent);
  const std::int64_t batch = q.size(0);
  const std::int64_t head_dim = q.size(3);
  const std::int64_t head_dim_v = v_cache.size(3);
  const std::int64_t nheads_k = k_cache.size(2);
  const bool paged = block_table.has_value();
  check(batch > 0, "q: expected a batch of at least 1, got shape ", Shape{q});
  check_shape(k_cache, "k_cache", {k_cache.size(0), k_cache.size(1), nheads_k, head_dim});
  check_shape(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), nheads_k, head_dim_v});
  std::int64_t capacity = k_cache.size(1);
  if (paged) {
    check(!cache_batch_idx.has_value(),
          "cache_batch_idx: expected None together with block_table, got a tensor");
    check(!cache_leftpad.has_value(),
          "cache_leftpad: expected None together with block_table, got a tensor");
    check(k_cache.size(1) > 0 && k_cache.size(1) % 16 == 0,
          "k_cache: expected pages of a multiple of 16 tokens, got ", k_cache.size(1));
    check_pages(*block_table, q, batch);
    capacity = block_table->size(1) * k_cache.size(1);
  } else if (cache_batch_idx.has_value()) {
    check_int32(*cache_batch_idx, "cache_batch_idx", q, {batch});
  } else {
    check(k_cache.size(0) >= batch, "k_cache: expected a batch of at least ", batch, ", got shape ",
          Shape{k_cache});
  }
  check(capacity < (1 << 30), "k_cache: expected sequences below 2^30 tokens, got ", capacity);
  if (cache_seqlens.has_value()) {
    check_int32(*cache_seqlens, "cache_seqlens", q, {batch});
  }
  if (cache_leftpad.has_value()) {
    check_int32(*cache_leftpad, "cache_leftpad", q, {batch});
  }
  check(k.has_value() == v.has_value(), "k, v: expected both or neither, got ",
        k.has_value() ? "k" : "v", " alone");
  const bool rotates = rotary_cos.has_value();
  check(rotates == rotary_sin.has_value(), "rotary_cos, rotary_sin: expected both or neither, got ",
        rotates ? "rotary_cos" : "rotary_sin", " alone");
  check(k.has_value() || !rotates, "rotary_cos: expected None without k and v, got a tensor");
  if (k.has_value()) {
    check(!is_e4m3(k_cache), "k: expected None with a cache of float8_e4m3fn, got a tensor");
    check(!latent, "k: expected None with v_cache None, got a tensor");
    check(cache_seqlens.has_value(),
          "cache_seqlens: expected a tensor where k and v are appended, got None");
    check_attention_input(*k, "k", q, 4);
    check_attention_input(*v, "v", q, 4);
    check_shape(*k, "k", {batch, k->size(1), nheads_k, head_dim});
    check_shape(*v, "v", {batch, k->size(1), nheads_k, head_dim_v});
    check(k->size(1) <= capacity, "k: expected at most the ", capacity,
          " tokens that the cache holds for a sequence, got ", k->size(1));
  }
  if (rotates) {
    check_rotary(*rotary_cos, *rotary_sin, q, capacity);
  }

  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor out = allocate(q, {batch, q.size(1), q.size(2), head_dim_v});
  Tensor softmax_lse = allocate(q, {batch, q.size(2), q.size(1)}, ScalarType::Float);
  const Tensor q_rows = aligned(q);
  const Tensor attending = rotates ? allocate(q, q.sizes()) : q_rows;
  const OptionalTensor no_rng_state;
  FwdParams params{};
  set_dense(params, attending, k_cache, v_cache, out, softmax_lse);
  set_head_dims(params, head_dim, head_dim_v);
  params.seqlen_k = static_cast<int>(capacity);  // of pages, more than one of them
  params.kv_batch = static_cast<int>(k_cache.size(0));
  params.kv_fp8 = is_e4m3(k_cache);
  // Lengths, not offsets: upstream's meaning of this flag.
  params.cu_seqlens_k = data(cache_seqlens);
  params.is_seqlens_k_cumulative = !cache_seqlens.has_value();
  params.leftpad_k = data(cache_leftpad);
  params.cache_batch_idx = data(cache_batch_idx);
  if (paged) {
    params.block_table = data(block_table);
    params.block_table_batch_stride = block_table->stride(0);
    params.page_block_size = static_cast<int>(k_cache.size(1));
  }
  set_scores(params,
             {softmax_scale, window_left, window_right, softcap, alibi_slopes, 0.0, no_rng_state},
             q);
  params.sinks = sinks_of(learnable_sink, params.h, q);
  // Everything is checked before the cache is written to.
  const FwdPlan plan = plan_call(params, q, split_size, deterministic);

  if (k.has_value()) {
    // Makes the kernels count them; they will be in the cache.
    params.knew_ptr = k->data_ptr();
    params.seqlen_knew = static_cast<int>(k->size(1));
    const Tensor new_k = aligned(*k);
    const Tensor new_v = aligned(*v);
    AppendParams append{};
    append.batch = static_cast<int>(batch);
    append.head_dim = static_cast<int>(head_dim);
    append.head_dim_v = static_cast<int>(head_dim_v);
    append.element_is_bf16 = q.scalar_type() == ScalarType::BFloat16;
    append.seqlen_new = params.seqlen_knew;
    append.nheads_k = static_cast<int>(nheads_k);
    append.new_k = rows_of(new_k);
    append.new_v = rows_of(new_v);
    append.k_cache = rows_of(k_cache);
    append.v_cache = rows_of(v_cache);
    append.capacity = static_cast<int>(capacity);
    append.cache_seqlens = data(cache_seqlens);
    append.cache_batch_idx = data(cache_batch_idx);
    append.block_table = data(block_table);
    append.block_table_batch_stride = paged ? block_table->stride(0) : 0;
    append.page_block_size = static_cast<int>(k_cache.size(1));
    if (rotates) {
      append.seqlen_q = static_cast<int>(q.size(1));
      append.nheads = static_cast<int>(q.size(2));
      append.q = rows_of(q_rows);
      append.rotated_q = rows_of(attending);
      append.rotary_dim = static_cast<int>(2 * rotary_cos->size(1));
      append.rotary_interleaved = rotary_interleaved;
      append.query_positions_advance = window_left >= 0 || window_right >= 0;
      append.rotary_positions = static_cast<int>(rotary_cos->size(0));
      append.rotary_cos = rotary_cos->data_ptr();
      append.rotary_sin = rotary_sin->data_ptr();
    }
    append_kv(append, current_stream(q.get_device_index()));
  }
  run_fwd(params, {attending, k_cache, v_cache, out, nullptr}, plan);
  return {out, softmax_lse};
}

}  // namespace fad
