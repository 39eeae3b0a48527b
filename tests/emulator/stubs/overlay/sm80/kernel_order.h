// Stands in for the header of this name.
#pragma once

#include "emulator.h"

namespace fad {

inline void let_next_kernel_start() {}
inline void wait_for_kernel_before() { emulator::wait_for_grid_before(); }

}  // namespace fad
