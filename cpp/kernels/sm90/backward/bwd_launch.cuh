// The Hopper backward's loop over row blocks for one (dtype, head dim): a CTA to a part of a key
// block, in the order of tickets.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "bwd_consumer.cuh"
#include "bwd_dq.cuh"
#include "bwd_entry.h"
#include "bwd_pair.cuh"
#include "bwd_producer.cuh"
#include "bwd_reducer.cuh"
#include "bwd_tile.h"
#include "bwd_walk.h"
#include "launch.h"
#include "tree/masking.h"

namespace fad::sm90 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_sm90_kernel(const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap k_map,
                    const __grid_constant__ CUtensorMap v_map,
                    const __grid_constant__ CUtensorMap do_map,
                    const __grid_constant__ BwdParams params) {
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(q_map);
    prefetch_tensor_map(k_map);
    prefetch_tensor_map(v_map);
    prefetch_tensor_map(do_map);
    // Where threads read or wrote, each arrives for itself, which is what racecheck follows; where
    // only tensor cores did, one of a warp.
    constexpr int kConsumerWarps = T::kConsumers / 32;
    barrier_init(shared + T::kKFull, 1);
    barrier_init(shared + T::kVFull, 1);
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(shared + T::kQFull + 8 * i, 1);
      barrier_init(shared + T::kQEmpty + 8 * i, T::kConsumers);
      barrier_init(shared + T::kDoFull + 8 * i, 1);
      barrier_init(shared + T::kDoEmpty + 8 * i, kConsumerWarps);
      barrier_init(shared + T::kNumbersFull + 8 * i, 32);
    }
    for (int i = 0; i < T::kDqBuffers; ++i) {
      barrier_init(shared + T::kDqFull + 8 * i, T::kSharesKeys ? 128 : T::kConsumers);
      barrier_init(shared + T::kDqEmpty + 8 * i, 1);
    }
    fence_barrier_init();
    fence_async_proxy();
    const unsigned ticket = atomicAdd(params.tickets, 1u);
    const BwdWork work =
        bwd_work(params, place_of_ticket(params, ticket, num_blocks(params.seqlen_k, T::kKeys)));
    write_work(shared + T::kWorkAt, work);
    store_shared_word(shared + T::kSlotAt, take_slot(params, ticket, work, T::kKeys));
  }
  __syncthreads();
  {
    const BwdWork work = read_bwd_work(shared + T::kWorkAt);
    const auto [begin, end] = row_blocks<T>(params, work);
    if (work.n_block * T::kKeys >= work.seqlen_k || begin >= end) {  // nothing waits for these
      write_zeros<T>(params, work);
      if (threadIdx.x == 0) {
        free_slot(params, load_shared_word(shared + T::kSlotAt));
      }
      return;
    }
  }

  if (warpgroup == 0) {
    give_registers<T::kHelperRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      load_inputs<T>(params, q_map, k_map, v_map, do_map, shared);
    } else if (threadIdx.x == 32) {
      add_dq<T, 0>(params, shared);
    } else if (T::kSharesKeys && threadIdx.x == 64) {
      add_dq<T, 1>(params, shared);
    }
  } else {
    take_registers<T::kConsumerRegisters>();
    if constexpr (!T::kSharesKeys) {
      GradientConsumer<T>(params, shared, warpgroup - 1).run();
    } else if (warpgroup == 1) {
      WeightConsumer<T>(params, shared).run();
    } else {
      ScoreConsumer<T>(params, shared).run();
    }
  }
}

template <typename T>
void launch_bwd_sm90(const BwdParams& call, cudaStream_t stream) {
  BwdParams params = call;
  limit_windows(params);
  using Element = typename T::Element;
  const BwdTensors tensors = bwd_tensors(params);
  const long long ctas = static_cast<long long>(num_blocks(params.seqlen_k, T::kKeys)) * params.b *
                         params.h_k * params.parts.count;
  launch<&bwd_sm90_kernel<T>>(dim3(static_cast<unsigned>(ctas)), T::kThreads, T::kBytes, T::kBytes,
                              stream, tensor_map<Element>(tensors.q, T::kRows),
                              tensor_map<Element>(tensors.k, T::kKeys),
                              tensor_map<Element>(tensors.v, T::kKeys),
                              tensor_map<Element>(tensors.dout, T::kRows), params);
}

using fp16 = __half;
using bf16 = __nv_bfloat16;

}  // namespace fad::sm90
