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

// Up to 16 queries can run in three ways. A CTA of the few-rows kernel walks a split block by
// block; a CTA of Hopper's parts takes as long for 64 rows as for one; the path scores-first shares
// out the keys and columns of a split, a CTA to 8 rows. What is fastest depends on the share of the
// SMs that CTAs which each walk a split fill, on rows, and on how long a block takes. Times by
// which these limits were chosen, on an H100, bf16, splits of 2048 (of 13 blocks: 777 keys), us:
//
//   CTAs on 132 SMs, rows, head dim   few-rows   parts   scores-first
//   16, 32, 128                           40.9    26.5           28.2
//   16, 64, 128                           62.3    26.9           39.1
//   32, 8, 128                            32.1    27.3           26.8
//   32, 16, 128                           32.3    27.4           29.8
//   49, 8, 128                            37.8    33.1           36.1
//   64, 20, 128                           39.4    32.8             59
//   128, 20, 128                          52.7    53.6            108
//   80, 4, 128, in pages                  39.2    40.0             49
//   16, 8, 256                            65.1    37.5           26.3
//   64, 8, 256                            73.3    54.6             71
//   64, 20, 64                            31.5    25.9             35
//   32, 4, 64                             27.0    25.1           20.7
//   24, 5, 128, 13 blocks                 14.2       -           14.8
//   64, 4, 128, 13 blocks                 14.6       -           20.1
//
// From this share on, the few-rows kernel is taken rather than scores-first; and from the second
// one on, where splits have at most so many blocks.
constexpr double kSplitsFullEnough = 0.55;
constexpr double kMiddleWalksFullEnough = 0.25;
constexpr int kMiddleWalk = 16;

// Within these shares parts are taken rather than both: for more than 32 rows, for more than 16,
// and for fewer where the few-rows kernel takes long for a block, at large head dims and in pages.
struct Share {
  double from, to;
};
constexpr Share kManyRows = {0.2, 1e9};
constexpr Share kMiddleRows = {0.2, 0.9};
constexpr Share kFewRowsOfSlowBlocks = {0.45, 0.9};
constexpr Share kNever = {1e9, 1e9};
constexpr int kSlowHeadDim = 192;

// At head dim 128, where the path scores-first has one row block, up to three, or more, parts are
// taken from these shares on. Up to 16 rows, the few-rows kernel is as fast where splits fill the
// SMs, and they are not in pages.
constexpr int kMeasuredHeadDim = 128;
constexpr double kFromOneRowBlock = 0.3, kFromFewRowBlocks = 0.2, kFromManyRowBlocks = 0.1;

// Up to this head dim parts are taken for more than 16 rows whatever the share. (H100, 20 rows,
// pages of 16, share 0.97 and more: 0.88 to 1.01 of the few-rows kernel's time.)
constexpr int kSmallHeadDim = 64;

// Blocks of keys that the few-rows kernel walks in less time than a second launch takes. (H100:
// 0.75 us a block, and 4 us.)
constexpr int kShortWalk = 8;

// Rows of the few-rows kernel's tiles: the time of a block of keys grows with them. (H100, head dim
// 128, few CTAs: 0.8 us with 16, 2.1 us with 64.)
constexpr int kFewRowsTiles[] = {16, 32, 64};

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

// CTAs that each walk a split: blocks of the longest, and the share of the SMs that they fill,
// where shorter ones count for less.
struct Walks {
  int longest;
  double share;
};

Walks walks_of(const FwdParams& params, const FwdKernel& kernel, const Tree& tree, int num_sms) {
  int blocks = key_blocks(params);
  if (params.window_size_left >= 0) {  // and the rest of the keys is hidden
    const int seen = params.window_size_left + std::max(params.window_size_right, 0);
    blocks = std::min(blocks, num_blocks(seen + params.seqlen_q, kKeysPerBlock) + 1);
  }
  const int longest = std::max(std::min(blocks, tree.blocks_per_split), 1);
  return {longest, static_cast<double>(row_blocks(params, kernel)) * blocks / longest / num_sms};
}

}  // namespace

int group_of(const FwdParams& params, Family family, Path path) {
  int group = 1;
  if (family == Family::kSm90 && (path == Path::kParts || params.seqlen_q <= kLongestShared)) {
    // The copy engine loads the 64 rows of a warpgroup as boxes of `heads` heads of some queries.
    const auto fits = [&](int heads) {
      return params.h_h_k_ratio % heads == 0 && heads <= sm90::kGroupRows &&
             params.seqlen_q < (1 << 29) / heads;
    };
    while (fits(2 * group)) {
      group *= 2;
    }
  } else if (few_queries(path) && params.seqlen_q <= kFewQueries) {
    group = params.h_h_k_ratio;
    while (params.h_h_k_ratio % group != 0 || params.seqlen_q * group > kMostGroupRows) {
      --group;
    }
  }
  return group;
}

int few_rows_tile(int rows) {
  int tile = kFewRowsTiles[0];
  for (const int tall : kFewRowsTiles) {
    tile = tile < rows ? tall : tile;
  }
  return tile;
}

long long row_blocks(const FwdParams& params, Family family, Path path, int block_m) {
  const int group = group_of(params, family, path);
  return ceil_div(params.seqlen_q * group, block_m) * params.b * (params.h / group);
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

bool splits_fill(const FwdParams& params, const FwdKernel& few_rows, const Tree& tree,
                 int num_sms) {
  const Walks walks = walks_of(params, few_rows, tree, num_sms);
  return walks.longest <= kShortWalk || walks.share >= kSplitsFullEnough ||
         (walks.longest <= kMiddleWalk && walks.share >= kMiddleWalksFullEnough);
}

bool suits_parts(const FwdParams& params, const FwdKernel& parts, const Tree& tree, int num_sms) {
  const int group = group_of(params, parts.family, Path::kParts);
  if (parts.ctas_per_sm == 0 || params.seqlen_q > kFewQueries || params.window_size_left >= 0 ||
      group != params.h_h_k_ratio) {
    return false;
  }
  const int rows = params.seqlen_q * group;
  const bool slow = kernel_head_dim(params.d) >= kSlowHeadDim || params.block_table != nullptr;
  const bool small = kernel_head_dim(params.d) <= kSmallHeadDim && rows > kFewRowsTiles[0];
  Share share = rows > kFewRowsTiles[1] || small ? kManyRows
                : rows > kFewRowsTiles[0]        ? kMiddleRows
                : slow                           ? kFewRowsOfSlowBlocks
                                                 : kNever;
  if (kernel_head_dim(params.d) == kMeasuredHeadDim) {
    const int row_blocks = num_blocks(rows, kScoreRows);
    share.from = row_blocks > 3   ? kFromManyRowBlocks
                 : row_blocks > 1 ? kFromFewRowBlocks
                                  : kFromOneRowBlock;
    share.to = rows > kFewRowsTiles[0] || slow ? share.to : kSplitsFullEnough;
  }
  const Walks walks = walks_of(params, parts, tree, num_sms);
  const bool short_walks = rows > kFewRowsTiles[0] && walks.longest <= kShortWalk;
  return (short_walks || walks.share >= share.from) && walks.share < share.to;
}

}  // namespace fad
