// Upstream's parameters and ours beside them.
#pragma once

#include <cstdint>

#include "flash.h"  // upstream: Flash_fwd_params, Flash_bwd_params

namespace fad {

constexpr int kFewRows = 16;  // that decode.cuh takes

struct FwdParams : FLASH_NAMESPACE::Flash_fwd_params {
  // Key blocks to a split, counted from the sequence's own position 0.
  int split_blocks;
  // Where CTAs that share a row block leave their parts, one per (split, batch, head, row):
  // accumulators (head dim of the kernel, fp32), and (row maximum, row sum).
  float* part_acc;
  float2* part_state;
  int num_parts;  // splits that the longest sequence may have
  bool few_rows;  // every sequence's rows fit the tile of decode.cuh
  // cu_seqlens_q of packed sequences of at most one query, whose groups were turned into rows;
  // nullptr otherwise. Only decode.cuh and fwd_merge.cuh know it.
  const int* token_of;
};

struct BwdParams : FLASH_NAMESPACE::Flash_bwd_params {
  // Whether CTAs wait for each other, to add to a row block of dq in the order of key blocks.
  bool in_turns;
  // Whether a CTA works on all key blocks of a head, one after another.
  bool whole_heads;
  // (batch, head) pairs whose key blocks are worked on side by side.
  int heads_in_flight;
  // How many CTAs have started.
  unsigned* tickets;
  // To which row blocks of dq each key block of a head has been added, from the last one down.
  unsigned* progress;
  // How many query heads of a group have been added to each key block of dk and dv.
  unsigned* key_turns;
  // Their sums so far: dk and dv of each key block, fp32, as the threads hold them.
  float* key_sums;
};

}  // namespace fad
