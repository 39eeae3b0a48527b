#include "checks.h"

#include <limits>

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<int>::max() - 1024;

std::string join(const std::int64_t* values, std::size_t count) {
  std::string text = "(";
  for (std::size_t i = 0; i < count; ++i) {
    text += (i ? ", " : "") + std::to_string(values[i]);
  }
  return text + ")";
}

}  // namespace

const char* dtype_name(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return "fp16";
    case ScalarType::BFloat16:
      return "bf16";
    default:
      break;
  }
  check(false, "q: expected dtype torch.float16 or torch.bfloat16, got ScalarType ",
        static_cast<int>(tensor.scalar_type()));
  return nullptr;
}

std::string shape_string(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return join(sizes.data(), sizes.size());
}

void check_attention_input(const Tensor& tensor, const char* name, const Tensor& q,
                           std::int64_t dims) {
  check(tensor.is_cuda(), name, ": expected a CUDA tensor, got one on the CPU");
  check(tensor.get_device_index() == q.get_device_index(), name,
        ": expected the device of q (cuda:", q.get_device_index(),
        "), got cuda:", tensor.get_device_index());
  check(tensor.scalar_type() == q.scalar_type(), name, ": expected the dtype of q");
  check(tensor.dim() == dims, name, ": expected ", dims, " dimensions, got shape ",
        shape_string(tensor));
}

void check_heads(const Tensor& q, const Tensor& k) {
  const std::int64_t head_dim = q.size(q.dim() - 1);
  check(head_dim > 0 && head_dim <= 256 && head_dim % 8 == 0,
        "q: expected a head_dim that is a multiple of 8 and at most 256, got ", head_dim);
  const std::int64_t nheads = q.size(q.dim() - 2);
  const std::int64_t nheads_k = k.size(k.dim() - 2);
  check(nheads_k > 0 && nheads > 0 && nheads % nheads_k == 0,
        "k: expected a number of heads that divides the ", nheads, " heads of q, got ", nheads_k);
}

void check_dense(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attention_input(q, "q", q, 4);
  check_attention_input(k, "k", q, 4);
  check_attention_input(v, "v", q, 4);
  check_heads(q, k);
  check(q.size(0) > 0, "q: expected a batch of at least 1, got shape ", shape_string(q));
  check_shape(k, "k", {q.size(0), k.size(1), k.size(2), q.size(3)});
  check_shape(v, "v", {q.size(0), k.size(1), k.size(2), q.size(3)});
  check(q.size(1) <= kMaxSize && k.size(1) <= kMaxSize && q.size(0) <= kMaxSize,
        "q, k: expected sizes below 2^31, got ", shape_string(q), " and ", shape_string(k));
}

void check_int32(const Tensor& tensor, const char* name, const Tensor& q,
                 std::initializer_list<std::int64_t> expected) {
  check(tensor.is_cuda() && tensor.get_device_index() == q.get_device_index(), name,
        ": expected a tensor on the device of q");
  check(tensor.scalar_type() == torch::headeronly::ScalarType::Int, name,
        ": expected dtype torch.int32");
  check_shape(tensor, name, expected);
  check(tensor.stride(tensor.dim() - 1) == 1 || tensor.size(tensor.dim() - 1) <= 1, name,
        ": expected a contiguous last dimension");
}

void check_shape(const Tensor& tensor, const char* name,
                 std::initializer_list<std::int64_t> expected) {
  bool same = static_cast<std::size_t>(tensor.dim()) == expected.size();
  int dim = 0;
  for (const std::int64_t size : expected) {
    same = same && tensor.size(dim++) == size;
  }
  check(same, name, ": expected shape ", join(expected.begin(), expected.size()), ", got ",
        shape_string(tensor));
}

}  // namespace fad
