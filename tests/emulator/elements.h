// What the programs have in common: the table of kernels, their shared memory,
// and the element type as each family names it.
#pragma once

#include "table.h"  // made by run.py

namespace fad {

alignas(1024) inline char smem[emulator::kSharedBytes];
namespace sm90 {
alignas(1024) inline char memory[16];
}

#if HALF
using Element80 = cutlass::half_t;
using Element90 = sm90::fp16;
#else
using Element80 = cutlass::bfloat16_t;
using Element90 = sm90::bf16;
#endif

}  // namespace fad
