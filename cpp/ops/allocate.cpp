#include "allocate.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "checks.h"

namespace fad {

using torch::stable::Tensor;

Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                std::optional<torch::headeronly::ScalarType> dtype) {
  constexpr std::size_t kMostDims = 8;
  check(sizes.size() <= kMostDims, "sizes: expected at most ", kMostDims, " dimensions, got ",
        sizes.size());
  std::array<std::int64_t, kMostDims> strides{};
  std::int64_t step = 1;
  for (std::size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = step;
    step *= std::max<std::int64_t>(sizes[dim], 1);  // as torch counts empty dimensions
  }
  std::int32_t type = 0;
  if (dtype.has_value()) {
    type = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(*dtype));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  }
  std::int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()),
                                                  sizes.data(), strides.data(), type, device,
                                                  like.get_device_index(), &made));
  return Tensor(made);
}

}  // namespace fad
