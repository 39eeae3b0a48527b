// Launches upstream's forward kernel body for one (dtype, head dim). Everything a call may vary
// without changing bits (grid shape, order of row blocks) is decided here.
#pragma once

#include <c10/cuda/CUDAException.h>

#include "flash.h"
#include "flash_fwd_kernel.h"
#include "fwd.h"

namespace fad {

// A row of O depends on its own row of Q and on kBlockN alone, so that kBlockM and warps are free.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps>
using FwdTraits =
    Flash_fwd_kernel_traits<kHeadDim, kBlockM, kBlockN, kWarps,
                            /*Is_Q_in_regs=*/false, /*Share_Q_K_smem=*/false, Element>;

// Every device must run the same kBlockN, and the smallest of them offers 99 KB to a block.
template <typename Traits>
inline constexpr bool kFitsEveryDevice = Traits::kSmemSize <= 99 * 1024;

template <typename Traits, bool kCausal, bool kEvenHeadDim>
__global__ void fwd_kernel(const __grid_constant__ FwdParams params) {
  // One-dimensional grid: y and z stop at 65535, and a batch may be larger. The row blocks of one
  // head stay neighbours, so that they find its K and V in L2.
  const int num_m_blocks = (params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  const int head = blockIdx.x / num_m_blocks;
  const int bidb = head / params.h;
  // Causal row blocks near the end have the most keys: start them first.
  const int m_block = num_m_blocks - 1 - (blockIdx.x - head * num_m_blocks);
  FLASH_NAMESPACE::compute_attn_1rowblock<Traits, /*Is_dropout=*/false, kCausal,
                                          /*Is_local=*/false, /*Has_alibi=*/false,
                                          /*Is_even_MN=*/false, kEvenHeadDim,
                                          /*Is_softcap=*/false, /*Return_softmax=*/false>(
      params, bidb, head - bidb * params.h, m_block);
}

// Upstream's split kernel: blockIdx.y says which part of the keys.
template <typename Traits, bool kCausal, bool kEvenHeadDim>
__global__ void fwd_split_kernel(const __grid_constant__ FwdParams params) {
  const int num_m_blocks = (params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  const int head = blockIdx.x / num_m_blocks;
  const int bidb = head / params.h;
  FLASH_NAMESPACE::compute_attn_1rowblock_splitkv<
      Traits, kCausal, /*Is_local=*/false, /*Has_alibi=*/false, /*Is_even_MN=*/false, kEvenHeadDim,
      /*Is_softcap=*/false, /*Split=*/true, /*Append_KV=*/false>(
      params, bidb, head - bidb * params.h, blockIdx.x - head * num_m_blocks, blockIdx.y,
      gridDim.y);
}

template <typename Traits, int kRows, int kLogMaxSplits, bool kEvenHeadDim>
__global__ void fwd_combine_kernel(const __grid_constant__ FwdParams params) {
  FLASH_NAMESPACE::combine_attn_seqk_parallel<Traits, kRows, kLogMaxSplits, kEvenHeadDim>(params);
}

template <typename Traits>
unsigned fwd_grid(const FwdParams& params) {
  const long long num_m_blocks = (params.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  const long long blocks = num_m_blocks * params.b * params.h;
  if (blocks > 0x7fffffffLL) {
    throw std::runtime_error("batch * nheads * row blocks of seqlen_q is " +
                             std::to_string(blocks) + ", more than a CUDA grid holds (2^31 - 1)");
  }
  return static_cast<unsigned>(blocks);
}

template <typename Traits, typename Kernel>
void allow_shared_memory(Kernel kernel) {
  // Above 48 KB a kernel has to ask, once per device; asking again is cheap.
  if constexpr (Traits::kSmemSize > 48 * 1024) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        Traits::kSmemSize));
  }
}

template <typename Traits, bool kCausal, bool kEvenHeadDim>
void launch_fwd_whole(FwdParams& params, cudaStream_t stream) {
  auto kernel = &fwd_kernel<Traits, kCausal, kEvenHeadDim>;
  allow_shared_memory<Traits>(kernel);
  kernel<<<fwd_grid<Traits>(params), Traits::kNThreads, Traits::kSmemSize, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Traits, bool kCausal, bool kEvenHeadDim>
void launch_fwd_split(FwdParams& params, cudaStream_t stream) {
  auto kernel = &fwd_split_kernel<Traits, kCausal, kEvenHeadDim>;
  allow_shared_memory<Traits>(kernel);
  const dim3 grid(fwd_grid<Traits>(params), params.num_splits);
  kernel<<<grid, Traits::kNThreads, Traits::kSmemSize, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();

  // 128 threads read 512 floats at a time; few rows per CTA give the most CTAs.
  constexpr int kRows = Traits::kHeadDim % 128 == 0 ? 4 : (Traits::kHeadDim % 64 == 0 ? 8 : 16);
  const long long rows = static_cast<long long>(params.b) * params.h * params.seqlen_q;
  const auto combine_grid = static_cast<unsigned>((rows + kRows - 1) / kRows);
  // Upstream's kernel is compiled for a largest number of splits; three of them are enough here.
  auto combine = params.num_splits <= 4    ? &fwd_combine_kernel<Traits, kRows, 2, kEvenHeadDim>
                 : params.num_splits <= 16 ? &fwd_combine_kernel<Traits, kRows, 4, kEvenHeadDim>
                                           : &fwd_combine_kernel<Traits, kRows, 7, kEvenHeadDim>;
  combine<<<combine_grid, Traits::kNThreads, 0, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps, bool kCausal,
          bool kEvenHeadDim>
void launch_fwd_variant(FwdParams& params, cudaStream_t stream) {
  using Traits = FwdTraits<Element, kHeadDim, kBlockM, kBlockN, kWarps>;
  static_assert(kFitsEveryDevice<Traits>);
#ifndef FLASH_ATTENTION_DETERMINISTIC
  if (params.num_splits > 1) {
    // The combine kernel is written for four warps, and few rows are what splitting is for.
    using SplitTraits = FwdTraits<Element, kHeadDim, 64, kBlockN, 4>;
    return launch_fwd_split<SplitTraits, kCausal, kEvenHeadDim>(params, stream);
  }
#endif
  launch_fwd_whole<Traits, kCausal, kEvenHeadDim>(params, stream);
}

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps>
void launch_fwd(FwdParams& params, cudaStream_t stream) {
  const bool even = params.d == kHeadDim;
  auto launch =
      params.is_causal
          ? (even ? &launch_fwd_variant<Element, kHeadDim, kBlockM, kBlockN, kWarps, true, true>
                  : &launch_fwd_variant<Element, kHeadDim, kBlockM, kBlockN, kWarps, true, false>)
          : (even ? &launch_fwd_variant<Element, kHeadDim, kBlockM, kBlockN, kWarps, false, true>
                  : &launch_fwd_variant<Element, kHeadDim, kBlockM, kBlockN, kWarps, false, false>);
  launch(params, stream);
}

}  // namespace fad
