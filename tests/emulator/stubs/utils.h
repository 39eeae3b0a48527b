// Named by templates that are not used here.
#pragma once

#include <cute/tensor.hpp>

#include "namespace_config.h"

using cute::_;  // upstream's headers use all of it

namespace FLASH_NAMESPACE {
template <bool, bool, bool, typename... Any>
void copy(const Any&...);
}
