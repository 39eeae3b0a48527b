// Probabilities and P V from scores that are known, the second kernel of the path scores-first
// (scores_first.h): a CTA takes 32 columns of one split of a row block. One warp computes, another
// one copies: what the first has to do for each block of keys is what the call waits for. It walks
// blocks in the tree's order with the tree's functions: the bits are those of the kernels that
// compute scores on the way. The last CTA of a row block and its columns to end its split merges
// all of them.
#pragma once

#include <type_traits>

#include "few_rows_copy.cuh"
#include "few_rows_fragments.cuh"
#include "row_group.cuh"
#include "scores_first.h"
#include "tree/row_end.h"
#include "tree/softmax_steps.h"
#include "tree/split_state.h"

namespace fad {

// This thread's part of 8 rows and 32 columns: row lane / 4, two of each eight columns. The tensor
// core has 8 more rows, whose probabilities are 0. The sum is that of four threads, until quad_sum.
struct ValuesState {
  float row_max = -INFINITY;
  float row_sum = 0.f;
  float acc[kValueColumns / 8][4] = {};

  __device__ __forceinline__ void quad_sum() {
    row_sum += __shfl_xor_sync(0xffffffff, row_sum, 2);
    row_sum += __shfl_xor_sync(0xffffffff, row_sum, 1);
  }
};

// The stages of a CTA: blocks of values, scores and maxima on their way to it, for the warp that
// copies.
template <typename Traits>
struct ValuesStages {
  using Chunk = cute::uint128_t;

  char* smem;
  KvHead values;
  PageTable table;
  int n_min, seqlen_k;
  const char *scores, *maxima;    // this lane's, of block 0
  int64_t lane_from;              // a lane copies 16 bytes of one row of each eight keys: where in
  int lane_to;                    // memory and in a stage
  bool has_columns, all_columns;  // in the head dim: this lane's, the CTA's

  __device__ __forceinline__ ValuesStages(const FwdParams& params, const SequenceInfo& info,
                                          const RowGroup& rows, int cta, int first_column,
                                          char* smem)
      : smem(smem),
        values(kv_head(params, info, rows.bidb, rows.bidh / params.h_h_k_ratio, params.v_ptr,
                       params.v_batch_stride, params.v_row_stride, params.v_head_stride)),
        table{Traits::kPaged ? params.block_table + rows.bidb * params.block_table_batch_stride
                             : nullptr,
              params.page_block_size},
        n_min(rows.n_min),
        seqlen_k(rows.seqlen_k) {
    const int lane = threadIdx.x % 32;
    const int64_t first_block = static_cast<int64_t>(cta) * params.scores.blocks;
    scores = reinterpret_cast<const char*>(params.scores.scores + first_block * kScoreFloats) +
             lane * 16;
    maxima =
        reinterpret_cast<const char*>(params.scores.maxima + first_block * kScoreRows) + lane * 16;
    const int column = first_column + lane % 4 * 8;
    lane_from = lane / 4 * values.row_bytes + column * 2;
    lane_to = slot_offset<kValueColumns>(lane / 4, lane % 4);
    has_columns = column < params.d;
    all_columns = first_column + kValueColumns <= params.d;
  }

  // Where 16 rows of a block start that this lane looks up, if there are pages; some time before
  // the copy, as the page number is a load. Entries of the table past the last key may hold
  // anything, and are not read.
  __device__ __forceinline__ const char* look_up(int n_block) const {
    const int key = n_block * kKeysPerBlock + threadIdx.x % 4 * 16;
    if (!Traits::kPaged || n_block < n_min || key >= seqlen_k) {
      return values.data;
    }
    const int2 place = table.find(key);
    return values.data + place.x * values.page_bytes + place.y * values.row_bytes;
  }

  // The rows of each 16 keys of a block, from this lane's of the first eight on. All lanes call.
  __device__ __forceinline__ const char* sixteen(int n_block, int keys16,
                                                 const char* looked_up) const {
    if (Traits::kPaged) {
      const auto start = reinterpret_cast<unsigned long long>(looked_up);
      return reinterpret_cast<const char*>(__shfl_sync(0xffffffff, start, keys16, 4)) + lane_from;
    }
    return values.data +
           (static_cast<int64_t>(n_block) * kKeysPerBlock + 16 * keys16) * values.row_bytes +
           lane_from;
  }

  // Starts the copy of a block; keys past the last and columns from d on are zeros.
  __device__ __forceinline__ void copy(int stage, int n_block, const char* looked_up) const {
    const int lane = threadIdx.x % 32;
    Chunk* const to = reinterpret_cast<Chunk*>(smem + stage * Traits::kStageBytes + lane_to);
    // Eight rows further, the swizzle of the rows is the same.
    if (all_columns && (n_block + 1) * kKeysPerBlock <= seqlen_k) {
#pragma unroll
      for (int keys16 = 0; keys16 < 4; ++keys16) {
        const char* const from = sixteen(n_block, keys16, looked_up);
        copy_chunk(from, to[keys16 * 2 * kValueColumns]);
        copy_chunk(from + 8 * values.row_bytes, to[(keys16 * 2 + 1) * kValueColumns]);
      }
    } else {
#pragma unroll 1
      for (int keys16 = 0; keys16 < 4; ++keys16) {
        const char* const from = sixteen(n_block, keys16, looked_up);
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          const int key = n_block * kKeysPerBlock + keys16 * 16 + eight * 8 + lane / 4;
          const bool inside = has_columns && key < seqlen_k;
          const char* const source = inside ? from + eight * 8 * values.row_bytes : values.data;
          cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>::copy(
              *reinterpret_cast<const Chunk*>(source), to[(keys16 * 2 + eight) * kValueColumns],
              inside);
        }
      }
    }
    const char* const block = scores + static_cast<int64_t>(n_block) * Traits::kScoreBytes;
    Chunk* const rest =
        reinterpret_cast<Chunk*>(smem + stage * Traits::kStageBytes + Traits::kValueBytes) + lane;
#pragma unroll
    for (int i = 0; i < Traits::kScoreBytes / 512; ++i) {
      copy_chunk(block + i * 512, rest[i * 32]);
    }
    if (lane < Traits::kMaximaBytes / 16) {
      copy_chunk(maxima + static_cast<int64_t>(n_block) * Traits::kMaximaBytes,
                 rest[Traits::kScoreBytes / 16]);
    }
  }

 private:
  __device__ __forceinline__ static void copy_chunk(const char* from, Chunk& to) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL<Chunk>::copy(*reinterpret_cast<const Chunk*>(from), to);
  }
};

// Stages are used in turn.
template <typename Traits>
__device__ __forceinline__ int next_stage(int stage) {
  return stage + 1 == Traits::kStages ? 0 : stage + 1;
}

// The warp that copies. Blocks come from the last one down, all but one of the stages on their way
// at a time. Its barriers are those of add_blocks.
template <typename Traits>
__device__ __forceinline__ void copy_blocks(const ValuesStages<Traits>& stages, int n_min,
                                            int n_max) {
  int coming = n_max - 1;
#pragma unroll 1
  for (int stage = 0; stage < Traits::kStages - 1; ++stage, --coming) {
    if (coming >= n_min) {
      stages.copy(stage, coming, stages.look_up(coming));
    }
    cute::cp_async_fence();
  }
  const char* looked_up = stages.look_up(coming);
  cute::cp_async_wait<Traits::kStages - 2>();
  __syncthreads();
  int free_stage = Traits::kStages - 1;
#pragma unroll 1
  for (int n_block = n_max - 1; n_block > n_min; --n_block, --coming) {
    cute::cp_async_wait<Traits::kStages - 3>();
    __syncthreads();
    if (coming >= n_min) {
      stages.copy(free_stage, coming, looked_up);
    }
    cute::cp_async_fence();
    looked_up = stages.look_up(coming - 1);
    free_stage = next_stage<Traits>(free_stage);
  }
}

// The step of the softmax of one block: maximum and sum of this thread's row, and the factor that
// brings its accumulators to the new maximum. Probabilities come 16 keys at a time.
template <typename Traits>
struct SoftmaxStep {
  float rescale, max_scaled;
  const float4* scores;

  __device__ __forceinline__ void enter(const char* stage, float scale, ValuesState& state) {
    const int lane = threadIdx.x % 32;
    scores = reinterpret_cast<const float4*>(stage + Traits::kValueBytes) + lane;
    const auto* const maxima =
        reinterpret_cast<const float*>(stage + Traits::kValueBytes + Traits::kScoreBytes);
    const float new_max = fmaxf(state.row_max, maxima[lane / 4]);
    const bool empty = new_max == -INFINITY;
    rescale = rescale_factor(state.row_max, empty ? 0.f : new_max, scale);
    max_scaled = empty ? 0.f : scaled_max(new_max, scale);
    state.row_max = new_max;
    state.row_sum = rescaled_sum(state.row_sum, rescale);
  }

  // Of 16 keys, as the tensor cores take them.
  __device__ __forceinline__ void probs(int keys16, float scale, ValuesState& state,
                                        uint32_t (&p)[4]) const {
    const float4 four = scores[keys16 * 32];
    p[0] = pair(four.x, four.y, scale, state);
    p[2] = pair(four.z, four.w, scale, state);
    p[1] = p[3] = 0;
  }

 private:
  __device__ __forceinline__ uint32_t pair(float left, float right, float scale,
                                           ValuesState& state) const {
    const float first = scaled_exp2(left, scale, max_scaled);
    const float second = scaled_exp2(right, scale, max_scaled);
    state.row_sum = __fadd_rn(state.row_sum, first);
    state.row_sum = __fadd_rn(state.row_sum, second);
    cutlass::Array<typename Traits::Element, 2> two;
    two[0] = static_cast<typename Traits::Element>(first);
    two[1] = static_cast<typename Traits::Element>(second);
    return reinterpret_cast<const uint32_t&>(two);
  }
};

// The warp that computes. P V of a block stands beside the probabilities of the next: each is a
// chain, and waits for itself only.
template <typename Traits>
__device__ __forceinline__ void add_blocks(const char* smem, float scale, int n_min, int n_max,
                                           ValuesState& state) {
  constexpr int kTiles = kValueColumns / 8;
  SoftmaxStep<Traits> step;
  uint32_t p[4][4];
  __syncthreads();  // the first block is there
  step.enter(smem, scale, state);
#pragma unroll
  for (int keys16 = 0; keys16 < 4; ++keys16) {
    step.probs(keys16, scale, state, p[keys16]);
  }
  const auto multiply = [&](const char* stage, const char* next, auto has_next) {
    uint32_t v[2][kTiles][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_eight_columns<kValueColumns>(stage, half, tile, v[half][tile]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        state.acc[tile][i] = rescaled_acc(state.acc[tile][i], step.rescale);
      }
    }
    if constexpr (has_next) {
      step.enter(next, scale, state);
    }
#pragma unroll
    for (int keys16 = 0; keys16 < 4; ++keys16) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t (&four)[4] = v[keys16 / 2][tile];
        mma<typename Traits::Element>(state.acc[tile], p[keys16], four[keys16 % 2 * 2],
                                      four[keys16 % 2 * 2 + 1]);
      }
      if constexpr (has_next) {
        step.probs(keys16, scale, state, p[keys16]);
      }
    }
  };
  int stage = 0;
#pragma unroll 1
  for (int n_block = n_max - 1; n_block > n_min; --n_block) {
    const int next = next_stage<Traits>(stage);
    // The next block is there, and this warp has read the block before this one, whose stage is
    // filled again.
    __syncthreads();
    multiply(smem + stage * Traits::kStageBytes, smem + next * Traits::kStageBytes,
             std::true_type{});
    stage = next;
  }
  multiply(smem + stage * Traits::kStageBytes, nullptr, std::false_type{});
  state.quad_sum();
}

// Writes a part, as threads hold it.
__device__ __forceinline__ void write_values_part(const ScoresFirst& to, int64_t part,
                                                  const ValuesState& state) {
  const int lane = threadIdx.x;
  float2* const acc = reinterpret_cast<float2*>(to.acc + part * kPartFloats) + lane;
#pragma unroll
  for (int tile = 0; tile < kValueColumns / 8; ++tile) {
    acc[tile * 32] = make_float2(state.acc[tile][0], state.acc[tile][1]);
  }
  if (lane % 4 == 0) {
    to.state[part * kScoreRows + lane / 4] = make_float2(state.row_max, state.row_sum);
  }
}

// Whether this is the last warp (of a CTA each) of num_splits that gets here. What the others wrote
// before is then there to be read. Counters were set to 0 by the kernel before, so that a launch
// that was aborted leaves nothing behind.
__device__ __forceinline__ bool arrives_last(unsigned* counter, int num_splits) {
  __threadfence();  // each lane's part before the arrival
  __syncwarp();
  unsigned before = 0;
  if (threadIdx.x == 0) {
    before = atomicAdd(counter, 1u);
  }
  before = __shfl_sync(0xffffffff, before, 0);
  __threadfence();  // the arrivals before the reads
  return before + 1 == static_cast<unsigned>(num_splits);
}

// Merges the parts of the splits that hold a row's visible keys, last to first. first_part: of
// split 0.
__device__ __forceinline__ void merge_parts(const FwdParams& params, const SplitRange& of,
                                            int64_t first_part, ValuesState& state) {
  constexpr int kTiles = kValueColumns / 8;
  constexpr int kAhead = 8;
  const int lane = threadIdx.x;
  const ScoresFirst& from = params.scores;
  state = ValuesState();
  // All lanes go through the same splits, each merges those of its row. Parts are read several at a
  // time, and merged one after another.
  const int first = __reduce_min_sync(0xffffffff, of.first);
  const int last = __reduce_max_sync(0xffffffff, of.last);
  for (int begin = last; begin >= first; begin -= kAhead) {
    float2 states[kAhead];
    float2 values[kAhead][kTiles];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int split = begin - ahead;
      if (split >= of.first && split <= of.last) {
        const int64_t part = first_part + split;
        states[ahead] = __ldcg(from.state + part * kScoreRows + lane / 4);
        const auto* const acc =
            reinterpret_cast<const float2*>(from.acc + part * kPartFloats) + lane;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          values[ahead][tile] = __ldcg(acc + tile * 32);
        }
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int split = begin - ahead;
      if (split < of.first || split > of.last) {
        continue;
      }
      if (split == of.last) {
        state.row_max = states[ahead].x;
        state.row_sum = states[ahead].y;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          state.acc[tile][0] = values[ahead][tile].x;
          state.acc[tile][1] = values[ahead][tile].y;
        }
      } else {
        const MergeWeights weights = merge_state(state.row_max, state.row_sum, states[ahead].x,
                                                 states[ahead].y, params.scale_softmax_log2);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          state.acc[tile][0] = merge_value(state.acc[tile][0], weights.later, values[ahead][tile].x,
                                           weights.earlier);
          state.acc[tile][1] = merge_value(state.acc[tile][1], weights.later, values[ahead][tile].y,
                                           weights.earlier);
        }
        state.row_max = states[ahead].x;
        state.row_sum = states[ahead].y;
      }
    }
  }
}

// Output and, from the CTA with the first columns, log-sum-exp.
template <typename Element>
__device__ __forceinline__ void write_values_rows(const FwdParams& params, const SequenceInfo& info,
                                                  const RowGroup& rows, int first_column,
                                                  const ValuesState& state) {
  const int lane = threadIdx.x;
  const int row = lane / 4;
  if (row >= rows.count) {
    return;
  }
  const int bidh = rows.head(row);
  const int token = rows.token(row);
  const float inverse = inverse_sum(state.row_sum);
  Element* const out = out_row<Element>(params, info, rows.bidb, bidh, token);
#pragma unroll
  for (int tile = 0; tile < kValueColumns / 8; ++tile) {
    const int column = first_column + tile * 8 + lane % 4 * 2;
    if (column < params.d) {
      write_out(params, out + column, normalised(state.acc[tile][0], inverse));
      write_out(params, out + column + 1, normalised(state.acc[tile][1], inverse));
    }
  }
  if (first_column == 0 && lane % 4 == 0) {
    write_lse(params, info, rows.bidb, bidh, token, state.row_max, state.row_sum);
  }
}

// blockIdx: row block and columns, split. CTAs of one row block are neighbours: they read the same
// scores, and pieces of the same rows of values.
template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads) void values_kernel(
    const __grid_constant__ FwdParams params) {
  extern __shared__ char smem[];
  const int columns = params.d_rounded / kValueColumns;
  const int cta = blockIdx.x / columns;
  const int first_column = (blockIdx.x - cta * columns) * kValueColumns;
  const Place place = group_place(params, kScoreRows, params.parts.first_cta + cta);
  const SequenceInfo info(params, place.bidb);
  RowGroup rows(params, info, place, kScoreRows);
  if (rows.count <= 0) {
    return;
  }
  rows.limit_to_split(params, blockIdx.y);
  const bool sees_keys = rows.n_max > rows.n_min;

  if (threadIdx.x >= 32) {
    if (sees_keys) {
      const ValuesStages<Traits> stages(params, info, rows, cta, first_column, smem);
      copy_blocks(stages, rows.n_min, rows.n_max);
    }
    return;
  }
  ValuesState state;
  if (sees_keys) {
    add_blocks<Traits>(smem, params.scale_softmax_log2, rows.n_min, rows.n_max, state);
  }

  if (params.num_splits > 1) {
    const int64_t first_part = static_cast<int64_t>(blockIdx.x) * params.num_splits;
    if (sees_keys) {
      write_values_part(params.scores, first_part + blockIdx.y, state);
    }
    if (!arrives_last(params.scores.arrivals + blockIdx.x, params.num_splits)) {
      return;
    }
    const int row = threadIdx.x / 4;
    const SplitRange visible = row < rows.count ? visible_splits(params, info, rows.token(row))
                                                : SplitRange{params.num_splits, -1};
    merge_parts(params, visible, first_part, state);
  }
  write_values_rows<typename Traits::Element>(params, info, rows, first_column, state);
}

}  // namespace fad
