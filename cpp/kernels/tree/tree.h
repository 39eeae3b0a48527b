// The tree of additions: what of a call's plan decides the bits of a row.
#pragma once

namespace fad {

// Keys of one step of the softmax, at every head dim, on every path and every GPU.
constexpr int kKeysPerBlock = 64;

// Blocks per split that no sequence reaches (lengths stay below 2^30): one split over all keys.
constexpr int kOneSplit = 1 << 24;

// A sequence's keys, counted from its own position 0, in blocks, and blocks in splits. A split is
// reduced block by block; splits are merged last to first.
struct Tree {
  int keys_per_block = kKeysPerBlock;
  int blocks_per_split = kOneSplit;
};

}  // namespace fad
