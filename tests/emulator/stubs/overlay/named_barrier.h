// Stands in for the header of this name.
#pragma once

#include "emulator.h"

namespace fad {

inline void named_barrier_sync(int barrier, int threads) {
  emulator::arrive_at_named(barrier, threads, /*waits=*/true);
}

inline void named_barrier_arrive(int barrier, int threads) {
  emulator::arrive_at_named(barrier, threads, /*waits=*/false);
}

}  // namespace fad
