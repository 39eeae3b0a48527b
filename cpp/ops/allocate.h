// New tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace fad {

// An uninitialised, contiguous tensor on the device of `like`, in its dtype or in another one.
// By torch's C function, as inductor does: torch::stable::new_empty finds its op by name in torch's
// dispatcher at each call and boxes the arguments, which takes twice as long.
torch::stable::Tensor allocate(const torch::stable::Tensor& like,
                               torch::headeronly::IntHeaderOnlyArrayRef sizes,
                               std::optional<torch::headeronly::ScalarType> dtype = std::nullopt);

}  // namespace fad
