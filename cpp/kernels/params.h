// Upstream's parameters and ours beside them.
#pragma once

#include "flash.h"  // upstream: Flash_fwd_params

namespace fad {

struct FwdParams : FLASH_NAMESPACE::Flash_fwd_params {
  // Key blocks to a split, counted from the sequence's own position 0.
  int split_blocks;
  // Where CTAs that share a row block leave their parts, one per (split, batch, head, row):
  // accumulators (head dim of the kernel, fp32), and (row maximum, row sum).
  float* part_acc;
  float2* part_state;
  int num_parts;  // splits that the longest sequence may have
};

}  // namespace fad
