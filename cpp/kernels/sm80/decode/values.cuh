// Probabilities and P V from scores that are known, the second kernel of the path scores-first
// (scores_first.h): a CTA takes 32 columns of one split of a row block. All maxima are known, so
// warps compute the probabilities of several blocks of keys at the same time; only P V, in one
// warp, and the row sums, in another, go from block to block, in the tree's order and with the
// tree's functions: the bits are those of the kernels that compute scores on the way. The last CTA
// of a row block and its columns to end its split merges all of them.
#pragma once

#include <type_traits>

#include "few_rows_copy.cuh"
#include "few_rows_fragments.cuh"
#include "named_barrier.h"
#include "scores_first.h"
#include "sm80/row_group.cuh"
#include "tree/row_end.h"
#include "tree/softmax_steps.h"
#include "tree/split_state.h"

namespace fad {

// This thread's part of 8 rows and some columns: row lane / 4, two of each eight columns. The
// tensor core has 8 more rows, whose probabilities are 0.
template <int kTiles>
struct ValuesState {
  float row_max = -INFINITY;
  float row_sum = 0.f;
  float acc[kTiles][4] = {};
};
constexpr int kValueTiles = kValueColumns / 8;

// All warps have done their part of a chunk, each in a loop of its own.
template <typename Traits>
__device__ __forceinline__ void chunk_done() {
  named_barrier_sync(1, Traits::kThreads);
}

// Blocks of values on their way to shared memory, for the warp that copies. Chunks are counted from
// the last keys down, and so are the blocks of a chunk.
template <typename Traits>
struct ValuesCopy {
  using Chunk = cute::uint128_t;

  char* smem;
  KvHead values;
  PageTable table;
  int n_min, n_max, seqlen_k;
  int64_t lane_from;              // a lane copies 16 bytes of one row of each eight keys: where in
  int lane_to;                    // memory and in a block
  bool has_columns, all_columns;  // in the head dim: this lane's, the CTA's
  const char* looked_up;          // where the 16 rows start that this lane looked up

  __device__ __forceinline__ ValuesCopy(const FwdParams& params, const SequenceInfo& info,
                                        const RowGroup& rows, int first_column, char* smem)
      : smem(smem),
        values(kv_head(params, info, rows.bidb, rows.bidh / params.h_h_k_ratio, params.v_ptr,
                       params.v_batch_stride, params.v_row_stride, params.v_head_stride)),
        table{Traits::kPaged ? params.block_table + rows.bidb * params.block_table_batch_stride
                             : nullptr,
              params.page_block_size},
        n_min(rows.n_min),
        n_max(rows.n_max),
        seqlen_k(rows.seqlen_k) {
    const int lane = threadIdx.x % 32;
    const int column = first_column + lane % 4 * 8;
    lane_from = lane / 4 * values.row_bytes + column * 2;
    lane_to = slot_offset<kValueColumns>(lane / 4, lane % 4);
    has_columns = column < params.d;
    all_columns = first_column + kValueColumns <= params.d;
    look_up(0);
  }

  // The pages of a chunk, if there are pages: 16 rows to a lane. Called one chunk before the copy,
  // as page numbers are loads. Entries of the table past the last key may hold anything, and are
  // not read.
  __device__ __forceinline__ void look_up(int chunk) {
    const int lane = threadIdx.x % 32;
    const int n_block = n_max - 1 - chunk * Traits::kChunk - lane / 4;
    const int key = n_block * kKeysPerBlock + lane % 4 * 16;
    looked_up = values.data;
    if (Traits::kPaged && lane / 4 < Traits::kChunk && n_block >= n_min && key < seqlen_k) {
      const int2 place = table.find(key);
      looked_up += place.x * values.page_bytes + place.y * values.row_bytes;
    }
  }

  // Starts the copy of a chunk, whose pages are looked up, and looks up those of the next.
  __device__ __forceinline__ void start(int chunk) {
    const int stage = chunk % Traits::kValueChunks * Traits::kChunk;
    const int last_block = n_max - 1 - chunk * Traits::kChunk;
#pragma unroll 1
    for (int i = 0; i < Traits::kChunk; ++i) {
      if (last_block - i >= n_min) {
        copy(smem + (stage + i) * Traits::kValueBytes, i, last_block - i);
      }
    }
    cute::cp_async_fence();
    look_up(chunk + 1);
  }

 private:
  // The rows of each 16 keys of a block, from this lane's of the first eight on. All lanes call.
  __device__ __forceinline__ const char* sixteen(int of_chunk, int n_block, int keys16) const {
    if (Traits::kPaged) {
      const auto start = reinterpret_cast<unsigned long long>(looked_up);
      return reinterpret_cast<const char*>(__shfl_sync(0xffffffff, start, of_chunk * 4 + keys16)) +
             lane_from;
    }
    return values.data +
           (static_cast<int64_t>(n_block) * kKeysPerBlock + 16 * keys16) * values.row_bytes +
           lane_from;
  }

  // Keys past the last and columns from d on are zeros.
  __device__ __forceinline__ void copy(char* block, int of_chunk, int n_block) const {
    Chunk* const to = reinterpret_cast<Chunk*>(block + lane_to);
    // Eight rows further, the swizzle of the rows is the same.
    if (all_columns && (n_block + 1) * kKeysPerBlock <= seqlen_k) {
#pragma unroll
      for (int keys16 = 0; keys16 < 4; ++keys16) {
        const char* const from = sixteen(of_chunk, n_block, keys16);
        copy_chunk(from, to[keys16 * 2 * kValueColumns]);
        copy_chunk(from + 8 * values.row_bytes, to[(keys16 * 2 + 1) * kValueColumns]);
      }
      return;
    }
#pragma unroll 1
    for (int keys16 = 0; keys16 < 4; ++keys16) {
      const char* const from = sixteen(of_chunk, n_block, keys16);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int key = n_block * kKeysPerBlock + keys16 * 16 + eight * 8 + threadIdx.x % 32 / 4;
        const bool inside = has_columns && key < seqlen_k;
        const char* const source = inside ? from + eight * 8 * values.row_bytes : values.data;
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>::copy(*reinterpret_cast<const Chunk*>(source),
                                                           to[(keys16 * 2 + eight) * kValueColumns],
                                                           inside);
      }
    }
  }

  __device__ __forceinline__ static void copy_chunk(const char* from, Chunk& to) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL<Chunk>::copy(*reinterpret_cast<const Chunk*>(from), to);
  }
};

// Probabilities of a block in shared memory.
struct ProbsBlock {
  float4* probs;    // (16 keys, lanes), to be summed up: four keys of a row to a lane
  uint2* operands;  // the same as the tensor cores take them
  float2* steps;    // (rows): what brings the block before to the new maximum, and this maximum

  template <typename Traits>
  __device__ __forceinline__ static ProbsBlock of(char* smem, int chunk, int of_chunk) {
    const int slot = chunk % Traits::kProbsChunks * Traits::kChunk + of_chunk;
    char* const at = smem + Traits::kProbs + slot * Traits::kProbsBytes;
    return {reinterpret_cast<float4*>(at), reinterpret_cast<uint2*>(at + kScoreFloats * 4),
            reinterpret_cast<float2*>(at + kScoreFloats * 6)};
  }
};

// What a warp reads to compute the probabilities of one block of a chunk: its scores, and the
// maxima of all blocks of the chunk.
template <typename Traits>
struct ChunkScores {
  float4 scores[4];
  float maxima[Traits::kChunk];

  // first: the row block's first block; n_block: the first of the chunk, so the last of its keys.
  __device__ __forceinline__ void read(const ScoresFirst& from, int64_t first, int n_block,
                                       int n_min, int of_chunk) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Traits::kChunk; ++i) {
      maxima[i] = n_block - i >= n_min
                      ? __ldcg(from.maxima + (first + n_block - i) * kScoreRows + lane / 4)
                      : -INFINITY;
    }
    if (n_block - of_chunk >= n_min) {
      const float* const block = from.scores + (first + n_block - of_chunk) * kScoreFloats;
#pragma unroll
      for (int keys16 = 0; keys16 < 4; ++keys16) {
        scores[keys16] = __ldcg(reinterpret_cast<const float4*>(block) + keys16 * 32 + lane);
      }
    }
  }
};

// The warps that compute probabilities, each of one block of every chunk: of_chunk.
template <typename Traits>
__device__ __forceinline__ void compute_probs(const FwdParams& params, const RowGroup& rows,
                                              int cta, int of_chunk, char* smem) {
  using Element = typename Traits::Element;
  const int lane = threadIdx.x % 32;
  const float scale = params.scale_softmax_log2;
  const int64_t first = static_cast<int64_t>(cta) * params.scores.blocks;
  ChunkScores<Traits> next;
  next.read(params.scores, first, rows.n_max - 1, rows.n_min, of_chunk);
  float row_max = -INFINITY;
  int chunk = 0;
#pragma unroll 1
  for (int n_block = rows.n_max - 1; n_block >= rows.n_min; n_block -= Traits::kChunk, ++chunk) {
    const ChunkScores<Traits> now = next;
    next.read(params.scores, first, n_block - Traits::kChunk, rows.n_min, of_chunk);
    float old_max = row_max;
    float new_max = row_max;
#pragma unroll
    for (int i = 0; i < Traits::kChunk; ++i) {
      old_max = i == of_chunk ? row_max : old_max;
      row_max = fmaxf(row_max, now.maxima[i]);
      new_max = i == of_chunk ? row_max : new_max;
    }
    if (n_block - of_chunk >= rows.n_min) {
      const ProbsBlock to = ProbsBlock::of<Traits>(smem, chunk, of_chunk);
      const bool empty = new_max == -INFINITY;
      const float max_scaled = empty ? 0.f : scaled_max(new_max, scale);
      if (lane % 4 == 0) {
        to.steps[lane / 4] =
            make_float2(rescale_factor(old_max, empty ? 0.f : new_max, scale), new_max);
      }
#pragma unroll
      for (int keys16 = 0; keys16 < 4; ++keys16) {
        const float4 four = now.scores[keys16];
        const float4 probs = make_float4(
            scaled_exp2(four.x, scale, max_scaled), scaled_exp2(four.y, scale, max_scaled),
            scaled_exp2(four.z, scale, max_scaled), scaled_exp2(four.w, scale, max_scaled));
        cutlass::Array<Element, 4> rounded;
        rounded[0] = static_cast<Element>(probs.x);
        rounded[1] = static_cast<Element>(probs.y);
        rounded[2] = static_cast<Element>(probs.z);
        rounded[3] = static_cast<Element>(probs.w);
        to.probs[keys16 * 32 + lane] = probs;
        to.operands[keys16 * 32 + lane] = reinterpret_cast<const uint2&>(rounded);
      }
    }
    chunk_done<Traits>();
  }
}

// The warp that copies values and sums up rows. The sum of a row is that of four threads, until the
// end.
template <typename Traits>
__device__ __forceinline__ void copy_and_sum(ValuesCopy<Traits> copies, char* smem) {
  const int lane = threadIdx.x % 32;
  float row_max = -INFINITY;
  float row_sum = 0.f;
#pragma unroll 1
  for (int ahead = 0; ahead < Traits::kValueChunks - 1; ++ahead) {
    copies.start(ahead);
  }
  int chunk = 0;
#pragma unroll 1
  for (int n_block = copies.n_max - 1; n_block >= copies.n_min;
       n_block -= Traits::kChunk, ++chunk) {
    cute::cp_async_wait<Traits::kValueChunks - 2>();
    // After this barrier the chunk's values and probabilities are there, and the chunk before has
    // been read: its memory is free.
    chunk_done<Traits>();
    copies.start(chunk + Traits::kValueChunks - 1);
#pragma unroll
    for (int i = 0; i < Traits::kChunk; ++i) {
      if (n_block - i >= copies.n_min) {
        const ProbsBlock from = ProbsBlock::of<Traits>(smem, chunk, i);
        const float2 step = from.steps[lane / 4];
        row_max = step.y;
        row_sum = rescaled_sum(row_sum, step.x);
#pragma unroll
        for (int keys16 = 0; keys16 < 4; ++keys16) {
          const float4 probs = from.probs[keys16 * 32 + lane];
          row_sum = __fadd_rn(row_sum, probs.x);
          row_sum = __fadd_rn(row_sum, probs.y);
          row_sum = __fadd_rn(row_sum, probs.z);
          row_sum = __fadd_rn(row_sum, probs.w);
        }
      }
    }
  }
  row_sum += __shfl_xor_sync(0xffffffff, row_sum, 2);
  row_sum += __shfl_xor_sync(0xffffffff, row_sum, 1);
  if (lane % 4 == 0) {
    reinterpret_cast<float2*>(smem + Traits::kEnd)[lane / 4] = make_float2(row_max, row_sum);
  }
}

// Probabilities and values of 32 keys, as the tensor cores take them.
template <typename Traits>
struct HalfBlock {
  uint2 p[2];
  uint32_t v[kValueTiles][4];

  // values: of these keys; lane_at: where in them the row lies that this lane loads, by tile.
  __device__ __forceinline__ void load(const char* values, const int (&lane_at)[kValueTiles],
                                       const uint2* operands) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      p[i] = operands[i * 32];
    }
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      load_transposed(values + lane_at[tile], v[tile]);
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[kValueTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t rows[4] = {p[i].x, 0, p[i].y, 0};
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        mma<typename Traits::Element>(acc[tile], rows, v[tile][i * 2], v[tile][i * 2 + 1]);
      }
    }
  }
};

// The warp that multiplies. What it waits for is the chain of tensor core instructions: operands of
// the next 32 keys are loaded before those of this one are used.
template <typename Traits>
__device__ __forceinline__ void multiply_blocks(char* smem, int n_min, int n_max,
                                                ValuesState<kValueTiles>& state) {
  const int lane = threadIdx.x % 32;
  int lane_at[kValueTiles];
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
    lane_at[tile] = slot_offset<kValueColumns>(lane, tile);
  }
  const auto multiply_chunk = [&](int chunk, auto whole, int count) {
    const char* const values =
        smem + chunk % Traits::kValueChunks * Traits::kChunk * Traits::kValueBytes;
    HalfBlock<Traits> halves[2];
    float factor = 1.f;
    const auto load = [&](int half) {
      const ProbsBlock probs = ProbsBlock::of<Traits>(smem, chunk, half / 2);
      halves[half % 2].load(values + half * Traits::kValueBytes / 2, lane_at,
                            probs.operands + half % 2 * 64 + lane);
      factor = half % 2 == 0 ? probs.steps[lane / 4].x : factor;
    };
    load(0);
#pragma unroll
    for (int i = 0; i < Traits::kChunk; ++i) {
      if (!whole && i >= count) {
        break;
      }
      load(2 * i + 1);
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        state.acc[tile][0] = rescaled_acc(state.acc[tile][0], factor);
        state.acc[tile][1] = rescaled_acc(state.acc[tile][1], factor);
      }
      halves[0].multiply(state.acc);
      if (i + 1 < Traits::kChunk) {  // past the last block: loaded, not used
        load(2 * i + 2);
      }
      halves[1].multiply(state.acc);
    }
  };
  int chunk = 0;
#pragma unroll 1
  for (int n_block = n_max - 1; n_block >= n_min; n_block -= Traits::kChunk, ++chunk) {
    const int count = n_block - n_min + 1;
    chunk_done<Traits>();
    if (count >= Traits::kChunk) {
      multiply_chunk(chunk, std::true_type{}, Traits::kChunk);
    } else {
      multiply_chunk(chunk, std::false_type{}, count);
    }
  }
}

// Writes a part, as threads hold it.
__device__ __forceinline__ void write_values_part(const ScoresFirst& to, int64_t part,
                                                  const ValuesState<kValueTiles>& state) {
  const int lane = threadIdx.x % 32;
  float2* const acc = reinterpret_cast<float2*>(to.acc + part * kPartFloats) + lane;
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
    acc[tile * 32] = make_float2(state.acc[tile][0], state.acc[tile][1]);
  }
  if (lane % 4 == 0) {
    to.state[part * kScoreRows + lane / 4] = make_float2(state.row_max, state.row_sum);
  }
}

// Whether this is the last warp (of a CTA each) of num_splits that gets here. Counters were set to
// 0 by the kernel before, so that a launch that was aborted leaves nothing behind.
__device__ __forceinline__ bool arrives_last(unsigned* counter, int num_splits) {
  __threadfence();  // each lane's part before the arrival
  __syncwarp();
  unsigned before = 0;
  if (threadIdx.x % 32 == 0) {
    before = atomicAdd(counter, 1u);
  }
  return __shfl_sync(0xffffffff, before, 0) + 1 == static_cast<unsigned>(num_splits);
}

// Merges eight columns of the parts of the splits that hold a row's visible keys, last to first.
// first_part: of split 0; room: in shared memory, Traits::kMergeBytes for this warp.
template <typename Traits>
__device__ __forceinline__ void merge_parts(const FwdParams& params, const SplitRange& of,
                                            int64_t first_part, int tile, char* room,
                                            ValuesState<1>& state) {
  using Chunk = cute::uint128_t;
  constexpr int kAhead = Traits::kMergedAtOnce;
  const int lane = threadIdx.x % 32;
  float2* const values = reinterpret_cast<float2*>(room);  // (parts, lanes)
  float2* const states = values + kAhead * 32;             // (parts, rows)
  const auto copy = [](const float2* from, float2* to) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL<Chunk>::copy(*reinterpret_cast<const Chunk*>(from),
                                                 *reinterpret_cast<Chunk*>(to));
  };
  // All lanes go through the same splits, each merges those of its row.
  const int first = __reduce_min_sync(0xffffffff, of.first);
  const int last = __reduce_max_sync(0xffffffff, of.last);
  for (int begin = last; begin >= first; begin -= kAhead) {
    const int count = min(kAhead, begin - first + 1);
    const int64_t part = first_part + begin;
    for (int i = lane / 16; i < count; i += 2) {
      const int at = lane % 16 * 2;
      copy(reinterpret_cast<const float2*>(params.scores.acc + (part - i) * kPartFloats) +
               tile * 32 + at,
           values + i * 32 + at);
    }
    for (int i = lane / 4; i < count; i += 8) {
      const int at = lane % 4 * 2;
      copy(params.scores.state + (part - i) * kScoreRows + at, states + i * kScoreRows + at);
    }
    cute::cp_async_fence();
    cute::cp_async_wait<0>();
    __syncwarp();  // all lanes' copies are there
                   // Without branches: factors of one part are computed beside those of another.
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const int split = begin - i;
      const float2 value = values[i * 32 + lane];
      float2 merged = states[i * kScoreRows + lane / 4];
      const float2 part_state = merged;
      const MergeWeights weights =
          merge_state(state.row_max, state.row_sum, merged.x, merged.y, params.scale_softmax_log2);
      const float left = merge_value(state.acc[0][0], weights.later, value.x, weights.earlier);
      const float right = merge_value(state.acc[0][1], weights.later, value.y, weights.earlier);
      const bool is_first = split == of.last;
      const bool is_seen = split >= of.first && split <= of.last;
      const auto pick = [&](float before, float alone, float both) {
        return is_first ? alone : is_seen ? both : before;
      };
      state.acc[0][0] = pick(state.acc[0][0], value.x, left);
      state.acc[0][1] = pick(state.acc[0][1], value.y, right);
      state.row_max = pick(state.row_max, part_state.x, merged.x);
      state.row_sum = pick(state.row_sum, part_state.y, merged.y);
    }
    __syncwarp();  // all lanes have read the room
  }
}

// Output and, with the first columns, log-sum-exp.
template <typename Element, int kTiles>
__device__ __forceinline__ void write_values_rows(const FwdParams& params, const SequenceInfo& info,
                                                  const RowGroup& rows, int first_column,
                                                  const ValuesState<kTiles>& state) {
  const int lane = threadIdx.x % 32;
  const int row = lane / 4;
  if (row >= rows.count) {
    return;
  }
  const int bidh = rows.head(row);
  const int token = rows.token(row);
  float row_max = state.row_max, row_sum = state.row_sum;
  if (first_column == 0 && lane % 4 == 0) {
    write_row_max(params, info, rows.bidb, bidh, token, row_max, row_sum);
  }
  const float weight = merge_sink(params, bidh, row_max, row_sum);
  const float inverse = inverse_sum(row_sum);
  Element* const out = out_row<Element>(params, info, rows.bidb, bidh, token);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = first_column + tile * 8 + lane % 4 * 2;
    if (column < params.d) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        write_out(params, out + column + i,
                  normalised(rescaled_acc(state.acc[tile][i], weight), inverse));
      }
    }
  }
  if (first_column == 0 && lane % 4 == 0) {
    write_lse(params, info, rows.bidb, bidh, token, row_max, row_sum);
  }
}

// blockIdx: row block and columns, split. CTAs of one row block are neighbours: they read the same
// scores, and pieces of the same rows of values.
template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kCtas) void values_kernel(
    const __grid_constant__ FwdParams params) {
  using Element = typename Traits::Element;
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

  ValuesState<kValueTiles> state;
  const int warp = threadIdx.x / 32;
  if (sees_keys) {
    if (warp == 0) {
      multiply_blocks<Traits>(smem, rows.n_min, rows.n_max, state);
    } else if (warp == 1) {
      copy_and_sum(ValuesCopy<Traits>(params, info, rows, first_column, smem), smem);
    } else {
      compute_probs<Traits>(params, rows, cta, warp - 2, smem);
    }
    __syncthreads();
    const float2 end = reinterpret_cast<const float2*>(smem + Traits::kEnd)[threadIdx.x % 32 / 4];
    state.row_max = end.x;
    state.row_sum = end.y;
  }

  if (params.num_splits == 1) {
    if (warp == 0) {
      write_values_rows<Element>(params, info, rows, first_column, state);
    }
    return;
  }
  const int64_t first_part = static_cast<int64_t>(blockIdx.x) * params.num_splits;
  bool is_last = false;
  if (warp == 0) {
    if (sees_keys) {
      write_values_part(params.scores, first_part + blockIdx.y, state);
    }
    is_last = arrives_last(params.scores.arrivals + blockIdx.x, params.num_splits);
  }
  if (!__syncthreads_or(is_last) || warp >= kValueTiles) {
    return;
  }
  __threadfence();  // the arrivals before the reads
  const int row = threadIdx.x % 32 / 4;
  const SplitRange visible = row < rows.count ? visible_splits(params, info, rows.token(row))
                                              : SplitRange{params.num_splits, -1};
  ValuesState<1> merged;
  merge_parts<Traits>(params, visible, first_part, warp, smem + warp * Traits::kMergeBytes, merged);
  write_values_rows<Element>(params, info, rows, first_column + warp * 8, merged);
}

}  // namespace fad
