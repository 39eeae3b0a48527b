// Which path a call takes. Shapes and the device decide, never the contents of device memory.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "fwd.h"
#include "state_room.h"

namespace fad {

namespace {

constexpr int kBlockN = 64;        // of every instance
constexpr int kOwnerBlockM = 128;  // of the one-CTA path (64 at head dim 256)
constexpr int kPartBlockM = 64;    // of the many-CTA path
constexpr int kMaxParts = 65535;   // of the many-CTA path: a part is a y of its grid

long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

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

}  // namespace

FwdPlan plan_fwd(const FwdParams& params, int split_tokens, bool deterministic, int num_sms,
                 int shared_bytes_per_block) {
  const long long heads = static_cast<long long>(params.b) * params.h;
  const int head_dim = kernel_head_dim(params.d);
  const int block_m = head_dim == 256 ? 64 : kOwnerBlockM;
  const bool few_rows = params.seqlen_q <= kFewRows && params.p_dropout == 1.f;
  FwdPlan plan{split_tokens, 1, few_rows ? kFewRows : block_m, few_rows, false, 0};
  if (!deterministic) {
    const int key_blocks = static_cast<int>(ceil_div(params.seqlen_k, kBlockN));
    const int splits = splits_by_occupancy(heads * ceil_div(params.seqlen_q, kPartBlockM),
                                           std::max(key_blocks, 1), num_sms);
    plan.split_tokens = splits == 1 ? 0 : static_cast<int>(ceil_div(key_blocks, splits)) * kBlockN;
  }
  if (plan.split_tokens == 0 || params.seqlen_k <= plan.split_tokens) {
    return plan;
  }
  plan.num_splits = static_cast<int>(ceil_div(params.seqlen_k, plan.split_tokens));
  // The one-CTA path keeps its state in shared memory; where that does not fit, the other path
  // runs.
  const bool fits = state_room(head_dim, block_m, kBlockN).bytes <= shared_bytes_per_block;
  // Worth it when row blocks alone leave SMs without work.
  const long long row_blocks = heads * ceil_div(params.seqlen_q, block_m);
  plan.many_ctas = few_rows || !fits || row_blocks < 2LL * num_sms;
  if (plan.num_splits > kMaxParts) {
    if (!fits || params.token_of != nullptr) {
      throw std::runtime_error(
          "split_size: expected 0 or at least " +
          std::to_string(ceil_div(params.seqlen_k, kMaxParts * kBlockN) * kBlockN) +
          " for a call like this with seqlen_k " + std::to_string(params.seqlen_k) + ", got " +
          std::to_string(plan.split_tokens));
    }
    plan.many_ctas = plan.few_rows = false;
    plan.block_m = block_m;
  }
  if (plan.many_ctas) {
    plan.block_m = few_rows ? kFewRows : kPartBlockM;
    const std::size_t rows = static_cast<std::size_t>(plan.num_splits) * heads * params.seqlen_q;
    plan.scratch_bytes = rows * (head_dim * sizeof(float) + sizeof(float2));
  }
  return plan;
}

}  // namespace fad
