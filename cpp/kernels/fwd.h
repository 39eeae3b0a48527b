// The forward's kernels, for code that knows no CUDA C++: what each of them covers, and how to
// launch it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "params.h"

namespace fad {

// Kernels of one make. All compute the same tree; which one runs decides no bit.
enum class Family { kSm80, kSm90 };

// How CTAs share the work.
enum class Path {
  kOneCta,  // a CTA walks all splits of its row block, and merges them itself
  kParts,   // a CTA per split leaves a part of its row block; the merge kernel merges them
  // The same for a few queries; the rows of a group of heads share a CTA, and a single split needs
  // no merge kernel.
  kFewRows,
  // A kernel computes all scores; a second one, a warp per split and 32 columns, the rest. For a
  // few queries, where the other paths leave much of the GPU idle.
  kScoresFirst,
};

// The most queries, and rows (queries times heads of a group), that the last two paths take.
constexpr int kFewQueries = 16;
constexpr int kMostGroupRows = 128;

// What a call may ask for beyond full attention at the kernel's own head dim.
enum Feature : unsigned {
  kCausal = 1,  // window (all, 0)
  kWindow = 2,  // any other window
  kAlibi = 4,
  kSoftcap = 8,
  kDropout = 16,
  kCacheIndex = 32,  // cache_batch_idx picks the sequences of the cache
  kPaged = 64,       // keys in pages
  kPadded = 128,     // head_dim below the kernel's
  kResidual = 256,   // what rounding takes from the output is kept, or rows end with a sink
  kFp8 = 512,        // keys and values are e4m3: of kernels that take no others
};
using Features = unsigned;

Features features_of(const FLASH_NAMESPACE::Flash_fwd_params& params);

struct FwdKernel {
  Family family;
  Path path;
  Features covers;
  int block_m;       // query rows to a CTA, at a time
  int shared_bytes;  // of a CTA that walks one split
  int state_bytes;   // the same, with room for the state of later splits
  void (*launch)(const FwdParams& params, unsigned ctas, cudaStream_t stream);
  // How many CTAs to an SM, at most, take row blocks one after another; 0: each CTA has one.
  int ctas_per_sm = 0;
  // Whether it takes tensors laid out like this, and splits of this size; nullptr: all.
  bool (*takes)(const FwdParams& params, const Tree& tree) = nullptr;
  int head_dim_v = 0;  // of the tile, where v may be narrower than q and k; 0: it may not
};

// All kernels of one (dtype, head dim). Of one family and path, those that cover less (and are
// faster) come first.
struct FwdInstance {
  const FwdKernel* kernels;
  int num_kernels;
  void (*merge)(const FwdParams& params, cudaStream_t stream);
};

// The instance for a dtype and a head dim (rounded up to the next compiled one), or nullptr if this
// build does not hold it. dtype is a name in instances.json.
const FwdInstance* find_fwd(const char* dtype, int head_dim);

// Head dim of the kernel that serves this one; 0: there is none.
int kernel_head_dim(int head_dim);

}  // namespace fad
