// The Hopper forward for one (dtype, head dim, head dim of V): producer and consumer warpgroups in
// a persistent grid.
#pragma once

#include <algorithm>
#include <numeric>

#include "fwd_consumer.cuh"
#include "fwd_params.h"
#include "fwd_producer.cuh"
#include "fwd_tile.h"
#include "fwd_walk.h"
#include "launch.h"
#include "sm90/tma.h"

namespace fad::sm90 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    fwd_sm90_kernel(const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap k_map,
                    const __grid_constant__ CUtensorMap v_map,
                    const __grid_constant__ FwdCall call) {
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(q_map);
    prefetch_tensor_map(k_map);
    prefetch_tensor_map(v_map);
    constexpr int kConsumerWarps = 4 * T::kWarpgroups;
    for (int i = 0; i < call.blocks; ++i) {
      barrier_init(shared + T::kFull + 8 * i, 1);
      barrier_init(shared + T::kEmpty + 8 * i, kConsumerWarps);
    }
    for (int i = 0; i < T::kWarpgroups; ++i) {
      barrier_init(shared + T::kQFull + 8 * i, 1);
      barrier_init(shared + T::kQEmpty + 8 * i, 4);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared + T::kWorkFull + 8 * i, 1);
      barrier_init(shared + T::kWorkEmpty + 8 * i, kConsumerWarps + 3);
      barrier_init(shared + T::kTailLoaded + 8 * i, 1);
    }
    fence_barrier_init();
    fence_async_proxy();
  }
  __syncthreads();

  if (warpgroup == 0) {
    give_registers<T::kProducerRegisters>();
    if (threadIdx.x / 32 == 0) {
      load_keys<T>(call, q_map, k_map, shared);
    } else if (threadIdx.x == 32) {
      load_queries<T>(call, q_map, shared);
    } else if (threadIdx.x / 32 == 2) {
      clear_tails<T>(shared);
    } else if (threadIdx.x / 32 == 3) {
      load_values<T>(call, v_map, shared);
    }
  } else {
    take_registers<T::kConsumerRegisters>();
    consume<T>(call, shared, warpgroup - 1);
  }
}

// Groups of heads whose tiles are worked on together: K and V of theirs should stay in L2. Under a
// causal mask tiles of the last rows take longest and come first, so that those of the last groups
// start when nothing is left to run beside them. Groups together have tiles for two rounds of CTAs,
// therefore, and the last of them are as many as the others, but for what division leaves: 4 heads
// of 13,868 queries, 3 and then 1, took 1.6 of the time of all 4 together (a model of the order in
// which CTAs take tiles, and what an H100 took).
inline int units_at_a_time(const FwdCall& call, unsigned ctas) {
  constexpr int64_t kL2Bytes = 24 << 20;
  const int64_t all = int64_t{call.batch} * call.units;
  const int64_t head_bytes = int64_t{2} * call.seqlen_k * (call.head_dim + call.head_dim_v);
  const int64_t kv_heads = std::max<int64_t>(1, kL2Bytes / std::max<int64_t>(1, head_bytes));
  const int64_t fit = std::min(kv_heads * (call.heads_per_kv / call.group), all);
  const bool uneven = call.window_right < kUnlimited && call.window_left == kUnlimited &&
                      2 * int64_t{call.seqlen_q} > call.seqlen_k;
  if (!uneven) {
    return static_cast<int>(fit);
  }
  const int64_t rounds = (2 * int64_t{ctas} + call.row_tiles - 1) / std::max(call.row_tiles, 1);
  const int64_t each = std::min(std::max(fit, rounds), all);
  const int64_t times = std::max<int64_t>(1, (2 * all + each) / (2 * each));
  return static_cast<int>((all + times - 1) / times);
}

// ctas: at most T::kCtasPerSm to an SM, and at most the number of tiles.
template <typename T>
void launch_fwd(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  FwdCall call{};
  static_cast<FwdParams&>(call) = params;
  call.window_left = params.window_left < 0 ? kUnlimited : params.window_left;
  call.window_right = params.window_right < 0 ? kUnlimited : params.window_right;
  while (1 << call.group_bits < params.group) {
    ++call.group_bits;
  }
  call.units = params.heads / params.group;
  call.row_tiles = ((params.seqlen_q << call.group_bits) + T::kRows - 1) / T::kRows;
  const bool parts = params.parts.acc != nullptr;
  call.first_tile = params.parts.first_tile;
  call.split_tiles = parts ? params.parts.tiles : call.row_tiles * params.batch * call.units;
  call.tiles = call.split_tiles * (parts ? params.parts.splits : 1);
  call.heads_per_kv = params.heads / params.heads_k;
  const bool splits = params.split_tokens > 0 && params.seqlen_k > params.split_tokens;
  call.split_blocks = splits ? params.split_tokens / T::kKeys : kUnlimited;
  call.part_blocks = parts ? call.split_blocks : kUnlimited;
  call.box_keys = params.block_table == nullptr ? T::kKeys : std::gcd(T::kKeys, params.page_size);
  call.block_boxes = T::kKeys / call.box_keys;
  call.blocks = splits && !parts ? T::kBlocks : T::kBlocksAlone;
  call.units_at_a_time = parts ? 1 : units_at_a_time(call, ctas);

  using Element = typename T::Element;
  const FwdTensors tensors = fwd_tensors(params);
  const CUtensorMap q_map =
      tensor_map<Element>(tensors.q, kGroupRows >> call.group_bits, 1 << call.group_bits);
  const CUtensorMap k_map = tensor_map<Element>(tensors.k, call.box_keys);
  const CUtensorMap v_map = tensor_map<Element>(tensors.v, call.box_keys);

  if (params.tile_counter != nullptr) {
    C10_CUDA_CHECK(cudaMemsetAsync(params.tile_counter, 0, sizeof(unsigned), stream));
  }
  launch<&fwd_sm90_kernel<T>>(dim3(ctas), T::kThreads, T::kSharedBytes, T::kSharedBytes, stream,
                              q_map, k_map, v_map, call);
}

using fp16 = __half;
using bf16 = __nv_bfloat16;

template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM>
void fwd_sm90(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  if (params.softcap > 0.f) {
    launch_fwd<FwdTile<Element, kHeadDim, kHeadDimV, kBlockM, true>>(params, ctas, stream);
  } else {
    launch_fwd<FwdTile<Element, kHeadDim, kHeadDimV, kBlockM, false>>(params, ctas, stream);
  }
}

}  // namespace fad::sm90
