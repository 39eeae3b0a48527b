// How many rows and keys CTAs of each path have, and a model of the time that they take: what a
// plan compares. Nothing here changes a bit.
#pragma once

#include "plan.h"

namespace fad {

inline long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }
inline int num_blocks(int tokens, int block) { return static_cast<int>(ceil_div(tokens, block)); }
inline int key_blocks(const FwdParams& params) {
  return num_blocks(params.seqlen_k, kKeysPerBlock);
}

inline bool few_queries(Path path) { return path == Path::kFewRows || path == Path::kScoresFirst; }

// Query heads whose rows share a row block: those that share a key head, or some of them.
int group_of(const FwdParams& params, Family family, Path path);

// Whether the copy engine loads queries, in boxes of 64 rows, in which those of a token begin at
// multiples of a power of two.
inline bool loads_boxes(Family family, Path path) {
  return family == Family::kSm90 && !few_queries(path);
}

// The heads that rows of a token have room for.
int group_room(Family family, Path path, int group);

// Rows of a row block that are rows of heads.
inline int block_rows(const FwdKernel& kernel, int group) {
  return loads_boxes(kernel.family, kernel.path)
             ? kernel.block_m / group_room(kernel.family, kernel.path, group) * group
             : kernel.block_m;
}

// Rows of a sequence and a group of heads.
inline int rows_of(const FwdParams& params, Family family, Path path) {
  return params.seqlen_q * group_of(params, family, path);
}

// Of two tiles of the few-rows kernel, whether the rows fill the first one better: the lowest that
// holds them, or else the tallest. The time of a block of keys grows with the rows of a tile.
// (H100, head dim 128, few CTAs: 0.8 us with 16, 2.1 us with 64.)
bool fills_better(const FwdParams& params, int tile, int other);

long long row_blocks(const FwdParams& params, Family family, Path path, int block_m);

inline long long row_blocks(const FwdParams& params, const FwdKernel& kernel) {
  return row_blocks(params, kernel.family, kernel.path, kernel.block_m);
}

// Time that an SM takes for a key, where CTAs take one tile after another: in rows.
double key_time(const FwdKernel& kernel);

// Rounds of CTAs in such kernels.
long long turns(const FwdParams& params, const FwdKernel& kernel, int num_splits, int num_sms);

// Time of CTAs that take row blocks one after another and walk all splits: in keys of one row.
double time_of_one_cta(const FwdParams& params, const FwdKernel& kernel, int num_sms);

// The same where each split writes a part, in this many launches.
double time_of_parts(const FwdParams& params, const FwdKernel& kernel, const Tree& tree,
                     int num_splits, long long launches, int num_sms);

// Whether a CTA of the sm80 family per row block fills enough of the GPU.
bool fills(const FwdParams& params, const FwdKernel& one_cta, int num_sms);

// Microseconds that a call of few queries takes: in one of the paths for them, or in kernels of the
// sm90 family.
double time_of_few_queries(const FwdParams& params, const FwdKernel& kernel, const Tree& tree,
                           int num_splits, int num_sms);

}  // namespace fad
