#include "cost_model.h"

#include <algorithm>
#include <cmath>

#include "sm80/decode/scores_first.h"
#include "sm90/forward/fwd_shape.h"

namespace fad {

namespace {

// Parts of the sm80 family are computed in tiles of fewer rows, and written and read once more: the
// one-CTA path is faster from this share of the GPU's CTA slots on. (Measured: docs/adr/0014.)
constexpr double kFullEnough = 0.76;

// The sm90 family, whose CTAs take one tile after another, computes parts in the same tiles. There
// a part costs an SM as much time as this many keys: each row is written and read in fp32, 8 bytes
// a column. (A model, from an H100's 25 GB/s and 4.5 TFLOP/s an SM.)
constexpr double kPartKeys = 360;

// A launch, with that of the merge kernel and the end of both, costs as much as this many keys.
constexpr double kLaunchKeys = 400;

// Time of parts of the sm80 family, to that of the sm90 family for the same rows. (A model.)
constexpr double kOlderFamily = 2;

// Rows that a tile of 192 has done while a tile of 128 does one: it loads keys less often.
constexpr double kTallTile = 1.15;

// Queries up to which one CTA takes rows of several heads: longer sequences fill their tiles
// anyway. (H100, 32 query heads on 8: 32,768 causal queries take 1.01 to 1.03 of the time of
// separate heads.)
constexpr int kLongestShared = 16384;

// Up to 16 queries can run in four ways, each with a model of its time in microseconds on an H100:
// its launches, plus what CTAs compute in turns or what the GPU reads, whichever takes longer.
// Fitted to 976 drawn calls of 1 to 16 queries on 300 to 40,000 keys, head dims 64, 128 and 256,
// dense and in pages: errors of 7 to 17 % (rms). The path that the models name takes 1.01 of the
// time of the fastest one, at worst 1.32, also in 943 other calls (docs/adr/0018).
struct PathTime {
  double start;
  double keys, keys_by_dim;  // a thousand keys of a row block: keys + keys_by_dim * head_dim^2
  double in_pages;           // what they take more
};
constexpr PathTime kOneCtaTime = {6.5, 7.6, 1.2e-4, 0.02};
constexpr PathTime kPartsTime = {9.5, 6.8, 1.1e-4, 0.01};
constexpr PathTime kFewRowsTime = {4.9, 8.3, 3.0e-4, 0.31};
constexpr double kBytesPerMicrosecond = 2.8e6;
constexpr double kMergedBytesPerMicrosecond = 2e6;
constexpr double kSecondWarpgroup = 0.39;             // what a key takes more of its time
constexpr double kRowsOf32 = 1.27, kRowsOf64 = 2.06;  // few-rows, to its tile of 16

// The path scores-first shares out keys and columns, to 8 rows each time: what is left to wait for
// is a split's walk over the values.
constexpr PathTime kScoresFirstTime = {12.3, 1.6, 0, 0.13};
constexpr double kScoresByDim = 0.086, kValues = 0.0127, kRowBlockAfterFirst = 0.18,
                 kRowBlockAfterEighth = 1, kReadTwice = 1.1, kValuesInPages = 0.8;

// The larger of two times, or somewhat more where they are alike.
double together(double a, double b) { return std::sqrt(std::sqrt(a * a * a * a + b * b * b * b)); }

// Keys that a row block sees: the last one, which sees most, and the average one.
struct SeenKeys {
  double most, average;
  bool differ;
};

SeenKeys seen_keys(const FwdParams& params, int block_m) {
  double most = params.seqlen_k;
  const double right = std::max(params.window_size_right, 0);
  if (params.window_size_left >= 0) {
    most = std::min(most, params.window_size_left + right + block_m);
    return {most, most, false};
  }
  const bool bounded = params.is_causal || params.window_size_right >= 0;
  const double first = std::clamp(params.seqlen_k - params.seqlen_q + right, 0., most);
  return bounded ? SeenKeys{most, (first + most) / 2, true} : SeenKeys{most, most, false};
}

}  // namespace

int group_room(Family family, Path path, int group) {
  int room = 1;
  while (room < group) {
    room *= 2;
  }
  return loads_boxes(family, path) ? room : group;
}

int group_of(const FwdParams& params, Family family, Path path) {
  int group = 1;
  if (params.d == kLatentHeadDim) {
    const bool fits = int64_t{params.seqlen_q} * params.h_h_k_ratio < (1 << 30);
    group = fits ? params.h_h_k_ratio : 1;
  } else if (loads_boxes(family, path) &&
             (path == Path::kParts || params.seqlen_q <= kLongestShared)) {
    const int all = params.h_h_k_ratio;
    const auto fits = [&](int heads) {
      return all % heads == 0 && heads <= sm90::kGroupRows &&
             params.seqlen_q < (1 << 29) / group_room(family, path, heads);
    };
    while (fits(2 * group)) {
      group *= 2;
    }
    // All heads that share a key head, where that fills fewer tiles, of 128 rows at least, though
    // some of their rows stay unused: 8 queries of 5 heads fill one.
    const auto tiles = [&](int heads) {
      const long long rows =
          static_cast<long long>(params.seqlen_q) * group_room(family, path, heads);
      return ceil_div(rows, 2 * sm90::kGroupRows) * (all / heads);
    };
    if (group < all && fits(all) && tiles(all) < tiles(group)) {
      group = all;
    }
  } else if (few_queries(path) && params.seqlen_q <= kFewQueries) {
    group = params.h_h_k_ratio;
    while (params.h_h_k_ratio % group != 0 || params.seqlen_q * group > kMostGroupRows) {
      --group;
    }
  }
  return group;
}

bool fills_better(const FwdParams& params, int tile, int other) {
  const int rows = rows_of(params, Family::kSm80, Path::kFewRows);
  return other < rows ? tile > other : rows <= tile && tile < other;
}

long long row_blocks(const FwdParams& params, Family family, Path path, int block_m) {
  const int group = group_of(params, family, path);
  return ceil_div(static_cast<long long>(params.seqlen_q) * group_room(family, path, group),
                  block_m) *
         params.b * (params.h / group);
}

double key_time(const FwdKernel& kernel) {
  return kernel.block_m >= 192 ? kernel.block_m / kTallTile : kernel.block_m;
}

long long turns(const FwdParams& params, const FwdKernel& kernel, int num_splits, int num_sms) {
  const int parts = kernel.path == Path::kParts ? num_splits : 1;
  return ceil_div(row_blocks(params, kernel) * parts, num_sms);
}

// Row blocks with most keys come first, so that those with few fill up the last turn.
double time_of_one_cta(const FwdParams& params, const FwdKernel& kernel, int num_sms) {
  const SeenKeys keys = seen_keys(params, kernel.block_m);
  const double all = keys.most * turns(params, kernel, 1, num_sms);
  const double shared = row_blocks(params, kernel) * keys.average / num_sms;
  const double filled = std::max(keys.most, shared + (2 * keys.average - keys.most) / 2);
  return key_time(kernel) * (keys.differ ? std::min(all, filled) : all);
}

// Splits that a left window hides count too: CTAs skip them one by one.
double time_of_parts(const FwdParams& params, const FwdKernel& kernel, const Tree& tree,
                     int num_splits, long long launches, int num_sms) {
  const SeenKeys keys = seen_keys(params, kernel.block_m);
  const double split = static_cast<double>(tree.blocks_per_split) * tree.keys_per_block;
  const double seen =
      keys.differ ? std::clamp<double>(keys.average / split + 0.5, 1, num_splits) : num_splits;
  const double each = row_blocks(params, kernel) * seen / launches / num_sms;
  return (kernel.family == Family::kSm80 ? kOlderFamily : 1) * key_time(kernel) * launches *
         (std::ceil(each) * std::min(split, keys.most) + each * kPartKeys + kLaunchKeys);
}

bool fills(const FwdParams& params, const FwdKernel& one_cta, int num_sms) {
  return row_blocks(params, one_cta) >= kFullEnough * 2 * num_sms;
}

double time_of_few_queries(const FwdParams& params, const FwdKernel& kernel, const Tree& tree,
                           int num_splits, int num_sms) {
  const double head_dim = kernel_head_dim(params.d);
  double keys = std::max(params.seqlen_k, 1);
  if (params.window_size_left >= 0) {  // and the rest of the keys is hidden
    const double seen = params.seqlen_q + std::max(params.window_size_right, 0) + kKeysPerBlock;
    keys = std::min(keys, params.window_size_left + seen);
  }
  const double split =
      std::min(keys, static_cast<double>(tree.blocks_per_split) * tree.keys_per_block);
  const double splits = std::min(std::ceil(keys / split), static_cast<double>(num_splits));
  const double heads = static_cast<double>(params.b) * params.h_k;
  const double reading = 4 * keys * heads * head_dim / kBytesPerMicrosecond;
  const double blocks = row_blocks(params, kernel);
  const bool paged = params.block_table != nullptr;
  const auto thousand_keys = [&](const PathTime& time) {
    return (time.keys + time.keys_by_dim * head_dim * head_dim) * (paged ? 1 + time.in_pages : 1);
  };
  if (kernel.path == Path::kScoresFirst) {
    const double key = (thousand_keys(kScoresFirstTime) + kScoresByDim * head_dim) / 1000;
    const double each = blocks / heads;
    const double waiting = kValues * head_dim * split / 1000 + kRowBlockAfterFirst * (each - 1) +
                           kRowBlockAfterEighth * std::clamp(each - 8, 0., 8.);
    return kScoresFirstTime.start + waiting * (paged ? 1 + kValuesInPages : 1) +
           together(key * keys * blocks / num_sms, kReadTwice * reading);
  }
  const bool splits_share = kernel.path != Path::kOneCta;
  const double turns = std::ceil(blocks * (splits_share ? splits : 1) / num_sms /
                                 (kernel.path == Path::kFewRows ? 2 : 1));
  const double walk = turns * (splits_share ? split : keys) / 1000;
  const double rows = static_cast<double>(params.seqlen_q) * params.h_h_k_ratio;
  const double merged = splits_share && splits > 1
                            ? 8 * head_dim * rows * heads * splits / kMergedBytesPerMicrosecond
                            : 0;
  if (kernel.path == Path::kFewRows) {
    const double tile = kernel.block_m <= 16 ? 1 : kernel.block_m <= 32 ? kRowsOf32 : kRowsOf64;
    return kFewRowsTime.start + together(walk * tile * thousand_keys(kFewRowsTime), reading) +
           merged;
  }
  const int group = group_of(params, kernel.family, kernel.path);
  const double filled =
      std::min(params.seqlen_q * group_room(kernel.family, kernel.path, group), kernel.block_m);
  const double warpgroups = 1 + kSecondWarpgroup * std::max(filled / sm90::kGroupRows - 1, 0.);
  const PathTime& time = splits_share ? kPartsTime : kOneCtaTime;
  return time.start + together(walk * warpgroups * thousand_keys(time), reading) + merged;
}

}  // namespace fad
