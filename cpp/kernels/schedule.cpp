// How many CTAs share the keys of one row block.
#include <algorithm>
#include <cmath>

#include "fwd.h"

namespace fad {

#ifdef FLASH_ATTENTION_DETERMINISTIC

FwdSchedule schedule_fwd(const FwdParams&, int) { return {1}; }

#else

namespace {

constexpr int kSplitBlockM = 64;
constexpr int kMaxSplits = 128;  // what the largest combine kernel holds

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// Upstream's rule (flash_api.cpp, num_splits_heuristic): the smallest number of splits whose
// occupancy of the last wave comes within 15 % of the best.
FwdSchedule schedule_fwd(const FwdParams& params, int num_sms) {
  const int slots = 2 * num_sms;  // CTAs of four warps, two to an SM
  const int row_blocks = params.b * params.h * ceil_div(params.seqlen_q, kSplitBlockM);
  const int block_n = params.d <= 64 ? 128 : 64;
  const int key_blocks = ceil_div(params.seqlen_k, block_n);
  if (row_blocks >= 0.8f * slots) {
    return {1};
  }
  const int limit = std::min({kMaxSplits, slots, key_blocks});
  // A count that leaves the longest part as long as one split fewer does gains nothing.
  const auto useful = [&](int n) {
    return n == 1 || ceil_div(key_blocks, n) != ceil_div(key_blocks, n - 1);
  };
  const auto efficiency = [&](int n) {
    const float waves = static_cast<float>(row_blocks) * n / slots;
    return waves / std::ceil(waves);
  };
  float best = 0.f;
  for (int n = 1; n <= limit; ++n) {
    if (useful(n)) {
      best = std::max(best, efficiency(n));
    }
  }
  for (int n = 1; n <= limit; ++n) {
    if (useful(n) && efficiency(n) >= 0.85f * best) {
      return {n};
    }
  }
  return {1};
}

#endif

}  // namespace fad
