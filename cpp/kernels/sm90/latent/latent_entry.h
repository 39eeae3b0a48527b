// The row of the table of kernels for multi-head latent attention on Hopper.
#pragma once

#include "fwd.h"

namespace fad::sm90 {

constexpr int kLatentRows = 64;
constexpr int kLatentSharedBytes = 230944;

template <Features kCovers>
constexpr FwdKernel latent_entry(void (*launch)(const fad::FwdParams&, unsigned, cudaStream_t)) {
  return {Family::kSm90,      Path::kFewRows,     kCovers,        kLatentRows,
          kLatentSharedBytes, kLatentSharedBytes, launch,
          /*ctas_per_sm=*/0,  /*takes=*/nullptr,  kLatentHeadDimV};
}

}  // namespace fad::sm90
