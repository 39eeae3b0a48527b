// The offset that gives each (sequence, head) random numbers of its own.
#pragma once

namespace fad {

// Upstream numbers them batch index * nheads + head, so that the mask of a head changes with the
// number of heads beside it. 32 numbers to a head, for the lanes of a warp; 2^16 heads to a
// sequence.
__device__ __forceinline__ unsigned long long dropout_key(unsigned long long offset, int bidb,
                                                          int bidh) {
  return offset + (static_cast<unsigned long long>(bidb) << 21) +
         (static_cast<unsigned long long>(bidh) << 5);
}

}  // namespace fad
