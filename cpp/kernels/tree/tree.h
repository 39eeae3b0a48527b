// The trees of additions. The forward's: what of a call's plan decides the bits of a row. That of
// dk and dv: see key_tree.h.
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

// Rows of a leaf of dk and dv, counted from their sequence's first row.
constexpr int kChunkRows = 4096;

// How the leaves of a key block are shared out; no bit depends on it. A part is an aligned run of
// chunks with all query heads of a group, or one chunk with one query head; or, chained, all chunks
// with one query head, to which CTAs of a group pass on the sums of each chunk.
struct KeyParts {
  int chunks = 1;   // of a part: a power of two
  int heads = 1;    // query heads of a part
  int count = 1;    // parts of the longest sequence
  int chained = 0;  // chunks of the longest sequence; 0: not chained

  // Whether parts have sums of their own, which are added afterwards.
  constexpr bool fold() const { return count > 1 && chained == 0; }
};

// Sums that a CTA keeps at most beside those that it adds up: see climb in key_tree.h.
constexpr int kept_sums(int chunks, int heads) {
  int kept = heads > 1 ? 1 : 0;
  for (int rest = chunks - 1; rest > 0; rest /= 2) {
    ++kept;
  }
  return kept;
}

}  // namespace fad
