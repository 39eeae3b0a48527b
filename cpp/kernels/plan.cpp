// Shapes and the device decide how a call is carried out, never the contents of device memory.
#include "plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "cost_model.h"
#include "fold_parts.h"
#include "sm80/decode/scores_first.h"

namespace fad {

namespace {

// Head dims that upstream's kernels are written for; a call takes the next one up.
constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256, kLatentHeadDim};

constexpr int kMaxSplits = 65535;             // of paths with a CTA per split: a y of the grid
constexpr long long kMaxCtas = 0x7fffffffLL;  // of a CUDA grid

// The scores kernel brings values into L2 for the kernel after it, where they take at most this
// share of the cache: keys go through it too.
constexpr double kPrefetchedShare = 0.5;

// Schedule-dependent mode. Upstream's rule (flash_api.cpp, num_splits_heuristic): the smallest
// number of splits whose occupancy of the last wave comes within 15 % of the best.
int splits_by_occupancy(long long row_blocks, int key_blocks, int num_sms) {
  const int slots = 2 * num_sms;
  if (row_blocks >= 0.8f * slots) {
    return 1;
  }
  const int limit = std::min({128, slots, key_blocks});
  const auto useful = [&](int n) {
    return n == 1 || ceil_div(key_blocks, n) != ceil_div(key_blocks, n - 1);
  };
  const auto efficiency = [&](int n) {
    const float waves = static_cast<float>(row_blocks) * n / slots;
    return waves / std::ceil(waves);
  };
  float best = 0.f;
  for (int n = 1; n <= limit; ++n) {
    best = useful(n) ? std::max(best, efficiency(n)) : best;
  }
  for (int n = 1; n <= limit; ++n) {
    if (useful(n) && efficiency(n) >= 0.85f * best) {
      return n;
    }
  }
  return 1;
}

bool runs_on(Family family, const Device& device) {
  return family == Family::kSm80 || device.capability == 90;
}

// Whether a kernel can run a call. One without windows masks in one way only: causal, or not.
bool covers(Features covered, Features features) {
  const bool same_mask = (covered & kWindow) != 0 || (covered & kCausal) == (features & kCausal);
  return same_mask && (features & ~covered) == 0;
}

// The same call with v padded.
template <typename Params>
Params with_wide_values(Params params) {
  params.d_v = params.d;
  return params;
}

// Whether it takes v as wide as it is.
template <typename Kernel, typename Params>
bool takes_values(const Params& params, const Kernel& kernel) {
  return params.d_v == params.d || params.d_v <= kernel.head_dim_v;
}

// The kernel of a family and path for a call. Where CTAs take row blocks one after another, the one
// with the best tile; of others, the first that covers the call: those that cover least come first.
// Of the few-rows kernels, the one that the rows fill best.
const FwdKernel* find_kernel(const FwdParams& params, const FwdInstance& instance, Family family,
                             Path path, const Tree& tree, int num_splits, int num_sms) {
  const auto time = [&](const FwdKernel& kernel) {
    const int columns = kernel_head_dim(params.d) + kernel.head_dim_v;
    return columns * (path == Path::kOneCta
                          ? time_of_one_cta(params, kernel, num_sms)
                          : key_time(kernel) * turns(params, kernel, num_splits, num_sms));
  };
  const bool ends_otherwise =
      params.residual != nullptr || params.sinks != nullptr || params.row_max != nullptr;
  const Features features =
      features_of(params) | (ends_otherwise ? kResidual : 0) | (params.kv_fp8 ? kFp8 : 0);
  const FwdKernel* best = nullptr;
  for (int i = 0; i < instance.num_kernels; ++i) {
    const FwdKernel& kernel = instance.kernels[i];
    if (kernel.family == family && kernel.path == path && takes_values(params, kernel) &&
        covers(kernel.covers, features) && (kernel.covers & kFp8) == (features & kFp8) &&
        (kernel.takes == nullptr || kernel.takes(params, tree)) &&
        (best == nullptr || (kernel.ctas_per_sm > 0 && time(kernel) < time(*best)) ||
         (path == Path::kFewRows && fills_better(params, kernel.block_m, best->block_m)))) {
      best = &kernel;
    }
  }
  return best;
}

Tree tree_of(const FwdParams& params, int split_tokens, bool deterministic, int num_sms) {
  Tree tree;
  if (deterministic) {
    if (split_tokens > 0) {
      tree.blocks_per_split = split_tokens / tree.keys_per_block;
    }
    return tree;
  }
  constexpr int kPartRows = 64;  // that upstream's rule counts in
  const int key_blocks = static_cast<int>(ceil_div(params.seqlen_k, tree.keys_per_block));
  const Path path = params.seqlen_q <= kFewQueries ? Path::kFewRows : Path::kParts;
  const int splits = splits_by_occupancy(row_blocks(params, Family::kSm80, path, kPartRows),
                                         std::max(key_blocks, 1), num_sms);
  if (splits > 1) {
    tree.blocks_per_split = static_cast<int>(ceil_div(key_blocks, splits));
  }
  return tree;
}

// The row blocks that one launch must take together, ...
int row_blocks_of_unit(const FwdParams& params, const FwdKernel& kernel) {
  return kernel.path == Path::kScoresFirst
             ? std::max(num_blocks(rows_of(params, kernel.family, kernel.path), kScoreRows), 1)
             : 1;
}

// ... the rows of each that parts hold, ...
int part_rows(const FwdParams& params, const FwdKernel& kernel) {
  const int group = group_of(params, kernel.family, kernel.path);
  return std::max(std::min(block_rows(kernel, group), params.seqlen_q * group), 1);
}

// ... and the scratch memory that this many row blocks take.
std::size_t scratch_bytes(const FwdParams& params, const FwdKernel& kernel, bool writes_parts,
                          int num_splits, long long ctas) {
  const int head_dim = kernel_head_dim(params.d);
  if (kernel.path == Path::kScoresFirst) {
    return scores_first_room(ctas, key_blocks(params), num_splits, head_dim).end;
  }
  if (!writes_parts) {
    return 0;
  }
  const std::size_t row_bytes = acc_columns(head_dim) * sizeof(float) + sizeof(float2);
  const std::size_t counter = kernel.ctas_per_sm > 0 ? sizeof(unsigned) : 0;
  return ctas * num_splits * part_rows(params, kernel) * row_bytes + counter;
}

// Launches that row blocks are shared out to, so that each one's scratch memory stays bounded.
long long launches_of(const FwdParams& params, const FwdKernel& kernel, bool writes_parts,
                      int num_splits, long long row_blocks) {
  const int together = row_blocks_of_unit(params, kernel);
  const std::size_t unit = scratch_bytes(params, kernel, writes_parts, num_splits, together);
  const long long most = std::max<long long>(kScratchBytes / unit, 1);
  return ceil_div(ceil_div(row_blocks, together), most);
}

// Whether what one launch must take together fits its scratch memory.
bool fits_scratch(const FwdParams& params, const FwdKernel& kernel, bool writes_parts,
                  int num_splits) {
  return scratch_bytes(params, kernel, writes_parts, num_splits,
                       row_blocks_of_unit(params, kernel)) <= kScratchBytes;
}

struct Candidate {
  const FwdKernel* kernel = nullptr;
  long long row_blocks = 0;
  bool writes_parts = false;
  bool possible = false;  // on this device, within the limits of a grid
};

bool fits_scratch(const FwdParams& params, const Candidate& parts, int num_splits) {
  return fits_scratch(params, *parts.kernel, parts.writes_parts, num_splits);
}

Candidate candidate(const FwdParams& params, const FwdInstance& instance, Family family, Path path,
                    const Tree& tree, int num_splits, const Device& device) {
  if (!runs_on(family, device)) {
    return {};
  }
  const FwdKernel* kernel =
      find_kernel(params, instance, family, path, tree, num_splits, device.num_sms);
  if (kernel == nullptr) {
    return {};
  }
  const bool splits = num_splits > 1;
  const long long blocks = row_blocks(params, *kernel);
  if (path == Path::kOneCta) {
    const int shared = splits ? kernel->state_bytes : kernel->shared_bytes;
    return {kernel, blocks, false, shared <= device.shared_bytes_per_block && blocks <= kMaxCtas};
  }
  const bool in_grid = num_splits <= kMaxSplits && blocks <= kMaxCtas &&
                       kernel->shared_bytes <= device.shared_bytes_per_block;
  // Other kernels take no e4m3 keys, and no latent ones.
  const bool rows_fit = !few_queries(path) || params.seqlen_q <= kFewQueries || params.kv_fp8 ||
                        params.d == kLatentHeadDim;
  return {kernel, blocks, splits && path != Path::kScoresFirst,
          rows_fit && in_grid && (splits || path != Path::kParts) &&
              (path != Path::kScoresFirst || fits_scratch(params, *kernel, false, num_splits))};
}

// One CTA per row block, or one per split of it.
Candidate better(const FwdParams& params, const Candidate& one_cta, const Candidate& parts,
                 const Tree& tree, int num_splits, const Device& device) {
  if (!parts.possible || !one_cta.possible) {
    return parts.possible ? parts : one_cta;
  }
  if (!fits_scratch(params, parts, num_splits)) {
    return one_cta;
  }
  if (one_cta.kernel->ctas_per_sm == 0) {
    return fills(params, *one_cta.kernel, device.num_sms) ? one_cta : parts;
  }
  const long long launches = launches_of(params, *parts.kernel, true, num_splits, parts.row_blocks);
  return time_of_parts(params, *parts.kernel, tree, num_splits, launches, device.num_sms) <
                 time_of_one_cta(params, *one_cta.kernel, device.num_sms)
             ? parts
             : one_cta;
}

// Of Hopper's key blocks of 64 keys. With this and the room below, 66 calls at head dims 160 to 256
// take 1.02 of the time of the best number of heads, 1.10 at worst.
constexpr int64_t kMostNarrowHeads = 16;

// How many parts of heads run at the same time where CTAs take turns: no bits depend on it. Key
// blocks of one head that start together wait for each other, one step apart: in a short sequence
// under a causal mask, where each has fewer rows than the one before, for most of their time. With
// many heads at a time, key blocks of one head start one after another, and do not wait. But what
// they read and add to should stay in L2: with more heads, less of it does.
// Hopper's key blocks of 64 keys are twice as many: more of them wait for each other, but fewer
// heads fill the GPU, and dq's sums take nearly all that L2 adds.
int shares_in_flight(const BwdParams& params, const BwdKernel& kernel, const KeyParts& parts,
                     const Device& device) {
  if (device.heads_in_flight > 0) {
    return device.heads_in_flight;
  }
  // Windows are taken to be like causal masks, as their key blocks end at different rows too.
  const bool full = params.window_size_left < 0 && params.window_size_right < 0;
  // Rounded here: the op rounds lengths after it has made the plan, and explain never does.
  const int64_t rows =
      std::min<int64_t>(ceil_div(params.seqlen_q, 128) * 128, int64_t{kChunkRows} * parts.chunks);
  const int64_t sums = int64_t{4} * rows * kernel_head_dim(params.d);
  const bool narrow = kernel.family == Family::kSm90 && kernel.block_n < 128;
  const int64_t share = narrow ? (full ? 8 : 5) : (full ? 12 : 6);  // 1 / share of twice L2
  const int64_t room = int64_t{2} * device.l2_bytes / share;
  const int64_t fit = room / std::max<int64_t>(sums, 1);
  const int64_t least = narrow ? 1 : full ? 2 : 4;
  const int64_t most = narrow ? kMostNarrowHeads : device.num_sms;
  return static_cast<int>(std::min(std::max(fit, least), most));
}

// Sums that have room in a slot.
int kept_sums_of(const KeyParts& parts) {
  return parts.chained + kept_sums(parts.chunks, parts.heads);
}

int64_t part_bytes(const BwdParams& params) {
  const int64_t keys = params.cu_seqlens_k != nullptr
                           ? params.total_k
                           : static_cast<int64_t>(params.b) * params.seqlen_k;
  return 2 * 4 * keys * params.h_k * params.d;
}

// Into how many CTAs the leaves of a key block are divided. More fill the SMs better, but their
// sums go through memory. Times are in steps: row blocks of a CTA.
KeyParts choose_parts(const BwdParams& params, const BwdKernel& kernel, const Device& device) {
  constexpr double kBytesPerStep = 4e6;  // that the GPU moves while a CTA goes over a row block
  constexpr double kStepsOfTurn = 2;     // of a head that waits for the one before
  const int chunks = static_cast<int>(std::max(ceil_div(params.seqlen_q, kChunkRows), 1LL));
  int run = 1;
  while (run < chunks) {
    run *= 2;
  }
  const int group = params.h_h_k_ratio;
  const KeyParts whole{run, group, 1};
  if (params.dk_sums != nullptr || device.path == Path::kOneCta) {
    return whole;
  }
  const double key_blocks =
      static_cast<double>(ceil_div(params.seqlen_k, kernel.block_n)) * params.b * params.h_k;
  const bool full = params.window_size_left < 0 && params.window_size_right < 0;
  const auto time = [&](const KeyParts& parts) {
    const double rows = std::min<double>(params.seqlen_q, double{kChunkRows} * parts.chunks);
    const double longest = rows / kernel.block_m * parts.heads;
    const double steps = key_blocks * params.seqlen_q / kernel.block_m * group / (full ? 1 : 2);
    const double waves = std::ceil(key_blocks * parts.count / device.num_sms);
    const double folding = parts.fold() ? 2.0 * part_bytes(params) * parts.count / kBytesPerStep
                           : parts.chained > 0 ? kStepsOfTurn * group
                                               : 0.0;
    return folding +
           (full ? waves * longest : std::max(longest, steps / device.num_sms + longest / 2));
  };
  // One CTA that walks the heads of a group waits at each for the key block before, which has more
  // rows under a causal mask. CTAs that pass on sums do not, but need room for all key blocks: no
  // more than dq's sums take.
  const KeyParts chained{run, 1, group, chunks};
  const bool passes_on = group > 1 && device.path != Path::kParts &&
                         2 * kept_sums_of(chained) * static_cast<int64_t>(params.seqlen_k) <=
                             static_cast<int64_t>(params.seqlen_q) * group;
  KeyParts best = passes_on ? chained : whole;
  const auto consider = [&](const KeyParts& parts) {
    const bool fits = part_bytes(params) * parts.count <= static_cast<int64_t>(kScratchBytes) &&
                      parts.count / (group / parts.heads) <= kMostRuns;
    if (fits && (device.path == Path::kParts || time(parts) < 0.95 * time(best))) {
      best = parts;
    }
  };
  for (int each = run / 2; each >= 1; each /= 2) {
    consider({each, group, static_cast<int>(ceil_div(chunks, each))});
  }
  if (group > 1) {
    consider({1, 1, chunks * group});
  }
  return best;
}

}  // namespace

int kernel_head_dim(int head_dim) {
  for (const int rounded : kHeadDims) {
    if (rounded >= head_dim) {
      return rounded;
    }
  }
  return 0;
}

Features features_of(const FLASH_NAMESPACE::Flash_fwd_params& params) {
  Features features = 0;
  if (params.is_causal) {
    features |= kCausal;
  } else if (params.window_size_left >= 0 || params.window_size_right >= 0) {
    features |= kWindow;
  }
  features |= params.alibi_slopes_ptr != nullptr ? kAlibi : 0;
  features |= params.softcap > 0.f ? kSoftcap : 0;
  features |= params.p_dropout < 1.f ? kDropout : 0;
  features |= params.cache_batch_idx != nullptr ? kCacheIndex : 0;
  features |= params.block_table != nullptr ? kPaged : 0;
  features |= params.d < kernel_head_dim(params.d) ? kPadded : 0;
  return features;
}

FwdPlan plan_fwd(const FwdParams& params, const FwdInstance& instance, int split_tokens,
                 bool deterministic, const Device& device) {
  FwdPlan plan{};
  plan.instance = &instance;
  plan.head_dim_v = params.d_v;
  plan.tree = tree_of(params, split_tokens, deterministic, device.num_sms);
  const long long tokens =
      static_cast<long long>(plan.tree.blocks_per_split) * plan.tree.keys_per_block;
  const long long splits = std::max(ceil_div(params.seqlen_k, tokens), 1LL);
  plan.num_splits = static_cast<int>(splits);

  const auto on = [&](Path path) {
    const auto of = [&](Family family) {
      return candidate(params, instance, family, path, plan.tree, plan.num_splits, device);
    };
    const Candidate newer = device.family == Family::kSm80 ? Candidate{} : of(Family::kSm90);
    if (!newer.possible || fits_scratch(params, newer, plan.num_splits)) {
      return newer.possible ? newer : of(Family::kSm80);
    }
    // Parts of the sm80 family have fewer rows, of which the scratch memory holds more splits. That
    // they are faster than one CTA shows only where the host knows the lengths; a latent cache has
    // no such way.
    const bool wanted = device.family != Family::kSm90 &&
                        (params.cu_seqlens_k == nullptr || params.d == kLatentHeadDim);
    const Candidate older = wanted ? of(Family::kSm80) : Candidate{};
    return older.possible ? older : newer;
  };
  // For few queries, the first or one that takes less time.
  const auto fastest = [&](const std::array<Candidate, 4>& ways) {
    const auto time = [&](const Candidate& way) {
      return time_of_few_queries(params, *way.kernel, plan.tree, plan.num_splits, device.num_sms);
    };
    const Candidate* best = &ways[0];
    for (const Candidate& way : ways) {
      const bool modelled =
          way.possible && (few_queries(way.kernel->path) ||
                           (way.kernel->family == Family::kSm90 &&
                            (way.kernel->path == Path::kOneCta || params.window_size_left < 0)));
      if (modelled && fits_scratch(params, way, plan.num_splits) && time(way) < time(*best)) {
        best = &way;
      }
    }
    return *best;
  };
  const auto choose = [&] {
    if (device.path.has_value()) {
      if (const Candidate forced = on(*device.path); forced.possible) {
        return forced;
      }
    }
    const Candidate one_cta = on(Path::kOneCta);
    if (device.family == Family::kSm90 && one_cta.possible &&
        one_cta.kernel->family == Family::kSm90) {
      return one_cta;
    }
    const Candidate parts = on(Path::kParts);
    const Candidate few_rows = on(Path::kFewRows);
    if (few_rows.possible &&
        (!one_cta.possible || fits_scratch(params, few_rows, plan.num_splits))) {
      return fastest({few_rows, on(Path::kScoresFirst), one_cta, parts});
    }
    return better(params, one_cta, parts, plan.tree, plan.num_splits, device);
  };
  const Candidate chosen = choose();
  if (!chosen.possible && params.d_v < params.d) {
    return plan_fwd(with_wide_values(params), instance, split_tokens, deterministic, device);
  }
  if (!chosen.possible) {
    if (plan.num_splits > kMaxSplits) {
      throw std::runtime_error(
          "split_size: expected 0 or at least " +
          std::to_string(ceil_div(params.seqlen_k, kMaxSplits * kKeysPerBlock) * kKeysPerBlock) +
          " for a call like this with seqlen_k " + std::to_string(params.seqlen_k) + ", got " +
          std::to_string(tokens));
    }
    throw std::runtime_error(
        "q: expected batch * nheads * seqlen_q that a CUDA grid and this GPU's shared memory can "
        "hold, got " +
        std::to_string(params.b) + " * " + std::to_string(params.h) + " * " +
        std::to_string(params.seqlen_q) + " at head_dim " + std::to_string(params.d));
  }
  plan.kernel = chosen.kernel;
  plan.writes_parts = chosen.writes_parts;
  plan.group = group_of(params, plan.kernel->family, plan.kernel->path);
  plan.ctas = plan.ctas_per_launch =
      static_cast<unsigned>(std::clamp(chosen.row_blocks, 1LL, kMaxCtas));
  const int ctas_per_sm = plan.kernel->ctas_per_sm;
  plan.most_ctas = ctas_per_sm > 0 ? ctas_per_sm * device.num_sms : plan.ctas;
  // CTAs that take row blocks one after another count those that are taken.
  plan.scratch_bytes = plan.ctas > plan.most_ctas ? sizeof(unsigned) : 0;
  const double value_bytes = 2.0 * params.b * params.h_k * params.seqlen_k * params.d;
  plan.prefetches = value_bytes <= kPrefetchedShare * device.l2_bytes;
  if (plan.writes_parts || plan.kernel->path == Path::kScoresFirst) {
    plan.part_rows = part_rows(params, *plan.kernel);
    const int together = row_blocks_of_unit(params, *plan.kernel);
    // Launches of equal size, rather than full ones and a small rest.
    const long long each =
        ceil_div(ceil_div(plan.ctas, together),
                 launches_of(params, *plan.kernel, plan.writes_parts, plan.num_splits, plan.ctas));
    plan.ctas_per_launch = static_cast<unsigned>(each * together);
    plan.scratch_bytes = scratch_bytes(params, *plan.kernel, plan.writes_parts, plan.num_splits,
                                       plan.ctas_per_launch);
  }
  return plan;
}

BwdPlan plan_bwd(const BwdParams& params, const BwdInstance& instance, bool deterministic,
                 const Device& device) {
  const Features features = features_of(params);
  BwdPlan plan{&instance, nullptr, params.d_v, deterministic, {}, 1, 0, 0, 0};
  for (int i = instance.num_kernels - 1; i >= 0; --i) {  // the fastest comes first in the table
    const BwdKernel& kernel = instance.kernels[i];
    const bool wanted = kernel.family == Family::kSm80 || device.family != Family::kSm80;
    if (wanted && runs_on(kernel.family, device) && takes_values(params, kernel) &&
        covers(kernel.covers, features) && kernel.shared_bytes <= device.shared_bytes_per_block &&
        (kernel.takes == nullptr || kernel.takes(params))) {
      plan.kernel = &kernel;
    }
  }
  if (plan.kernel == nullptr && params.d_v < params.d) {
    return plan_bwd(with_wide_values(params), instance, deterministic, device);
  }
  if (plan.kernel == nullptr) {
    throw TooLittleSharedMemory(
        "q: the backward for head_dim " + std::to_string(params.d) + " needs " +
        std::to_string(instance.kernels[instance.num_kernels - 1].shared_bytes) +
        " bytes of shared memory per block, this GPU offers " +
        std::to_string(device.shared_bytes_per_block));
  }
  // The sm80 family's most general kernels always do.
  plan.in_turns |= plan.kernel->family == Family::kSm80 && (features & ~kCausal) != 0;
  plan.parts = choose_parts(params, *plan.kernel, device);
  if (plan.in_turns) {
    plan.shares_in_flight = shares_in_flight(params, *plan.kernel, plan.parts, device);
  }
  plan.kept_sums = kept_sums_of(plan.parts);
  const int64_t ctas =
      ceil_div(params.seqlen_k, plan.kernel->block_n) * params.b * params.h_k * plan.parts.count;
  if (plan.parts.chained > 0) {
    // As turns.h counts key blocks of packed sequences, without knowing their lengths.
    const int64_t blocks = params.cu_seqlens_k != nullptr
                               ? params.total_k / plan.kernel->block_n + params.b
                               : ceil_div(params.seqlen_k, plan.kernel->block_n) * params.b;
    plan.slots = static_cast<int>(blocks * params.h_k);
    plan.slot_counters = blocks * params.h_k * plan.parts.chained;
  } else if (plan.kept_sums > 0) {
    // For those that may be resident. If there are more, some wait.
    const int64_t resident = (plan.kernel->family == Family::kSm80 ? 2 : 1) * device.num_sms;
    plan.slots = static_cast<int>(std::min(ctas, resident));
    plan.slot_counters = 1 + ctas;
  }
  return plan;
}

void run_plan(const BwdPlan& plan, BwdParams params, cudaStream_t stream) {
  params.in_turns = plan.in_turns;
  params.parts = plan.parts;
  params.shares_in_flight = plan.shares_in_flight;
  params.num_slots = plan.slots;
  params.slot_sums = plan.kept_sums;
  BwdParams rows = params;
  rows.d = params.d_v;  // of out and its gradient
  plan.instance->before(rows, stream);
  plan.kernel->launch(params, stream);
  plan.kernel->after(params, stream);
  if (plan.parts.fold()) {
    plan.instance->fold(params, stream);
  }
}

namespace {

// Where the kernels of a plan write results for the next kernel.
void place_scratch(const FwdPlan& plan, char* scratch, FwdParams& params) {
  if (plan.kernel->path == Path::kScoresFirst) {
    const int blocks = key_blocks(params);
    const ScoresFirstRoom room =
        scores_first_room(plan.ctas_per_launch, blocks, plan.num_splits, kernel_head_dim(params.d));
    params.scores = {reinterpret_cast<float*>(scratch),
                     reinterpret_cast<float*>(scratch + room.maxima),
                     reinterpret_cast<float*>(scratch + room.acc),
                     reinterpret_cast<float2*>(scratch + room.state),
                     reinterpret_cast<unsigned*>(scratch + room.arrivals),
                     blocks,
                     plan.prefetches};
    return;
  }
  const std::size_t rows =
      static_cast<std::size_t>(plan.num_splits) * plan.ctas_per_launch * plan.part_rows;
  params.parts.acc = reinterpret_cast<float*>(scratch);
  params.parts.state =
      reinterpret_cast<float2*>(params.parts.acc + rows * acc_columns(kernel_head_dim(params.d)));
  // Where each CTA has one tile, nobody has to count, nor to set the counter to 0.
  if (plan.kernel->ctas_per_sm > 0 &&
      static_cast<long long>(plan.ctas_per_launch) * plan.num_splits > plan.most_ctas) {
    params.tile_counter = reinterpret_cast<unsigned*>(params.parts.state + rows);
  }
}

}  // namespace

void run_plan(const FwdPlan& plan, FwdParams params, void* scratch, cudaStream_t stream) {
  params.tree = plan.tree;
  params.num_splits = plan.num_splits;
  params.group = plan.group;
  params.parts = Parts{};
  if (!plan.writes_parts && plan.kernel->path != Path::kScoresFirst) {
    params.tile_counter = static_cast<unsigned*>(scratch);
    plan.kernel->launch(params, std::min(plan.ctas, plan.most_ctas), stream);
    return;
  }
  place_scratch(plan, static_cast<char*>(scratch), params);
  params.parts.block_m = block_rows(*plan.kernel, plan.group);
  params.parts.rows = plan.part_rows;
  for (unsigned first = 0; first < plan.ctas; first += plan.ctas_per_launch) {
    params.parts.first_cta = first;
    params.parts.ctas = std::min(plan.ctas_per_launch, plan.ctas - first);
    const unsigned ctas = plan.kernel->ctas_per_sm > 0
                              ? std::min(params.parts.ctas * plan.num_splits, plan.most_ctas)
                              : params.parts.ctas;
    plan.kernel->launch(params, ctas, stream);
    if (plan.writes_parts) {
      plan.instance->merge(params, stream);
    }
  }
}

}  // namespace fad
