// How a call is carried out: a value that `explain` shows and a launch follows.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>

#include "bwd.h"
#include "fwd.h"

namespace fad {

// What a plan may know of the GPU. Tests set the numbers of other GPUs, a path and a family.
struct Device {
  int num_sms;
  int shared_bytes_per_block;    // that one CTA may ask for
  int capability;                // 10 * major + minor
  std::optional<Path> path;      // run this one where it can run at all
  std::optional<Family> family;  // likewise
  int l2_bytes = 0;              // of the cache that all SMs share
  int heads_in_flight = 0;       // of a backward in turns, or parts of them; 0: the plan's choice
};

// Scratch memory of one launch: parts beyond it are computed by several launches.
constexpr std::size_t kScratchBytes = std::size_t{64} << 20;

// Bits follow from the tree, which is the caller's in deterministic mode and chosen here, from the
// batch and the number of SMs, otherwise. Nothing else in a plan changes a bit.
struct FwdPlan {
  const FwdInstance* instance;
  const FwdKernel* kernel;
  int head_dim_v;  // of v and the output as the kernel takes them: their own, or that of q and k
  Tree tree;
  int num_splits;            // of the longest sequence
  bool writes_parts;         // for the merge kernel
  int group;                 // query heads whose rows share a row block
  unsigned ctas;             // row blocks of all heads and sequences, ...
  unsigned ctas_per_launch;  // ... and how many of them one launch takes
  unsigned most_ctas;        // that a launch has, where CTAs take work one after another
  int part_rows;             // rows of a row block that parts hold
  bool prefetches;           // values into L2, for the second kernel of the path scores-first
  std::size_t scratch_bytes;

  unsigned launches() const { return (ctas + ctas_per_launch - 1) / ctas_per_launch; }
};

// split_tokens: 0 for one split. Throws std::runtime_error for a call that no kernel can take.
FwdPlan plan_fwd(const FwdParams& params, const FwdInstance& instance, int split_tokens,
                 bool deterministic, const Device& device);

// How a backward is carried out. Nothing in it changes a bit of a deterministic call.
struct BwdPlan {
  const BwdInstance* instance;
  const BwdKernel* kernel;
  int head_dim_v;        // as of the forward
  bool in_turns;         // CTAs wait for each other, so that dq's sums have one order
  KeyParts parts;        // how CTAs share a key block
  int shares_in_flight;  // parts of heads whose key blocks run at the same time
  int kept_sums;         // of dk and dv, that a CTA keeps beside those that it adds up, ...
  int slots;             // ... and CTAs that have room for them
  int64_t slot_counters;
};

// No kernel that covers a call fits a block of this device.
struct TooLittleSharedMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws TooLittleSharedMemory.
BwdPlan plan_bwd(const BwdParams& params, const BwdInstance& instance, bool deterministic,
                 const Device& device);

// Launches the kernels of a plan; params hold the scratch memory.
void run_plan(const BwdPlan& plan, BwdParams params, cudaStream_t stream);

// Launches the kernels of a plan. scratch: plan.scratch_bytes of device memory.
void run_plan(const FwdPlan& plan, FwdParams params, void* scratch, cudaStream_t stream);

}  // namespace fad
