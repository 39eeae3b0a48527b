// Compares the backward's families bit for bit, and times them, without torch:
//
//   fad_bwd_families stages            the steps of one tile, one by one: says which one differs
//   fad_bwd_families drawn N [SEED]    N drawn calls
//   fad_bwd_families crowded N [SEED]  N drawn calls, beside a kernel that holds all SMs but two
//   fad_bwd_families time [HEADS ...]  whole backwards of both families, side by side; sm90's also
//                                      with each number of HEADS in flight
//
// Drawn calls run in each family that holds their head dim, with one CTA to a key block, with as
// many parts as fit, and as planned.
//
// A call that does not end within a minute is reported as stuck. The exit status is 0 if all bits
// are equal, 1 if some differ, 2 for errors and 3 for a call that is stuck.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "instances.h"
#include "plan.h"

#define CHECK(call)                                                                     \
  do {                                                                                  \
    const cudaError_t status = (call);                                                  \
    if (status != cudaSuccess) {                                                        \
      throw std::runtime_error(std::string(#call) + ": " + cudaGetErrorString(status)); \
    }                                                                                   \
  } while (false)

namespace fad {

#define FAD_DECLARE(dtype, head_dim) extern const BwdInstance bwd_##dtype##_##head_dim;
FAD_BWD_INSTANCES(FAD_DECLARE)
#undef FAD_DECLARE

namespace {

struct Held {
  const char* dtype;
  int head_dim;
  const BwdInstance* instance;
};
#define FAD_HELD(dtype, head_dim) {#dtype, head_dim, &bwd_##dtype##_##head_dim},
constexpr Held kHeld[] = {FAD_BWD_INSTANCES(FAD_HELD)};
#undef FAD_HELD

bool has_sm90(const Held& held) { return held.instance->kernels[0].family == Family::kSm90; }
bool is_bf16(const Held& held) { return std::strcmp(held.dtype, "bf16") == 0; }

// ---- memory

template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count = 0) : count_(count) {
    CHECK(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)));
    CHECK(cudaMemset(data_, 0xff, std::max<size_t>(count, 1) * sizeof(T)));  // NaN, or -1
  }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t size() const { return count_; }
  std::vector<T> host() const {
    std::vector<T> values(count_);
    CHECK(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  void set(const std::vector<T>& values) {
    CHECK(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// ---- inputs

struct Call {
  Held held;
  int head_dim = 0;
  int heads = 1, heads_k = 1;
  std::vector<int> lengths_q, lengths_k;  // of each sequence
  bool packed = false;
  int window_left = -1, window_right = -1;
  bool deterministic = true;
  std::optional<Path> path;  // kOneCta, or kParts: as many parts as fit
  enum class Values { kNormal, kDenormal, kHuge } values = Values::kNormal;
  float scale = 0.f;
  uint64_t seed = 1;

  int batch() const { return static_cast<int>(lengths_q.size()); }
  int max_q() const { return *std::max_element(lengths_q.begin(), lengths_q.end()); }
  int max_k() const { return *std::max_element(lengths_k.begin(), lengths_k.end()); }
  std::string name() const {
    std::string text = std::string(held.dtype) + " D" + std::to_string(head_dim) + " B" +
                       std::to_string(batch()) + " Lq" + std::to_string(max_q()) + " Lk" +
                       std::to_string(max_k()) + " H" + std::to_string(heads) + "/" +
                       std::to_string(heads_k) + (packed ? " packed" : "");
    if (window_left >= 0 || window_right >= 0) {
      text += window_left < 0 && window_right == 0
                  ? " causal"
                  : " window " + std::to_string(window_left) + "," + std::to_string(window_right);
    }
    text += values == Values::kDenormal ? " tiny" : values == Values::kHuge ? " huge" : "";
    return text + " seed " + std::to_string(seed);
  }
};

std::vector<int> starts(const std::vector<int>& lengths) {
  std::vector<int> values{0};
  for (const int length : lengths) {
    values.push_back(values.back() + length);
  }
  return values;
}

__device__ uint32_t hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}

// Nearly normal.
__device__ float draw(uint64_t seed, uint64_t at) {
  float sum = 0.f;
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<float>(hash(seed * 0x9e3779b97f4a7c15ull + at * 4 + i)) * 0x1p-32f - 0.5f;
  }
  return sum * 1.732f;
}

template <typename Element>
__global__ void fill_kernel(Element* data, size_t count, uint64_t seed, float amplitude) {
  for (size_t at = blockIdx.x * size_t{256} + threadIdx.x; at < count;
       at += gridDim.x * size_t{256}) {
    data[at] = static_cast<Element>(amplitude * draw(seed, at));
  }
}

// Row r of each head: `value` in column r % head_dim.
template <typename Element>
__global__ void unit_rows_kernel(Element* data, size_t count, int heads, int head_dim,
                                 float value) {
  for (size_t at = blockIdx.x * size_t{256} + threadIdx.x; at < count;
       at += gridDim.x * size_t{256}) {
    const size_t row = at / head_dim / heads;
    data[at] = static_cast<Element>(at % head_dim == row % head_dim ? value : 0.f);
  }
}

__global__ void fill_floats_kernel(float* data, size_t count, float value) {
  for (size_t at = blockIdx.x * size_t{256} + threadIdx.x; at < count;
       at += gridDim.x * size_t{256}) {
    data[at] = value;
  }
}

// out and softmax_lse of one row of one head, in plain fp32: both families get the same.
template <typename Element>
__global__ void attend_kernel(const Element* q, const Element* k, const Element* v, Element* out,
                              float* softmax_lse, const int* starts_q, const int* starts_k,
                              int seqlen_q, int seqlen_k, int heads, int heads_k, int head_dim,
                              int64_t total_q, int window_left, int window_right, float scale) {
  const int bidb = blockIdx.y, bidh = blockIdx.z, row = blockIdx.x;
  const int first_q = starts_q == nullptr ? bidb * seqlen_q : starts_q[bidb];
  const int first_k = starts_k == nullptr ? bidb * seqlen_k : starts_k[bidb];
  const int rows = starts_q == nullptr ? seqlen_q : starts_q[bidb + 1] - first_q;
  const int keys = starts_k == nullptr ? seqlen_k : starts_k[bidb + 1] - first_k;
  if (row >= rows) {
    return;
  }
  const int at = row + keys - rows;
  const int begin = window_left < 0 ? 0 : max(0, at - window_left);
  const int end = window_right < 0 ? keys : min(keys, at + window_right + 1);
  const Element* const q_row = q + (static_cast<int64_t>(first_q + row) * heads + bidh) * head_dim;
  const int head_k = bidh / (heads / heads_k);
  extern __shared__ float scores[];
  __shared__ float maximum, sum;
  for (int key = begin + threadIdx.x; key < end; key += blockDim.x) {
    const Element* const k_row =
        k + (static_cast<int64_t>(first_k + key) * heads_k + head_k) * head_dim;
    float score = 0.f;
    for (int i = 0; i < head_dim; ++i) {
      score += static_cast<float>(q_row[i]) * static_cast<float>(k_row[i]);
    }
    scores[key - begin] = score * scale;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    maximum = -INFINITY;
    sum = 0.f;
    for (int key = begin; key < end; ++key) {
      maximum = fmaxf(maximum, scores[key - begin]);
    }
    for (int key = begin; key < end; ++key) {
      sum += expf(scores[key - begin] - maximum);
    }
    softmax_lse[starts_q == nullptr ? (static_cast<int64_t>(bidb) * heads + bidh) * seqlen_q + row
                                    : bidh * total_q + first_q + row] =
        end > begin ? maximum + logf(sum) : INFINITY;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    float value = 0.f;
    for (int key = begin; key < end; ++key) {
      const int64_t v_row = (static_cast<int64_t>(first_k + key) * heads_k + head_k) * head_dim;
      value += expf(scores[key - begin] - maximum) * static_cast<float>(v[v_row + i]);
    }
    out[(static_cast<int64_t>(first_q + row) * heads + bidh) * head_dim + i] =
        static_cast<Element>(end > begin ? value / sum : 0.f);
  }
}

struct Inputs {
  Buffer<uint16_t> q, k, v, out, dout;
  Buffer<float> softmax_lse;
  Buffer<int> starts_q, starts_k;
  int64_t rows_q, rows_k;  // of all sequences, with some that none owns where they are packed

  explicit Inputs(const Call& call) {
    constexpr int kSpare = 5;
    rows_q = call.packed ? starts(call.lengths_q).back() + kSpare
                         : static_cast<int64_t>(call.batch()) * call.max_q();
    rows_k = call.packed ? starts(call.lengths_k).back() + kSpare
                         : static_cast<int64_t>(call.batch()) * call.max_k();
    const size_t elements_q = rows_q * call.heads * call.head_dim;
    const size_t elements_k = rows_k * call.heads_k * call.head_dim;
    q = Buffer<uint16_t>(elements_q);
    out = Buffer<uint16_t>(elements_q);
    dout = Buffer<uint16_t>(elements_q);
    k = Buffer<uint16_t>(elements_k);
    v = Buffer<uint16_t>(elements_k);
    softmax_lse = Buffer<float>(rows_q * call.heads);
    starts_q = Buffer<int>(call.batch() + 1);
    starts_k = Buffer<int>(call.batch() + 1);
    starts_q.set(starts(call.lengths_q));
    starts_k.set(starts(call.lengths_k));
    draw_all(call);
  }

  // Elements that belong to sequences: the rest stays NaN.
  size_t used_q(const Call& call) const {
    return (call.packed ? starts(call.lengths_q).back() : rows_q) *
           static_cast<size_t>(call.heads) * call.head_dim;
  }
  size_t used_k(const Call& call) const {
    return (call.packed ? starts(call.lengths_k).back() : rows_k) *
           static_cast<size_t>(call.heads_k) * call.head_dim;
  }

  template <typename Element>
  void draw_as(const Call& call) {
    const auto fill = [&](const Buffer<uint16_t>& buffer, size_t used, int which, float amplitude) {
      fill_kernel<<<512, 256>>>(reinterpret_cast<Element*>(buffer.get()), used,
                                call.seed * 16 + which, amplitude);
    };
    // dq is dout times k: denormal sums, or infinite ones and NaN.
    const bool tiny = call.values == Call::Values::kDenormal, bf16 = is_bf16(call.held);
    const float tiny_dout = bf16 ? 0x1p-120f : 0x1p-20f, tiny_k = bf16 ? 0x1p-20f : 0x1p-14f;
    fill(q, used_q(call), 0, tiny ? tiny_k : 1.f);
    fill(k, used_k(call), 1, tiny ? tiny_k : 1.f);
    fill(v, used_k(call), 2, 1.f);
    fill(dout, used_q(call), 3,
         tiny                                 ? tiny_dout
         : call.values == Call::Values::kHuge ? (bf16 ? 0x1p125f : 60000.f)
                                              : 1.f);
    fill(out, used_q(call), 4, tiny ? 0x1p-20f : 0.1f);
    fill_floats_kernel<<<512, 256>>>(softmax_lse.get(), softmax_lse.size(),
                                     std::log(static_cast<float>(std::max(call.max_k(), 1))));
    CHECK(cudaGetLastError());
  }
  void draw_all(const Call& call) {
    is_bf16(call.held) ? draw_as<__nv_bfloat16>(call) : draw_as<__half>(call);
  }

  template <typename Element>
  void attend_as(const Call& call) {
    const auto as = [](const Buffer<uint16_t>& buffer) {
      return reinterpret_cast<Element*>(buffer.get());
    };
    if (call.max_q() == 0) {
      return;
    }
    attend_kernel<Element><<<dim3(call.max_q(), call.batch(), call.heads), 128,
                             std::max(call.max_k(), 1) * sizeof(float)>>>(
        as(q), as(k), as(v), as(out), softmax_lse.get(), call.packed ? starts_q.get() : nullptr,
        call.packed ? starts_k.get() : nullptr, call.max_q(), call.max_k(), call.heads,
        call.heads_k, call.head_dim, rows_q, call.window_left, call.window_right, call.scale);
    CHECK(cudaGetLastError());
  }
  void attend(const Call& call) {
    is_bf16(call.held) ? attend_as<__nv_bfloat16>(call) : attend_as<__half>(call);
  }

  void unit_rows(const Call& call, const Buffer<uint16_t>& buffer, int heads, float value) const {
    if (is_bf16(call.held)) {
      unit_rows_kernel<<<512, 256>>>(reinterpret_cast<__nv_bfloat16*>(buffer.get()), buffer.size(),
                                     heads, call.head_dim, value);
    } else {
      unit_rows_kernel<<<512, 256>>>(reinterpret_cast<__half*>(buffer.get()), buffer.size(), heads,
                                     call.head_dim, value);
    }
    CHECK(cudaGetLastError());
  }
  void fill_lse(float value) const {
    fill_floats_kernel<<<512, 256>>>(softmax_lse.get(), softmax_lse.size(), value);
    CHECK(cudaGetLastError());
  }
};

// ---- a call of one family

struct Stuck : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void finish(const std::string& what) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    const cudaError_t status = cudaStreamQuery(nullptr);
    if (status == cudaSuccess) {
      return;
    }
    if (status != cudaErrorNotReady) {
      throw std::runtime_error(what + ": " + cudaGetErrorString(status));
    }
    if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(60)) {
      throw Stuck(what);
    }
  }
}

Device device_with(Family family, std::optional<Path> path = std::nullopt) {
  int sms = 0, shared = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  return {sms, shared, 90, path, family, 50 << 20};
}

const char* name_of(Family family) { return family == Family::kSm80 ? "sm80" : "sm90"; }

struct Gradients {
  Buffer<uint16_t> dq, dk, dv;
  Gradients(const Inputs& inputs) : dq(inputs.q.size()), dk(inputs.k.size()), dv(inputs.k.size()) {}
};

struct Scratch {
  Buffer<float> row_sums, dq_sums, slots, part_sums;
  Buffer<unsigned> counters;
};

BwdParams params_of(const Call& call, const Inputs& inputs, const Gradients& gradients) {
  BwdParams params{};
  const int64_t row_q = static_cast<int64_t>(call.heads) * call.head_dim;
  const int64_t row_k = static_cast<int64_t>(call.heads_k) * call.head_dim;
  params.q_ptr = inputs.q.get();
  params.o_ptr = inputs.out.get();
  params.do_ptr = inputs.dout.get();
  params.dq_ptr = gradients.dq.get();
  params.k_ptr = inputs.k.get();
  params.v_ptr = inputs.v.get();
  params.dk_ptr = gradients.dk.get();
  params.dv_ptr = gradients.dv.get();
  params.q_row_stride = params.o_row_stride = params.do_row_stride = params.dq_row_stride = row_q;
  params.k_row_stride = params.v_row_stride = params.dk_row_stride = params.dv_row_stride = row_k;
  params.q_head_stride = params.o_head_stride = params.do_head_stride = params.dq_head_stride =
      params.k_head_stride = params.v_head_stride = params.dk_head_stride = params.dv_head_stride =
          call.head_dim;
  if (!call.packed) {
    params.q_batch_stride = params.o_batch_stride = params.do_batch_stride =
        params.dq_batch_stride = row_q * call.max_q();
    params.k_batch_stride = params.v_batch_stride = params.dk_batch_stride =
        params.dv_batch_stride = row_k * call.max_k();
  } else {
    params.cu_seqlens_q = inputs.starts_q.get();
    params.cu_seqlens_k = inputs.starts_k.get();
    params.unpadded_lse = true;
  }
  params.total_q = static_cast<int>(inputs.rows_q);
  params.total_k = static_cast<int>(inputs.rows_k);
  params.is_seqlens_k_cumulative = true;
  params.b = call.batch();
  params.seqlen_q = call.max_q();
  params.seqlen_k = call.max_k();
  params.h = call.heads;
  params.h_k = call.heads_k;
  params.h_h_k_ratio = call.heads / call.heads_k;
  params.d = params.d_v = call.head_dim;
  params.d_rounded = call.held.head_dim;
  params.seqlen_q_rounded = (call.max_q() + 127) / 128 * 128;
  params.is_bf16 = is_bf16(call.held);
  params.scale_softmax = params.scale_softmax_rp_dropout = call.scale;
  params.scale_softmax_log2 =
      static_cast<float>(static_cast<double>(call.scale) * 1.4426950408889634074);
  params.p_dropout = params.rp_dropout = 1.f;
  params.p_dropout_in_uint8_t = 255;
  params.window_size_left = call.window_left;
  params.window_size_right = call.window_right;
  params.is_causal = call.window_left < 0 && call.window_right == 0;
  params.softmax_lse_ptr = inputs.softmax_lse.get();
  return params;
}

Scratch scratch_of(BwdParams& params, const BwdPlan& plan) {
  const int64_t rows = params.cu_seqlens_q != nullptr
                           ? params.total_q + 128ll * params.b
                           : static_cast<int64_t>(params.b) * params.seqlen_q_rounded;
  const int block_n = plan.kernel->block_n;
  const int64_t key_blocks =
      params.cu_seqlens_k != nullptr
          ? params.total_k / block_n + params.b
          : static_cast<int64_t>(params.b) * ((params.seqlen_k + block_n - 1) / block_n);
  const int64_t keys = params.cu_seqlens_k != nullptr
                           ? params.total_k
                           : static_cast<int64_t>(params.b) * params.seqlen_k;
  const int64_t positions = params.h_k * key_blocks * plan.parts.count;
  const int64_t slot = 2ll * block_n * params.d_rounded * plan.kept_sums;
  const int64_t part = plan.parts.fold() ? plan.parts.count * keys * params.h_k * params.d : 0;
  Scratch scratch{Buffer<float>(rows * params.h), Buffer<float>(rows * params.h * params.d_rounded),
                  Buffer<float>(plan.slots * slot), Buffer<float>(2 * part),
                  Buffer<unsigned>(1 + positions + plan.slot_counters)};
  params.dsoftmax_sum = scratch.row_sums.get();
  params.dq_accum_ptr = scratch.dq_sums.get();
  params.slots = plan.slots > 0 ? scratch.slots.get() : nullptr;
  params.tickets = scratch.counters.get();
  params.progress = params.tickets + 1;
  params.freed_slots = params.progress + positions;
  if (part > 0) {
    params.dk_sums = scratch.part_sums.get();
    params.dv_sums = params.dk_sums + part;
  }
  return scratch;
}

Gradients run(const Call& call, const Inputs& inputs, Family family) {
  Gradients gradients(inputs);
  BwdParams params = params_of(call, inputs, gradients);
  const BwdPlan plan =
      plan_bwd(params, *call.held.instance, call.deterministic, device_with(family, call.path));
  if (plan.kernel->family != family) {
    throw std::runtime_error(call.name() + ": the plan does not take " + name_of(family));
  }
  const Scratch scratch = scratch_of(params, plan);
  CHECK(cudaMemset(scratch.counters.get(), 0, scratch.counters.size() * sizeof(unsigned)));
  run_plan(plan, params, nullptr);
  finish(call.name() + " (" + name_of(family) + ")");
  return gradients;
}

// ---- comparison

float value_of(const Call& call, uint16_t bits) {
  if (is_bf16(call.held)) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

// Returns whether all bits of the rows that sequences own are equal; says where they first differ.
bool same(const Call& call, const char* name, const Buffer<uint16_t>& left,
          const Buffer<uint16_t>& right, size_t used, int heads, bool may_be_zero) {
  const std::vector<uint16_t> a = left.host(), b = right.host();
  size_t differing = 0, first = 0, nan = 0;
  double largest = 0, magnitude = 0;
  for (size_t at = 0; at < used; ++at) {
    const double x = value_of(call, a[at]), y = value_of(call, b[at]);
    nan += std::isnan(x) || std::isnan(y);
    magnitude = std::max(magnitude, std::fabs(x));
    if (a[at] != b[at]) {
      first = differing++ == 0 ? at : first;
      largest = std::max(largest, std::fabs(x - y));
    }
  }
  if (differing == 0 && (nan == 0 || call.values == Call::Values::kHuge) &&
      (magnitude > 0 || may_be_zero)) {
    return true;
  }
  const size_t row = first / call.head_dim / heads;
  std::printf("    %s: %zu of %zu elements differ (largest by %g; values up to %g; %zu NaN)\n",
              name, differing, used, largest, magnitude, nan);
  if (differing > 0) {
    std::printf("      first: row %zu, head %zu, column %zu: sm80 %g (%04x), sm90 %g (%04x)\n", row,
                first / call.head_dim % heads, first % call.head_dim, value_of(call, a[first]),
                a[first], value_of(call, b[first]), b[first]);
    std::vector<size_t> rows, columns;
    for (size_t at = 0; at < used; ++at) {
      if (a[at] != b[at]) {
        rows.push_back(at / call.head_dim / heads % 128);
        columns.push_back(at % call.head_dim);
      }
    }
    const auto places = [](std::vector<size_t> values) {
      std::sort(values.begin(), values.end());
      values.erase(std::unique(values.begin(), values.end()), values.end());
      std::string text = std::to_string(values.size()) + ":";
      for (size_t i = 0; i < values.size() && i < 12; ++i) {
        text += " " + std::to_string(values[i]);
      }
      return text + (values.size() > 12 ? " ..." : "");
    };
    std::printf("      rows mod 128 (%s), columns (%s)\n", places(rows).c_str(),
                places(columns).c_str());
  }
  return false;
}

enum Which : unsigned { kDq = 1, kDk = 2, kDv = 4, kAll = 7 };

bool compare(const Call& call, const Inputs& inputs, unsigned which, bool may_be_zero) {
  Call first = call;
  first.path = Path::kOneCta;
  const Gradients left = run(first, inputs, Family::kSm80);
  bool equal = true;
  const std::optional<Path> planned;
  for (const auto& [family, path] :
       {std::pair{Family::kSm90, std::optional{Path::kOneCta}},
        std::pair{Family::kSm90, std::optional{Path::kParts}}, std::pair{Family::kSm90, planned},
        std::pair{Family::kSm80, std::optional{Path::kParts}}, std::pair{Family::kSm80, planned}}) {
    if (family == Family::kSm90 && !has_sm90(call.held)) {
      continue;
    }
    Call other = call;
    other.path = path;
    const Gradients right = run(other, inputs, family);
    const bool before = equal;
    if ((which & kDv) != 0) {
      equal &= same(call, "dv", left.dv, right.dv, inputs.used_k(call), call.heads_k, may_be_zero);
    }
    if ((which & kDk) != 0) {
      equal &= same(call, "dk", left.dk, right.dk, inputs.used_k(call), call.heads_k, may_be_zero);
    }
    if ((which & kDq) != 0) {
      equal &= same(call, "dq", left.dq, right.dq, inputs.used_q(call), call.heads, may_be_zero);
    }
    if (before && !equal) {
      std::printf("      in %s, %s\n", name_of(family),
                  !path.has_value()      ? "as planned"
                  : path == Path::kParts ? "parts"
                                         : "one CTA to a key block");
    }
  }
  return equal;
}

// ---- whether a matrix product is that of its transposed operands, bit for bit

__device__ void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One warp: product (16, 16) = x (16, depth) y (16, depth)^T.
template <typename Element>
__device__ void multiply_tile(float* product, const Element* x, const Element* y, int depth) {
  const int lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
  const auto pair = [&](const Element* from, int line, int k) {
    return *reinterpret_cast<const uint32_t*>(from + line * depth + k);
  };
  for (int half = 0; half < 2; ++half) {
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    for (int k = 0; k < depth; k += 16) {
      const uint32_t a[4] = {pair(x, row, k + column), pair(x, row + 8, k + column),
                             pair(x, row, k + column + 8), pair(x, row + 8, k + column + 8)};
      multiply(acc, a, pair(y, 8 * half + row, k + column), pair(y, 8 * half + row, k + column + 8),
               Element());
    }
    for (int i = 0; i < 4; ++i) {
      product[(row + i / 2 * 8) * 16 + 8 * half + column + i % 2] = acc[i];
    }
  }
}

template <typename Element>
__global__ void transposed_kernel(const Element* x, const Element* y, int depth,
                                  unsigned* differing) {
  __shared__ float straight[256], transposed[256];
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 16 * depth;
  multiply_tile(straight, x + at, y + at, depth);
  multiply_tile(transposed, y + at, x + at, depth);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += 32) {
    if (__float_as_uint(straight[i]) != __float_as_uint(transposed[i % 16 * 16 + i / 16])) {
      atomicAdd(differing, 1u);
    }
  }
}

template <typename Element>
bool products_transpose() {
  constexpr int kTiles = 4096, kDepth = 128;
  const Buffer<uint16_t> x(kTiles * 16 * kDepth), y(kTiles * 16 * kDepth);
  Buffer<unsigned> differing(1);
  differing.set({0});
  Element* const left = reinterpret_cast<Element*>(x.get());
  Element* const right = reinterpret_cast<Element*>(y.get());
  for (const float amplitude : {1.f, 0.01f, 30.f}) {
    fill_kernel<<<512, 256>>>(left, x.size(), 11, amplitude);
    fill_kernel<<<512, 256>>>(right, y.size(), 12, 1.f);
    transposed_kernel<<<kTiles, 32>>>(left, right, kDepth, differing.get());
    CHECK(cudaGetLastError());
  }
  finish("products");
  const unsigned found = differing.host()[0];
  std::printf("  %-55s %s\n", "q k^T against k q^T (mma.sync)",
              found == 0 ? "same" : ("DIFFERS in " + std::to_string(found)).c_str());
  return found == 0;
}

// ---- stages: inputs that make one gradient show one step

struct Stage {
  const char* name;
  const char* hint;
  unsigned which;
  std::function<void(Call&)> shape;
  std::function<void(const Call&, const Inputs&)> inputs;
};

bool run_stages(const Held& held) {
  const auto tile = [](int rows, int keys) {
    return [=](Call& call) {
      call.lengths_q = {rows};
      call.lengths_k = {keys};
    };
  };
  const auto nothing = [](const Call&, const Inputs&) {};
  const int rows = held.instance->kernels[0].block_m;
  const int shown = std::min(rows, 64);  // rows that unit vectors of 64 columns tell apart
  const std::vector<Stage> stages = {
      {"P in 16 bit (dv with unit rows of dO)",
       "q k^T, its mask, exp2, the rounding of P, or where P^T lies in registers", kDv,
       tile(shown, 128),
       [](const Call& call, const Inputs& inputs) {
         inputs.unit_rows(call, inputs.dout, call.heads, 1.f);
       }},
      {"dP in 16 bit (P = 1; dk with tiny unit rows of Q)",
       "dO V^T, or where dS^T lies in registers", kDk, tile(shown, 128),
       [](const Call& call, const Inputs& inputs) {
         inputs.unit_rows(call, inputs.q, call.heads, 0x1p-10f);
         CHECK(cudaMemset(inputs.out.get(), 0, inputs.out.size() * 2));
         CHECK(cudaMemset(inputs.k.get(), 0, inputs.k.size() * 2));
         inputs.fill_lse(0.f);
       }},
      {"dS in 16 bit (dk with unit rows of Q)", "P (dP - rowsum), row sums, or its rounding", kDk,
       tile(shown, 128),
       [](const Call& call, const Inputs& inputs) {
         inputs.unit_rows(call, inputs.q, call.heads, 0.125f);
       }},
      {"dS through shared memory (dq with unit rows of K)",
       "store_transposed, operands of dS K, where dq's parts lie, or the reducer", kDq,
       tile(shown, std::min(held.head_dim, 128)),
       [](const Call& call, const Inputs& inputs) {
         inputs.unit_rows(call, inputs.k, call.heads_k, 0.125f);
       }},
      {"dv of one tile", "P^T dO: order of rows", kDv, tile(rows, 128), nothing},
      {"dk of one tile", "dS^T Q: order of rows", kDk, tile(rows, 128), nothing},
      {"dq of one tile", "dS K: order of keys", kDq, tile(rows, 128), nothing},
      {"dk, dv of four row blocks", "the ring of Q and dO, or the order of row blocks", kDk | kDv,
       tile(4 * rows, 128), nothing},
      {"dq of four row blocks", "buffers of dS and dq", kDq, tile(4 * rows, 128), nothing},
      {"dq of five key blocks", "turns: order of key blocks, release and acquire", kAll,
       tile(4 * rows, 640), nothing},
      {"lengths that are no whole tiles", "ends of sequences", kAll, tile(4 * rows - 27, 640 - 39),
       nothing},
      {"causal", "the mask, or the range of row blocks", kAll,
       [=](Call& call) {
         tile(500, 500)(call);
         call.window_right = 0;
       },
       nothing},
      {"causal, more keys", "the mask's diagonal", kAll,
       [=](Call& call) {
         tile(300, 777)(call);
         call.window_right = 0;
       },
       nothing},
      {"causal, more rows (some see no key)", "the mask's diagonal; lse of +inf", kAll,
       [=](Call& call) {
         tile(777, 300)(call);
         call.window_right = 0;
       },
       nothing},
      {"window", "row blocks at both ends; key blocks that no row sees", kAll,
       [=](Call& call) {
         tile(500, 1500)(call);
         call.window_left = 100;
         call.window_right = 33;
       },
       nothing},
      {"several heads and sequences", "places of tickets", kAll,
       [=](Call& call) {
         call.lengths_q = {333, 333, 333};
         call.lengths_k = {444, 444, 444};
         call.heads = call.heads_k = 5;
       },
       nothing},
      {"groups of heads", "turns and sums of dk and dv over heads", kAll,
       [=](Call& call) {
         call.lengths_q = {333, 333};
         call.lengths_k = {444, 444};
         call.heads = 6;
         call.heads_k = 2;
       },
       nothing},
      {"packed", "rows of the next sequence, or NaN behind the last, in a tile", kAll,
       [=](Call& call) {
         call.packed = true;
         call.lengths_q = {300, 0, 1, 65, 640};
         call.lengths_k = {300, 17, 900, 0, 129};
         call.heads = 4;
         call.heads_k = 2;
         call.window_right = 0;
       },
       nothing},
      {"head_dim below the kernel's", "columns behind the head dim", kAll,
       [=](Call& call) {
         tile(200, 300)(call);
         call.head_dim = held.head_dim - 8;
       },
       nothing},
      {"chunks of rows", "the tree of dk and dv, or the slots of sums", kAll,
       [=](Call& call) {
         tile(3 * kChunkRows + 100, 300)(call);
         call.heads = 4;
         call.heads_k = 2;
       },
       nothing},
      {"tiny values", "denormal sums", kAll,
       [=](Call& call) {
         tile(500, 700)(call);
         call.values = Call::Values::kDenormal;
       },
       nothing},
      {"infinite gradients", "NaN", kAll,
       [=](Call& call) {
         tile(500, 700)(call);
         call.values = Call::Values::kHuge;
       },
       nothing},
  };
  bool equal = true;
  for (const Stage& stage : stages) {
    Call call;
    call.held = held;
    call.head_dim = held.head_dim;
    stage.shape(call);
    call.scale = 0.125f;  // a power of two: dk shows dS unrounded
    Inputs inputs(call);
    inputs.attend(call);
    stage.inputs(call, inputs);
    const bool good = compare(call, inputs, stage.which, call.values != Call::Values::kNormal);
    std::printf("  %-55s %s\n", stage.name, good ? "same" : "DIFFERS");
    if (!good) {
      std::printf("    look at: %s\n", stage.hint);
    }
    std::fflush(stdout);
    equal &= good;
  }
  return equal;
}

// ---- drawn calls

Call drawn_call(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const std::vector<Held> held(std::begin(kHeld), std::end(kHeld));
  Call call;
  call.seed = seed;
  call.held = held[pick(0, static_cast<int>(held.size()) - 1)];
  call.head_dim = call.held.head_dim - (pick(0, 3) == 0 ? 8 * pick(0, 2) : 0);
  call.heads_k = pick(1, 4);
  call.heads = call.heads_k * pick(1, 4);
  const int batch = pick(1, 4);
  call.packed = pick(0, 2) == 0;
  const int most = pick(0, 9) == 0 ? 3000 : pick(0, 2) == 0 ? 200 : 900;
  const bool chunks = pick(0, 15) == 0;  // some rows beside a border of chunks
  const int same_q = pick(1, most), same_k = pick(1, most);
  for (int i = 0; i < batch; ++i) {
    call.lengths_q.push_back(call.packed ? pick(0, most) : same_q);
    call.lengths_k.push_back(call.packed ? pick(0, most) : same_k);
  }
  if (call.max_q() == 0 || call.max_k() == 0) {
    call.lengths_q[0] = call.lengths_k[0] = 77;
  }
  if (chunks) {
    call.heads = call.heads_k = std::min(call.heads_k, 2);
    call.heads *= pick(1, 2);
    const int rows = kChunkRows * pick(1, 3) + pick(-1, 1);
    for (int& length : call.lengths_q) {
      length = call.packed && pick(0, 1) == 0 ? length : rows;
    }
  }
  const int values = pick(0, 15);
  call.values = values == 0   ? Call::Values::kDenormal
                : values == 1 ? Call::Values::kHuge
                              : Call::Values::kNormal;
  switch (pick(0, 4)) {
    case 0:
      break;
    case 1:
    case 2:
      call.window_right = 0;
      break;
    case 3:
      call.window_left = pick(0, 500);
      call.window_right = pick(-1, 300);
      break;
    case 4:
      call.window_right = pick(0, 300);
  }
  call.scale = pick(0, 3) == 0 ? 0.25f : 1.f / std::sqrt(static_cast<float>(call.head_dim));
  return call;
}

// Holds an SM for so many nanoseconds: it takes nearly all of its shared memory.
__global__ void hold_kernel(long long nanoseconds) {
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

void hold_sms(cudaStream_t stream) {
  constexpr int kShared = 200 * 1024;
  CHECK(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const int sms = device_with(Family::kSm90).num_sms;
  hold_kernel<<<sms - 2, 32, kShared, stream>>>(20'000'000);
  CHECK(cudaGetLastError());
}

bool run_drawn(int count, uint64_t seed, bool crowded) {
  int different = 0;
  cudaStream_t beside = nullptr;
  if (crowded) {
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  }
  for (int i = 0; i < count; ++i) {
    const Call call = drawn_call(seed + i);
    Inputs inputs(call);
    inputs.attend(call);
    if (crowded) {
      CHECK(cudaDeviceSynchronize());
      hold_sms(beside);
    }
    if (!compare(call, inputs, kAll, true)) {
      std::printf("  DIFFERS: %s\n", call.name().c_str());
      different += 1;
    }
    if ((i + 1) % 250 == 0) {
      std::printf("  %d drawn calls, %d differ\n", i + 1, different);
      std::fflush(stdout);
    }
    if (different == 10) {
      break;
    }
  }
  std::printf("drawn: %d calls from seed %llu, %d differ\n", count,
              static_cast<unsigned long long>(seed), different);
  return different == 0;
}

// ---- time

double milliseconds(const Call& call, const Inputs& inputs, const Gradients& gradients,
                    Family family, int repeats, int heads_in_flight = 0) {
  BwdParams params = params_of(call, inputs, gradients);
  Device device = device_with(family, call.path);
  device.heads_in_flight = heads_in_flight;
  const BwdPlan plan = plan_bwd(params, *call.held.instance, call.deterministic, device);
  const Scratch scratch = scratch_of(params, plan);
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < repeats; ++i) {
    CHECK(cudaMemsetAsync(scratch.counters.get(), 0, scratch.counters.size() * sizeof(unsigned)));
    CHECK(cudaEventRecord(begin));
    run_plan(plan, params, nullptr);
    CHECK(cudaEventRecord(end));
    finish(call.name());
    float time = 0;
    CHECK(cudaEventElapsedTime(&time, begin, end));
    times.push_back(time);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void run_times(const std::vector<int>& heads_in_flight) {
  struct Shape {
    int batch, length, heads, heads_k;
    bool causal;
  };
  const Shape shapes[] = {
      {8, 4096, 32, 32, false},  {8, 4096, 32, 32, true},  {8, 4096, 32, 8, true},
      {2, 16384, 16, 16, false}, {2, 16384, 16, 16, true}, {1, 65536, 8, 2, true},
      {1, 8192, 4, 4, false},    {1, 8192, 4, 4, true},    {1, 2048, 32, 8, true},
      {1, 1024, 16, 1, true},    {32, 512, 16, 16, true},  {1, 4096, 8, 8, true}};
  std::printf("whole backwards, medians: ms and TFLOP/s\n%-44s %18s %18s %18s  %s\n", "", "sm80",
              "sm90", "sm90, any order", "sm90 / sm80");
  for (const Held& held : kHeld) {
    if (!has_sm90(held) || !is_bf16(held)) {
      continue;
    }
    for (const Shape& shape : shapes) {
      Call call;
      call.held = held;
      call.head_dim = held.head_dim;
      call.heads = shape.heads;
      call.heads_k = shape.heads_k;
      call.lengths_q.assign(shape.batch, shape.length);
      call.lengths_k = call.lengths_q;
      call.window_right = shape.causal ? 0 : -1;
      call.scale = 1.f / std::sqrt(static_cast<float>(call.head_dim));
      const Inputs inputs(call);
      const Gradients gradients(inputs);
      Call any = call;
      any.deterministic = false;
      std::vector<double> old_times, new_times, any_times;
      for (int round = 0; round < 3; ++round) {  // in turns
        old_times.push_back(milliseconds(call, inputs, gradients, Family::kSm80, 5));
        new_times.push_back(milliseconds(call, inputs, gradients, Family::kSm90, 5));
        any_times.push_back(milliseconds(any, inputs, gradients, Family::kSm90, 5));
      }
      const auto median = [](std::vector<double>& times) {
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
      };
      const double flops = 10.0 * shape.batch * shape.heads * call.head_dim *
                           static_cast<double>(shape.length) * shape.length /
                           (shape.causal ? 2 : 1);
      const double a = median(old_times), b = median(new_times), c = median(any_times);
      const auto speed = [&](double time) { return flops / time * 1e-9; };
      std::printf("%-44s %10.3f %7.0f %10.3f %7.0f %10.3f %7.0f  %.2f\n", call.name().c_str(), a,
                  speed(a), b, speed(b), c, speed(c), b / a);
      for (const int heads : heads_in_flight) {
        const double time = milliseconds(call, inputs, gradients, Family::kSm90, 5, heads);
        std::printf("  %d heads in flight: %.3f ms, %.0f\n", heads, time, speed(time));
      }
      std::fflush(stdout);
    }
  }
}

int run_all(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
  bool equal = true;
  if (what == "stages") {
    for (const Held& held : kHeld) {
      if (has_sm90(held)) {
        std::printf("%s, head dim %d\n", held.dtype, held.head_dim);
        equal &= is_bf16(held) ? products_transpose<__nv_bfloat16>() : products_transpose<__half>();
        equal &= run_stages(held);
      }
    }
  } else if ((what == "drawn" || what == "crowded") && argc > 2) {
    equal = run_drawn(std::atoi(argv[2]), argc > 3 ? std::atoll(argv[3]) : 1, what == "crowded");
  } else if (what == "time") {
    std::vector<int> heads_in_flight;
    for (int i = 2; i < argc; ++i) {
      heads_in_flight.push_back(std::atoi(argv[i]));
    }
    run_times(heads_in_flight);
  } else {
    std::printf("usage: %s stages | drawn N [SEED] | crowded N [SEED] | time [HEADS ...]\n",
                argv[0]);
    return 2;
  }
  std::printf(equal ? "all bits equal\n" : "SOME BITS DIFFER\n");
  return equal ? 0 : 1;
}

}  // namespace
}  // namespace fad

int main(int argc, char** argv) {
  try {
    return fad::run_all(argc, argv);
  } catch (const fad::Stuck& stuck) {
    std::printf("STUCK: %s\n", stuck.what());
    std::fflush(stdout);
    std::_Exit(3);
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 2;
  }
}
