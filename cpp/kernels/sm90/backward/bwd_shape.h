// What the table of kernels says of the backward's tiles. Key blocks and row blocks are those of
// the sm80 family (bwd_tiles in instances.json): bits depend on them.
#pragma once

namespace fad::sm90 {

constexpr int kBwdSharedBytes = 227 * 1024;  // of a CTA on compute capability 9.0: all of it

}  // namespace fad::sm90
