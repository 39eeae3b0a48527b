// What a kernel needs of its tensors to stay inside their memory. The Python functions leave their
// tensors to these checks, and look for friendlier words only after a refusal.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace fad {

// A message. Not a std::ostream: a stream finds the code that writes numbers by the address of an
// object in libstdc++, of which this library has its own copy (libstdcxx_2_28.h), and so writes
// none.
class Text {
 public:
  Text& operator<<(std::string_view words) {
    words_ += words;
    return *this;
  }

  template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
  Text& operator<<(Number number) {
    char digits[32];
    if constexpr (std::is_floating_point_v<Number>) {
      std::snprintf(digits, sizeof digits, "%g", static_cast<double>(number));
    } else {
      std::snprintf(digits, sizeof digits, "%lld", static_cast<long long>(number));
    }
    return *this << std::string_view(digits);
  }

  const std::string& words() const { return words_; }

 private:
  std::string words_;
};

// Throws what arrives in Python as RuntimeError: the words alone, no file and line before them.
template <typename... Words>
void check(bool condition, const Words&... words) {
  if (!condition) {
    Text text;
    (text << ... << words);
    throw std::runtime_error(text.words());
  }
}

const char* dtype_name(const torch::stable::Tensor& tensor);  // "fp16", "bf16", or throws

// What messages say of a tensor; made only where a check fails.
struct Shape {
  const torch::stable::Tensor& tensor;
};
Text& operator<<(Text& out, Shape shape);

struct Described {  // dtype, shape, strides, device
  const torch::stable::Tensor& tensor;
};
Text& operator<<(Text& out, Described described);

void check_attention_input(const torch::stable::Tensor& tensor, const char* name,
                           const torch::stable::Tensor& q, std::int64_t dims);

// Keys and values of a cache: both like q, or both e4m3.
void check_cached(const torch::stable::Tensor& k, const char* name_k,
                  const torch::stable::Tensor& v, const char* name_v,
                  const torch::stable::Tensor& q, std::int64_t dims);
bool is_e4m3(const torch::stable::Tensor& tensor);

// head_dim of q and v, and the number of heads of q over that of k. latent: as of kLatentHeadDim.
void check_heads(const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                 const torch::stable::Tensor& v, bool latent = false);

// q, k, v: (batch, seqlen, heads, head_dim); v may have a head_dim of its own.
void check_dense(const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                 const torch::stable::Tensor& v);

void check_shape(const torch::stable::Tensor& tensor, const char* name,
                 std::initializer_list<std::int64_t> expected);

// block_table: (batch, blocks of the longest sequence).
void check_pages(const torch::stable::Tensor& block_table, const torch::stable::Tensor& q,
                 std::int64_t batch);

// A contiguous int32 tensor on q's device.
void check_int32(const torch::stable::Tensor& tensor, const char* name,
                 const torch::stable::Tensor& q, std::initializer_list<std::int64_t> expected);

}  // namespace fad
