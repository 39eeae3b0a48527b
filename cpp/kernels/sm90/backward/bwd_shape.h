// How large the backward's tiles are. dk and dv of a key block are sums over row blocks, last to
// first, and over the rows of each, first to last: bits depend on the height of a row block, which
// is that of the sm80 family (bwd_tiles in instances.json).
#pragma once

namespace fad::sm90 {

constexpr int kBwdKeys = 128;
constexpr int kBwdSharedBytes = 227 * 1024;  // of a CTA on compute capability 9.0: all of it

}  // namespace fad::sm90
