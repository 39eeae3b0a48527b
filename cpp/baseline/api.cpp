// Fills upstream's parameter structs the way its torch binding does, and calls its launchers.
#include "api.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#include "flash.h"

namespace {

using FwdParams = FLASH_NAMESPACE::Flash_fwd_params;
using BwdParams = FLASH_NAMESPACE::Flash_bwd_params;

constexpr double kLog2E = 1.4426950408889634074;
constexpr int kMaxSplits = 128;  // the largest that upstream's combine kernel is compiled for
constexpr int kSplitRows = 64;   // tile height of upstream's split kernel
constexpr int kRounding = 128;   // of sequence lengths, for scratch

thread_local std::string last_error;

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int round_up(int value, int multiple) { return ceil_div(value, multiple) * multiple; }

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

template <typename Function>
int32_t guarded(Function&& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

void set_qkv(FwdParams& params, const fa2_tensor& q, const fa2_tensor& k, const fa2_tensor& v,
             const fa2_tensor& out) {
  params.q_ptr = q.data;
  params.q_batch_stride = q.batch_stride;
  params.q_row_stride = q.row_stride;
  params.q_head_stride = q.head_stride;
  params.k_ptr = k.data;
  params.k_batch_stride = k.batch_stride;
  params.k_row_stride = k.row_stride;
  params.k_head_stride = k.head_stride;
  params.v_ptr = v.data;
  params.v_batch_stride = v.batch_stride;
  params.v_row_stride = v.row_stride;
  params.v_head_stride = v.head_stride;
  params.o_ptr = out.data;
  params.o_batch_stride = out.batch_stride;
  params.o_row_stride = out.row_stride;
  params.o_head_stride = out.head_stride;
}

enum class Kind { fwd, fwd_split, bwd };
enum class Feature { plain, local, softcap, alibi, dropout };

// What CMakeLists.txt compiled, a function for each of upstream's files and each feature.
struct Instance {
  Kind kind;
  int head_dim;
  bool is_bf16, is_causal;
  Feature feature;
  void (*launch)(void* params, cudaStream_t stream);
};
#define X(name, ...) void name(void* params, cudaStream_t stream);
}  // namespace
#include "instances.h"
#undef X
namespace {
#define X(name, kind, head_dim, bf16, causal, feature) \
  {Kind::kind, head_dim, bf16, causal, Feature::feature, &::name},
const Instance kInstances[] = {
#include "instances.h"
};
#undef X

void set_problem(FwdParams& params, const fa2_problem& problem) {
  if ((problem.cu_seqlens_q == nullptr) != (problem.cu_seqlens_k == nullptr)) {
    throw std::runtime_error("cu_seqlens_q, cu_seqlens_k: expected both or neither");
  }
  params.is_bf16 = problem.is_bf16 != 0;
  params.b = problem.batch;
  params.h = problem.nheads;
  params.h_k = problem.nheads_k;
  params.h_h_k_ratio = problem.nheads / problem.nheads_k;
  params.seqlen_q = problem.seqlen_q;
  params.seqlen_k = problem.seqlen_k;
  params.seqlen_q_rounded = round_up(problem.seqlen_q, kRounding);
  params.seqlen_k_rounded = round_up(problem.seqlen_k, kRounding);
  params.d = params.d_rounded = problem.head_dim;
  // Tanh comes first with softcap: the scale goes into it, and softcap takes the scale's place.
  params.softcap = problem.softcap > 0.f ? problem.softmax_scale / problem.softcap : 0.f;
  params.scale_softmax = problem.softcap > 0.f ? problem.softcap : problem.softmax_scale;
  params.scale_softmax_log2 = static_cast<float>(params.scale_softmax * kLog2E);
  // As upstream: a window over all keys is none, causal is a window to the right of 0, and the
  // unlimited side of a limited window reaches over all keys.
  int left = problem.window_left >= problem.seqlen_k ? -1 : problem.window_left;
  int right = problem.window_right >= problem.seqlen_k ? -1 : problem.window_right;
  right = problem.is_causal ? 0 : right;
  params.is_causal = left < 0 && right == 0;
  const bool limited = left >= 0 || right >= 0;
  params.window_size_left = limited && left < 0 ? problem.seqlen_k : left;
  params.window_size_right = limited && right < 0 ? problem.seqlen_k : right;
  params.is_seqlens_k_cumulative = true;
  params.cu_seqlens_q = const_cast<int*>(problem.cu_seqlens_q);
  params.cu_seqlens_k = const_cast<int*>(problem.cu_seqlens_k);
  params.total_q = problem.total_q;
  params.unpadded_lse = problem.cu_seqlens_q != nullptr;
  params.alibi_slopes_ptr = const_cast<float*>(problem.alibi_slopes);
  params.alibi_slopes_batch_stride = problem.alibi_batch_stride;
  params.p_dropout = 1.f - problem.p_dropout;  // the probability to keep
  params.p_dropout_in_uint8_t = static_cast<std::uint8_t>(std::floor(params.p_dropout * 255.0));
  params.rp_dropout = 1.f / params.p_dropout;
  params.scale_softmax_rp_dropout = params.rp_dropout * params.scale_softmax;
  params.rng_state = problem.rng_state;  // the forward writes what it reads
  params.philox_args.seed_and_offset = problem.rng_state;
  if (problem.p_dropout > 0.f && problem.rng_state == nullptr) {
    throw std::runtime_error("rng_state: expected a pointer together with dropout");
  }
}

const char* name_of(Feature feature) {
  constexpr const char* kNames[] = {"plain", "window", "softcap", "ALiBi", "dropout"};
  return kNames[static_cast<int>(feature)];
}

// The one feature of a problem; throws if there are several.
Feature feature_of(const FwdParams& params) {
  Feature feature = Feature::plain;
  int count = 0;
  const auto note = [&](bool there, Feature one) {
    feature = there ? one : feature;
    count += there;
  };
  note(!params.is_causal && (params.window_size_left >= 0 || params.window_size_right >= 0),
       Feature::local);
  note(params.softcap > 0.f, Feature::softcap);
  note(params.alibi_slopes_ptr != nullptr, Feature::alibi);
  note(params.p_dropout < 1.f, Feature::dropout);
  if (count > 1) {
    throw std::runtime_error("the baseline holds one feature at a time, got several");
  }
  return feature;
}

const Instance* find(const FwdParams& params, Kind kind) {
  const Feature feature = feature_of(params);
  for (const Instance& one : kInstances) {
    if (one.kind == kind && one.head_dim == params.d && one.is_bf16 == params.is_bf16 &&
        one.is_causal == params.is_causal && one.feature == feature) {
      return &one;
    }
  }
  return nullptr;
}

void launch(Kind kind, FwdParams& params, void* all, void* stream) {
  const Instance* const instance = find(params, kind);
  if (instance == nullptr) {
    constexpr const char* kKinds[] = {"forward", "split forward", "backward"};
    throw std::runtime_error(
        std::string("the baseline holds no ") + kKinds[static_cast<int>(kind)] + " for head_dim " +
        std::to_string(params.d) + (params.is_bf16 ? ", bf16, " : ", fp16, ") +
        (params.is_causal ? "causal, " : "full, ") + name_of(feature_of(params)));
  }
  instance->launch(all, static_cast<cudaStream_t>(stream));
}

// Upstream's heuristic: none if the row blocks alone fill 80 % of the slots; otherwise the fewest
// splits whose last wave is at least 85 % as full as the best choice's.
int choose_num_splits(int row_blocks, int slots, int key_blocks) {
  if (row_blocks >= 0.8f * slots) {
    return 1;
  }
  const int limit = std::min({kMaxSplits, slots, key_blocks});
  // How full the waves are, or 0 where one split fewer gives CTAs of the same length.
  const auto fullness = [&](int splits) {
    if (splits > 1 && ceil_div(key_blocks, splits) == ceil_div(key_blocks, splits - 1)) {
      return 0.f;
    }
    const float waves = static_cast<float>(row_blocks * splits) / slots;
    return waves / std::ceil(waves);
  };
  float best = 0.f;
  for (int splits = 1; splits <= limit; ++splits) {
    best = std::max(best, fullness(splits));
  }
  for (int splits = 1; splits <= limit; ++splits) {
    const float full = fullness(splits);
    if (full > 0.f && full >= 0.85 * best) {
      return splits;
    }
  }
  return 1;
}

}  // namespace

const char* fa2_baseline_error(void) { return last_error.c_str(); }

int32_t fa2_baseline_version(void) { return FA2_BASELINE_VERSION; }

int32_t fa2_baseline_holds(const fa2_problem* problem, int32_t backward) {
  int32_t held = 0;
  guarded([&] {
    FwdParams params{};
    set_problem(params, *problem);
    held = find(params, backward != 0 ? Kind::bwd : Kind::fwd) != nullptr;
  });
  return held;
}

int32_t fa2_baseline_num_splits(const fa2_problem* problem, int32_t num_sms) {
  const int key_block = problem->head_dim <= 64 ? 256 : problem->head_dim <= 128 ? 128 : 64;
  const int row_blocks = problem->batch * problem->nheads * ceil_div(problem->seqlen_q, kSplitRows);
  // Two CTAs of 128 threads on an SM.
  return choose_num_splits(row_blocks, 2 * num_sms, ceil_div(problem->seqlen_k, key_block));
}

int32_t fa2_baseline_forward(const fa2_problem* problem, const fa2_tensor* q, const fa2_tensor* k,
                             const fa2_tensor* v, const fa2_tensor* out, float* softmax_lse,
                             int32_t num_splits, float* out_accum, float* lse_accum) {
  return guarded([&] {
    check(cudaSetDevice(problem->device), "cudaSetDevice");
    if (num_splits < 1 || num_splits > kMaxSplits) {
      throw std::runtime_error("num_splits: expected 1 to 128, got " + std::to_string(num_splits));
    }
    if (num_splits > 1 && problem->cu_seqlens_q != nullptr) {
      throw std::runtime_error("num_splits: expected 1 for packed sequences, got " +
                               std::to_string(num_splits));
    }
    FwdParams params{};
    set_problem(params, *problem);
    set_qkv(params, *q, *k, *v, *out);
    params.softmax_lse_ptr = softmax_lse;
    params.num_splits = num_splits;
    params.oaccum_ptr = out_accum;
    params.softmax_lseaccum_ptr = lse_accum;
    launch(num_splits > 1 ? Kind::fwd_split : Kind::fwd, params, &params, problem->stream);
  });
}

int32_t fa2_baseline_backward(const fa2_problem* problem, const fa2_tensor* dout,
                              const fa2_tensor* q, const fa2_tensor* k, const fa2_tensor* v,
                              const fa2_tensor* out, const float* softmax_lse, const fa2_tensor* dq,
                              const fa2_tensor* dk, const fa2_tensor* dv, float* softmax_d,
                              float* dq_accum, int32_t deterministic,
                              int64_t dq_accum_split_stride) {
  return guarded([&] {
    check(cudaSetDevice(problem->device), "cudaSetDevice");
    BwdParams params{};
    set_problem(params, *problem);
    set_qkv(params, *q, *k, *v, *out);
    params.softmax_lse_ptr = const_cast<float*>(softmax_lse);
    params.do_ptr = dout->data;
    params.do_batch_stride = dout->batch_stride;
    params.do_row_stride = dout->row_stride;
    params.do_head_stride = dout->head_stride;
    params.dq_ptr = dq->data;
    params.dq_batch_stride = dq->batch_stride;
    params.dq_row_stride = dq->row_stride;
    params.dq_head_stride = dq->head_stride;
    params.dk_ptr = dk->data;
    params.dk_batch_stride = dk->batch_stride;
    params.dk_row_stride = dk->row_stride;
    params.dk_head_stride = dk->head_stride;
    params.dv_ptr = dv->data;
    params.dv_batch_stride = dv->batch_stride;
    params.dv_row_stride = dv->row_stride;
    params.dv_head_stride = dv->head_stride;
    params.dsoftmax_sum = softmax_d;
    params.dq_accum_ptr = dq_accum;
    params.deterministic = deterministic != 0;
    params.dq_accum_split_stride = dq_accum_split_stride;
    launch(Kind::bwd, params, &params, problem->stream);
  });
}
