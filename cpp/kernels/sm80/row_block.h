// Which rows are a CTA's, and a thread's.
#pragma once

#include <cstdint>

namespace fad {

// Blocks that a sequence takes.
__host__ __device__ constexpr int num_blocks(int seqlen, int block) {
  return (seqlen + block - 1) / block;
}

// Which row block a CTA works on. One-dimensional grid: y and z stop at 65535, and a batch may be
// larger. The row blocks of one head stay neighbours, so that they find its K and V in L2.
struct Place {
  int bidb, bidh, m_block;
};

template <typename Params>
__device__ __forceinline__ Place place_of(const Params& params, int block_m, int cta) {
  const int num_m_blocks = num_blocks(params.seqlen_q, block_m);
  const int head = cta / num_m_blocks;
  const int bidb = head / params.h;
  // Causal row blocks near the end have the most keys: start them first.
  return {bidb, head - bidb * params.h, num_m_blocks - 1 - (cta - head * num_m_blocks)};
}

template <int kBlockM, typename Params>
__device__ __forceinline__ Place place_of(const Params& params, int cta) {
  return place_of(params, kBlockM, cta);
}

// The thread's and the CTA's index, read from their special registers at this place (volatile):
// values that only the end of a split needs must not occupy registers during the loop over key
// blocks, which costs up to a tenth of the time.
__device__ __forceinline__ int read_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ int read_cta() {
  int cta;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  return cta;
}

// The first of this thread's rows of a row block.
__device__ __forceinline__ int thread_row() {
  const int thread = read_thread();
  return thread / 32 * 16 + thread % 32 / 4;
}

// Where this thread's part of a row block lies: the MMA gives it two rows of every 16, and of each
// row two neighbouring columns of every eight.
template <typename Traits>
struct Fragment {
  static constexpr int kMmaM = Traits::kBlockM / (16 * Traits::kNWarps);
  static constexpr int kMmaN = Traits::kHeadDim / 8;
  static constexpr int kRowStep = 16 * Traits::kNWarps;
};

}  // namespace fad
