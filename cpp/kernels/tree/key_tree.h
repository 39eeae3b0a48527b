// The tree of additions of dk and dv, for every family. Rows of a sequence are cut into chunks from
// its first row. A leaf is the sum over the rows of one chunk and one query head: row blocks last
// to first, one accumulator from 0. In a chunk, the query heads of a group are added first to last;
// chunks are added in pairs, 2 i and 2 i + 1, then those sums in pairs, and so on. What no row sees
// is left out, or added as 0: the end makes -0 to 0, so that both are the same.
//
// Any aligned run of 2^n chunks has a sum of its own, so that CTAs, or GPUs, may share a key block.
#pragma once

#include "arithmetic.h"
#include "tree.h"

namespace fad {

// The row blocks of a leaf or a part, from the last one down.
struct RowBlocks {
  int begin, end;
};

// The chunks of a part, counted from its first one, whose rows see the key block.
struct Chunks {
  int first, last;
};

// A CTA walks the leaves of its part: chunks last to first, heads first to last. Here one has been
// added up. The CTA keeps sums while it works on the next leaf: 0 those of heads, 1 + n those of a
// run of 2^n chunks. add(i): adds kept sums; keep(i): keeps the sums. Returns whether they are the
// part's.
template <typename Add, typename Keep>
__device__ __forceinline__ bool climb(const Chunks& chunks, int chunk, int head, int heads, Add add,
                                      Keep keep) {
  if (head > 0) {
    add(0);
  }
  if (head < heads - 1) {
    keep(0);
    return false;
  }
#pragma unroll 1
  for (int level = 0; chunks.last >> level > 0; ++level) {
    const int node = chunk >> level;
    if (node % 2 == 0) {
      if ((node + 1) << level <= chunks.last) {
        add(1 + level);
      }
    } else if (chunk > chunks.first) {
      keep(1 + level);
      return false;
    }
  }
  return true;
}

// A sum as it is rounded: -0 as 0.
__device__ __forceinline__ float positive_zero(float sum) {
  return add_keeping_denormals(0.f, sum);
}

}  // namespace fad
