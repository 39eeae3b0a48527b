#include "checks.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

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

void check_attention_input(const Tensor& tensor, const char* name, const Tensor& q) {
  check(tensor.is_cuda(), name, ": expected a CUDA tensor, got one on the CPU");
  check(tensor.get_device_index() == q.get_device_index(), name,
        ": expected the device of q (cuda:", q.get_device_index(),
        "), got cuda:", tensor.get_device_index());
  check(tensor.scalar_type() == q.scalar_type(), name, ": expected the dtype of q");
  check(tensor.dim() == 4, name,
        ": expected 4 dimensions (batch, seqlen, nheads, head_dim), got shape ",
        shape_string(tensor));
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
