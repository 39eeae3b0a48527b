// What a kernel needs of its tensors to stay inside their memory. The python functions check the
// same and more, with friendlier words; these hold for whoever calls an op directly.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fad {

// Throws what arrives in Python as RuntimeError: the words alone, no file and line before them.
template <typename... Words>
void check(bool condition, const Words&... words) {
  if (!condition) {
    std::ostringstream text;
    (text << ... << words);
    throw std::runtime_error(text.str());
  }
}

const char* dtype_name(const torch::stable::Tensor& tensor);  // "fp16", "bf16", or throws

// What messages say of a tensor; made only where a check fails.
struct Shape {
  const torch::stable::Tensor& tensor;
};
std::ostream& operator<<(std::ostream& out, Shape shape);

struct Described {  // dtype, shape, strides, device
  const torch::stable::Tensor& tensor;
};
std::ostream& operator<<(std::ostream& out, Described described);

void check_attention_input(const torch::stable::Tensor& tensor, const char* name,
                           const torch::stable::Tensor& q, std::int64_t dims);

// head_dim of q, and the number of heads of q over that of k.
void check_heads(const torch::stable::Tensor& q, const torch::stable::Tensor& k);

// q, k, v: (batch, seqlen, heads, head_dim).
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
