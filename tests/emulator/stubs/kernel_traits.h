// Upstream's header of this name describes tiles of kernels that do not run here.
#pragma once

#include <cute/tensor.hpp>

template <int, int, int, int, bool, bool, typename>
struct Flash_fwd_kernel_traits;
