#include "checks.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include "kernels/plan.h"

namespace fad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// Positions, and sums of two of them, are ints.
constexpr std::int64_t kMaxSize = (1 << 30) - 1;

template <typename Numbers>
void write(Text& out, const Numbers& numbers) {
  out << "(";
  const char* comma = "";
  for (const std::int64_t number : numbers) {
    out << comma << number;
    comma = ", ";
  }
  out << ")";
}

// torch's own number of a dtype. scalar_type() compares it with that of each dtype in turn.
std::int32_t dtype_number(const Tensor& tensor) {
  std::int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  return number;
}

void check_placed(const Tensor& tensor, const char* name, const Tensor& q, std::int64_t dims) {
  check(tensor.is_cuda(), name, ": expected a CUDA tensor, got ", Described{tensor});
  check(tensor.get_device_index() == q.get_device_index(), name,
        ": expected the device of q, cuda:", q.get_device_index(), ", got ", Described{tensor});
  check(tensor.dim() == dims, name, ": expected ", dims, " dimensions, got shape ", Shape{tensor});
}

struct Dtype {  // its name
  const Tensor& tensor;
};

Text& operator<<(Text& out, Dtype dtype) {
  return out << torch::headeronly::toString(dtype.tensor.scalar_type());
}

// An expected shape.
struct Sizes {
  std::initializer_list<std::int64_t> sizes;
};

Text& operator<<(Text& out, Sizes expected) {
  write(out, expected.sizes);
  return out;
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
  check(false, "q: expected dtype torch.float16 or torch.bfloat16, got ", Described{tensor});
  return nullptr;
}

Text& operator<<(Text& out, Shape shape) {
  write(out, shape.tensor.sizes());
  return out;
}

Text& operator<<(Text& out, Described described) {
  const Tensor& tensor = described.tensor;
  out << Dtype{tensor} << " " << Shape{tensor} << ", strides ";
  write(out, tensor.strides());
  out << (tensor.is_cuda() ? ", on cuda:" : ", not on a GPU");
  return tensor.is_cuda() ? out << tensor.get_device_index() : out;
}

void check_attention_input(const Tensor& tensor, const char* name, const Tensor& q,
                           std::int64_t dims) {
  check_placed(tensor, name, q, dims);
  check(dtype_number(tensor) == dtype_number(q), name, ": expected the dtype of q, ", Dtype{q},
        ", got ", Described{tensor});
}

bool is_e4m3(const Tensor& tensor) {
  return dtype_number(tensor) == aoti_torch_dtype_float8_e4m3fn();
}

void check_cached(const Tensor& k, const char* name_k, const Tensor& v, const char* name_v,
                  const Tensor& q, std::int64_t dims) {
  if (!is_e4m3(k)) {
    check_attention_input(k, name_k, q, dims);
    check_attention_input(v, name_v, q, dims);
    return;
  }
  check_placed(k, name_k, q, dims);
  check_placed(v, name_v, q, dims);
  check(is_e4m3(v), name_v, ": expected the dtype of ", name_k, ", ", Dtype{k}, ", got ",
        Described{v});
}

void check_heads(const Tensor& q, const Tensor& k, const Tensor& v, bool latent) {
  for (const auto& [tensor, name] : {std::pair{q, "q"}, std::pair{v, "v"}}) {
    const std::int64_t head_dim = tensor.size(tensor.dim() - 1);
    check(latent || (head_dim > 0 && head_dim <= 256 && head_dim % 8 == 0), name,
          ": expected a head_dim that is a multiple of 8 and at most 256, got ", head_dim);
  }
  const std::int64_t nheads = q.size(q.dim() - 2);
  const std::int64_t nheads_k = k.size(k.dim() - 2);
  check(nheads_k > 0 && nheads > 0 && nheads % nheads_k == 0,
        "k: expected a number of heads that divides the ", nheads, " heads of q, got ", nheads_k);
}

void check_dense(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attention_input(q, "q", q, 4);
  check_attention_input(k, "k", q, 4);
  check_attention_input(v, "v", q, 4);
  check_heads(q, k, v);
  check(q.size(0) > 0, "q: expected a batch of at least 1, got shape ", Shape{q});
  check_shape(k, "k", {q.size(0), k.size(1), k.size(2), q.size(3)});
  check_shape(v, "v", {q.size(0), k.size(1), k.size(2), v.size(3)});
  check(q.size(1) <= kMaxSize && k.size(1) <= kMaxSize && q.size(0) <= kMaxSize,
        "q, k: expected a batch and lengths below 2^30, got ", Shape{q}, " and ", Shape{k});
}

void check_pages(const Tensor& block_table, const Tensor& q, std::int64_t batch) {
  check(block_table.dim() == 2, "block_table: expected 2 dimensions, got shape ",
        Shape{block_table});
  check_int32(block_table, "block_table", q, {batch, block_table.size(1)});
}

void check_int32(const Tensor& tensor, const char* name, const Tensor& q,
                 std::initializer_list<std::int64_t> expected) {
  check(tensor.is_cuda() && tensor.get_device_index() == q.get_device_index(), name,
        ": expected a tensor on the device of q, got ", Described{tensor});
  check(tensor.scalar_type() == ScalarType::Int, name, ": expected dtype torch.int32, got ",
        Described{tensor});
  check_shape(tensor, name, expected);
  check(tensor.stride(tensor.dim() - 1) == 1 || tensor.size(tensor.dim() - 1) <= 1, name,
        ": expected a contiguous last dimension, got ", Described{tensor});
}

void check_shape(const Tensor& tensor, const char* name,
                 std::initializer_list<std::int64_t> expected) {
  bool same = static_cast<std::size_t>(tensor.dim()) == expected.size();
  int dim = 0;
  for (const std::int64_t size : expected) {
    same = same && tensor.size(dim++) == size;
  }
  check(same, name, ": expected shape ", Sizes{expected}, ", got ", Shape{tensor});
}

}  // namespace fad
