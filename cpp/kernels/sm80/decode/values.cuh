// Probabilities and P V from scores that are known, the second kernel of the path scores-first
// (scores_first.h): a CTA takes 32 columns of one split of one or two row blocks. All maxima are
// known, so warps compute the probabilities of several blocks of keys at the same time; only P V,
// in one warp, and the row sums, in another, go from block to block, in the tree's order and with
// the tree's functions: the bits are those of the kernels that compute scores on the way. The last
// CTA of a row block and its columns to end its split merges all of them.
#pragma once

#include <type_traits>

#include "few_rows_copy.cuh"
#include "few_rows_fragments.cuh"
#include "named_barrier.h"
#include "scores_first.h"
#include "sm80/kernel_order.h"
#include "sm80/row_group.cuh"
#include "tree/row_end.h"
#include "tree/softmax_steps.h"
#include "tree/split_state.h"

namespace fad {

// This thread's part of a row block and some columns: row lane / 4, two of each eight columns.
template <int kTiles>
struct ValuesState {
  float row_max = -INFINITY;
  float row_sum = 0.f;
  float acc[kTiles][2] = {};
};
constexpr int kValueTiles = kValueColumns / 8;

// The same of one or two row blocks, as the tensor core has it. Without a second one the rows there
// have probabilities 0.
using ValuesAcc = float[kValueTiles][4];

// The row blocks of a CTA, as the scores kernel counts them: from the last one down.
struct RowBlocks {
  int first, count;

  // One past the last is the last: its rows are computed, and not written.
  __device__ __forceinline__ int number(int which) const { return first - min(which, count - 1); }
};

// Waits until all warps have done their part of a chunk; each calls it from its own loop.
template <typename Traits>
__device__ __forceinline__ void chunk_done() {
  named_barrier_sync(1, Traits::kThreads);
}

// One block of values of each chunk on its way to shared memory, for the warps (one for each row
// block of the CTA) that copy it. Chunks are counted from the last keys down, and so are the blocks
// of a chunk.
template <typename Traits>
struct ValuesCopy {
  using Chunk = cute::uint128_t;
  static constexpr int kSixteens = kKeysPerBlock / 16 / Traits::kRowBlocks;  // to a warp

  char* smem;     // where this warp's keys go in the first chunk's shared memory
  int of_chunk;   // the block
  int first_key;  // of this warp in a block
  int n_block;    // that is copied next, ...
  int stage = 0;  // and to which place
  KvHead values;
  PageTable table;
  int n_min, seqlen_k;
  // A lane copies 16 bytes of one row of each eight keys: where in memory, counted from values.data
  // or, where there are pages, from the page's row; and where in a block.
  int64_t lane_from;
  int lane_to;
  bool has_columns, all_columns;  // in the head dim: this lane's, the CTA's
  const char* looked_up;          // where the 16 rows start that this lane looked up

  __device__ __forceinline__ ValuesCopy(const FwdParams& params, const SequenceInfo& info,
                                        const RowGroup& rows, int first_column, int of_chunk,
                                        int sharer, char* smem)
      : of_chunk(of_chunk),
        first_key(sharer * kSixteens * 16),
        n_block(rows.n_max - 1 - of_chunk),
        values(kv_head(params, info, rows.bidb, rows.bidh / params.h_h_k_ratio, params.v_ptr,
                       params.v_batch_stride, params.v_row_stride, params.v_head_stride)),
        table{Traits::kPaged ? params.block_table + rows.bidb * params.block_table_batch_stride
                             : nullptr,
              params.page_block_size},
        n_min(rows.n_min),
        seqlen_k(rows.seqlen_k) {
    const int lane = threadIdx.x % 32;
    const int column = first_column + lane % 4 * 8;
    this->smem = smem + of_chunk * Traits::kValueBytes + first_key * kValueColumns * 2;
    const int64_t first_row =
        Traits::kPaged ? 0 : static_cast<int64_t>(n_block) * kKeysPerBlock + first_key;
    lane_from = (first_row + lane / 4) * values.row_bytes + column * 2;
    lane_to = slot_offset<kValueColumns>(lane / 4, lane % 4);
    has_columns = column < params.d;
    all_columns = first_column + kValueColumns <= params.d;
    look_up();
  }

  // Starts the copy of the next chunk's block.
  __device__ __forceinline__ void start() {
    if (n_block >= n_min) {
      copy(smem + stage * (Traits::kChunk * Traits::kValueBytes) + lane_to);
    }
    cute::cp_async_fence();
    stage = stage + 1 < Traits::kValueChunks ? stage + 1 : 0;
    n_block -= Traits::kChunk;
    if (!Traits::kPaged) {
      lane_from -= Traits::kChunk * kKeysPerBlock * values.row_bytes;
    }
    look_up();
  }

 private:
  // The pages of the block copied next, if there are pages: 16 rows to a lane. One chunk before the
  // copy, as page numbers are loads. Entries of the table past the last key may hold anything, and
  // are not read.
  __device__ __forceinline__ void look_up() {
    const int key = n_block * kKeysPerBlock + first_key + threadIdx.x % kSixteens * 16;
    looked_up = values.data;
    if (Traits::kPaged && n_block >= n_min && key < seqlen_k) {
      const int2 place = table.find(key);
      looked_up += place.x * values.page_bytes + place.y * values.row_bytes;
    }
  }

  // The rows of each 16 keys of the warp, from this lane's of the first eight on. All lanes call.
  __device__ __forceinline__ const char* sixteen(int keys16) const {
    if (Traits::kPaged) {
      const auto start = reinterpret_cast<unsigned long long>(looked_up);
      return reinterpret_cast<const char*>(__shfl_sync(0xffffffff, start, keys16)) + lane_from;
    }
    return values.data + lane_from + 16 * keys16 * values.row_bytes;
  }

  // Keys past the last and columns from d on are zeros.
  __device__ __forceinline__ void copy(char* lane_to) const {
    Chunk* const to = reinterpret_cast<Chunk*>(lane_to);
    // Eight rows further, the swizzle of the rows is the same.
    if (all_columns && (n_block + 1) * kKeysPerBlock <= seqlen_k) {
#pragma unroll
      for (int keys16 = 0; keys16 < kSixteens; ++keys16) {
        const char* const from = sixteen(keys16);
        copy_chunk(from, to[keys16 * 2 * kValueColumns]);
        copy_chunk(from + 8 * values.row_bytes, to[(keys16 * 2 + 1) * kValueColumns]);
      }
      return;
    }
#pragma unroll 1
    for (int keys16 = 0; keys16 < kSixteens; ++keys16) {
      const char* const from = sixteen(keys16);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int key =
            n_block * kKeysPerBlock + first_key + keys16 * 16 + eight * 8 + threadIdx.x % 32 / 4;
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

// Probabilities of a row block and a block of keys in shared memory.
struct ProbsBlock {
  float4* probs;  // (16 keys, lanes), to be summed up: four keys of a row to a lane
  // (16 keys, two, lanes): the same as the tensor cores take them, two keys to a word. Words of a
  // row block go to registers of their own among those of an instruction.
  uint32_t* operands;
  float2* steps;  // (rows): what brings the block before to the new maximum, and this maximum

  template <typename Traits>
  __device__ __forceinline__ static ProbsBlock of(char* smem, int chunk, int of_chunk, int which) {
    const int slot =
        (chunk % Traits::kProbsChunks * Traits::kChunk + of_chunk) * Traits::kRowBlocks + which;
    char* const at = smem + Traits::kProbs + slot * Traits::kProbsBytes;
    return {reinterpret_cast<float4*>(at), reinterpret_cast<uint32_t*>(at + kScoreFloats * 4),
            reinterpret_cast<float2*>(at + kScoreFloats * 6)};
  }
};

// What a warp reads to compute the probabilities of one block of a chunk: its scores, and the
// maxima of all blocks of the chunk.
template <typename Traits>
struct ChunkScores {
  float4 scores[4];
  float maxima[Traits::kChunk];
};

// The walk of such a warp through the scores of a row block.
template <typename Traits>
struct ScoresWalk {
  const float4* scores;  // of the warp's block of the chunk read next: this lane's
  const float* maxima;   // of the chunk's first block: of this lane's row

  // first: of the row block.
  __device__ __forceinline__ ScoresWalk(const ScoresFirst& from, int64_t first, int n_max,
                                        int of_chunk) {
    const int lane = threadIdx.x % 32;
    const int64_t block = first + n_max - 1;
    scores =
        reinterpret_cast<const float4*>(from.scores + (block - of_chunk) * kScoreFloats) + lane;
    maxima = from.maxima + block * kScoreRows + lane / 4;
  }

  // blocks: from the chunk's first to the first of the split.
  __device__ __forceinline__ ChunkScores<Traits> next(int of_chunk, int blocks) {
    ChunkScores<Traits> read;
#pragma unroll
    for (int i = 0; i < Traits::kChunk; ++i) {
      read.maxima[i] = i < blocks ? __ldcg(maxima - i * kScoreRows) : -INFINITY;
    }
    if (of_chunk < blocks) {
#pragma unroll
      for (int keys16 = 0; keys16 < 4; ++keys16) {
        read.scores[keys16] = __ldcg(scores + keys16 * 32);
      }
    }
    scores -= Traits::kChunk * (kScoreFloats / 4);
    maxima -= Traits::kChunk * kScoreRows;
    return read;
  }
};

// The warps that copy values and compute probabilities, each of one block of every chunk and one
// row block. Scores are read two chunks ahead: they come from L2.
template <typename Traits>
__device__ __forceinline__ void compute_probs(const FwdParams& params, const RowGroup& rows,
                                              int row_block, int which, ValuesCopy<Traits> copies,
                                              char* smem) {
  using Element = typename Traits::Element;
  const int lane = threadIdx.x % 32;
  const int of_chunk = copies.of_chunk;
  const float scale = params.scale_softmax_log2;
#pragma unroll 1
  for (int ahead = 0; ahead < Traits::kValueChunks - 1; ++ahead) {
    copies.start();
  }
  ScoresWalk<Traits> walk(params.scores, static_cast<int64_t>(row_block) * params.scores.blocks,
                          rows.n_max, of_chunk);
  int blocks = rows.n_max - rows.n_min;  // that are left
  wait_for_kernel_before();
  ChunkScores<Traits> even = walk.next(of_chunk, blocks);
  ChunkScores<Traits> odd = walk.next(of_chunk, blocks - Traits::kChunk);
  float row_max = -INFINITY;
  int chunk = 0;
  const auto compute_chunk = [&](ChunkScores<Traits>& now) {
    float old_max = row_max;
    float new_max = row_max;
#pragma unroll
    for (int i = 0; i < Traits::kChunk; ++i) {
      old_max = i == of_chunk ? row_max : old_max;
      row_max = fmaxf(row_max, now.maxima[i]);
      new_max = i == of_chunk ? row_max : new_max;
    }
    if (of_chunk < blocks) {
      const ProbsBlock to = ProbsBlock::of<Traits>(smem, chunk, of_chunk, which);
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
        const uint2 words = reinterpret_cast<const uint2&>(rounded);
        to.operands[keys16 * 64 + lane] = words.x;
        to.operands[keys16 * 64 + 32 + lane] = words.y;
      }
    }
    now = walk.next(of_chunk, blocks - 2 * Traits::kChunk);
    cute::cp_async_wait<Traits::kValueChunks - 2>();
    // After this barrier the chunk's values and probabilities are there, and the chunk before has
    // been read: its memory is free.
    chunk_done<Traits>();
    copies.start();
    blocks -= Traits::kChunk;
    ++chunk;
  };
  // One after the other: a copy of scores from one place to another would wait for them.
#pragma unroll 1
  while (blocks > 0) {
    compute_chunk(even);
    if (blocks > 0) {
      compute_chunk(odd);
    }
  }
}

// The warp that sums up the rows of a row block. The sum of a row is that of four threads, until
// the end.
template <typename Traits>
__device__ __forceinline__ void sum_rows(char* smem, int which, int n_min, int n_max) {
  const int lane = threadIdx.x % 32;
  float row_max = -INFINITY;
  float row_sum = 0.f;
  int chunk = 0;
#pragma unroll 1
  for (int n_block = n_max - 1; n_block >= n_min; n_block -= Traits::kChunk, ++chunk) {
    chunk_done<Traits>();
#pragma unroll
    for (int i = 0; i < Traits::kChunk; ++i) {
      if (n_block - i >= n_min) {
        const ProbsBlock from = ProbsBlock::of<Traits>(smem, chunk, i, which);
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
    reinterpret_cast<float2*>(smem + Traits::kEnd)[which * kScoreRows + lane / 4] =
        make_float2(row_max, row_sum);
  }
}

// Probabilities and values of 32 keys, as the tensor cores take them.
template <typename Traits>
struct HalfBlock {
  uint32_t p[2][4];  // by 16 keys: rows of both row blocks, and the next 8 keys of both
  uint32_t v[kValueTiles][4];

  // values: of these keys; lane_at: where in them the row lies that this lane loads, by tile.
  __device__ __forceinline__ void load_values(const char* values,
                                              const int (&lane_at)[kValueTiles]) {
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      load_transposed(values + lane_at[tile], v[tile]);
    }
  }

  __device__ __forceinline__ void load_probs(int which, const uint32_t* operands) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i / 2][i % 2 * 2 + which] = operands[i * 32];
    }
  }

  __device__ __forceinline__ void multiply(ValuesAcc& acc) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      constexpr bool kOne = Traits::kRowBlocks == 1;
      const uint32_t rows[4] = {p[i][0], kOne ? 0 : p[i][1], p[i][2], kOne ? 0 : p[i][3]};
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        mma<typename Traits::Element>(acc[tile], rows, v[tile][i * 2], v[tile][i * 2 + 1]);
      }
    }
  }
};

// The warp that multiplies. What it waits for is the chain of tensor core instructions: operands of
// the next 32 keys are loaded before those of this one are used, from one chunk to the next too.
template <typename Traits>
__device__ __forceinline__ void multiply_blocks(char* smem, int blocks, ValuesAcc& acc) {
  constexpr int kChunk = Traits::kChunk;
  const int lane = threadIdx.x % 32;
  int lane_at[kValueTiles];
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
    lane_at[tile] = slot_offset<kValueColumns>(lane, tile);
  }
  HalfBlock<Traits> halves[2];
  float factors[Traits::kRowBlocks];
  const auto load = [&](int chunk, int half) {
    HalfBlock<Traits>& to = halves[half % 2];
#pragma unroll
    for (int which = 0; which < Traits::kRowBlocks; ++which) {
      const ProbsBlock probs = ProbsBlock::of<Traits>(smem, chunk, half / 2, which);
      to.load_probs(which, probs.operands + half % 2 * 128 + lane);
      factors[which] = half % 2 == 0 ? probs.steps[lane / 4].x : factors[which];
    }
    const char* const values = smem + chunk % Traits::kValueChunks * kChunk * Traits::kValueBytes;
    to.load_values(values + half * Traits::kValueBytes / 2, lane_at);
  };
  // count: of the chunk's blocks; the last chunk may have fewer than others.
  const auto multiply_chunk = [&](int chunk, auto is_last, int count) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (is_last && i >= count) {
        break;
      }
      load(chunk, 2 * i + 1);
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
        for (int two = 0; two < 2 * Traits::kRowBlocks; ++two) {
          acc[tile][two] = rescaled_acc(acc[tile][two], factors[two / 2]);
        }
      }
      halves[0].multiply(acc);
      if (i + 1 < kChunk) {  // past the last block: loaded, not used
        load(chunk, 2 * i + 2);
      } else if (!is_last) {
        chunk_done<Traits>();  // all of this chunk is in registers
        load(chunk + 1, 0);
      }
      halves[1].multiply(acc);
    }
  };
  chunk_done<Traits>();
  load(0, 0);
  int chunk = 0;
#pragma unroll 1
  for (; blocks > kChunk; blocks -= kChunk, ++chunk) {
    multiply_chunk(chunk, std::false_type{}, kChunk);
  }
  multiply_chunk(chunk, std::true_type{}, blocks);
}

// The state of a row block: what the multiplying warp has, and sums that are in shared memory.
template <typename Traits>
__device__ __forceinline__ ValuesState<kValueTiles> values_state(const char* smem, int which,
                                                                 bool sees_keys,
                                                                 const ValuesAcc& acc) {
  ValuesState<kValueTiles> state;
  if (sees_keys) {
    const int row = which * kScoreRows + threadIdx.x % 32 / 4;
    const float2 end = reinterpret_cast<const float2*>(smem + Traits::kEnd)[row];
    state.row_max = end.x;
    state.row_sum = end.y;
  }
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
    state.acc[tile][0] = acc[tile][which * 2];
    state.acc[tile][1] = acc[tile][which * 2 + 1];
  }
  return state;
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
// 0 by the kernel before, so that an aborted launch does not disturb later ones.
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

// Output and, with the first columns, log-sum-exp. row: this lane's.
template <typename Element, int kTiles>
__device__ __forceinline__ void write_values_rows(const FwdParams& params, const SequenceInfo& info,
                                                  const RowGroup& rows, int row, int first_column,
                                                  const ValuesState<kTiles>& state) {
  const int lane = threadIdx.x % 32;
  if (row >= rows.count) {
    return;
  }
  const int bidh = rows.head(row);
  const int token = rows.token(row);
  const float inverse = inverse_sum(state.row_sum);
  Element* const out = out_row<Element>(params, info, rows.bidb, bidh, token);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
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

// blockIdx: row blocks and columns, split. CTAs of the same row blocks are neighbours: they read
// the same scores, and pieces of the same rows of values. It may start before the scores kernel has
// ended: what comes before wait_for_kernel_before reads the call's own tensors only, and writes
// nothing.
template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kCtas) void values_kernel(
    const __grid_constant__ FwdParams params) {
  using Element = typename Traits::Element;
  constexpr int kRowBlocks = Traits::kRowBlocks;
  extern __shared__ char smem[];
  const int columns = params.d_rounded / kValueColumns;
  const int cta = blockIdx.x / columns;
  const int column = blockIdx.x - cta * columns;
  const int first_column = column * kValueColumns;
  const int blocks_of_unit = num_blocks(params.seqlen_q * params.group, kScoreRows);
  const int ctas_of_unit = num_blocks(blocks_of_unit, kRowBlocks);
  const int first_unit = static_cast<int>(params.parts.first_cta) / blocks_of_unit;
  const Place place = group_place(params, Traits::kRows, first_unit * ctas_of_unit + cta);
  const SequenceInfo info(params, place.bidb);
  RowGroup rows(params, info, place, Traits::kRows);
  if (rows.count <= 0) {
    wait_for_kernel_before();
    return;
  }
  rows.limit_to_split(params, blockIdx.y);
  const bool sees_keys = rows.n_max > rows.n_min;
  const int last_block = (cta / ctas_of_unit + 1) * blocks_of_unit - 1;
  const RowBlocks blocks{last_block - place.m_block * kRowBlocks,
                         min(kRowBlocks, blocks_of_unit - place.m_block * kRowBlocks)};

  const int warp = threadIdx.x / 32;
  const int lane_row = threadIdx.x % 32 / 4;
  // Of a row block's first split.
  const auto first_part = [&](int which) {
    return (static_cast<int64_t>(blocks.number(which)) * columns + column) * params.num_splits;
  };
  bool is_last = false;
  if (warp == 0) {
    ValuesAcc acc = {};
    wait_for_kernel_before();
    if (sees_keys) {
      multiply_blocks<Traits>(smem, rows.n_max - rows.n_min, acc);
      chunk_done<Traits>();  // sums, too
    }
#pragma unroll
    for (int which = 0; which < kRowBlocks; ++which) {
      const ValuesState<kValueTiles> state = values_state<Traits>(smem, which, sees_keys, acc);
      if (params.num_splits == 1) {
        write_values_rows<Element>(params, info, rows, which * kScoreRows + lane_row, first_column,
                                   state);
      } else if (sees_keys && which < blocks.count) {
        write_values_part(params.scores, first_part(which) + blockIdx.y, state);
      }
    }
    if (params.num_splits > 1) {
      is_last =
          arrives_last(params.scores.arrivals + blocks.first * columns + column, params.num_splits);
    }
  } else if (!sees_keys) {
    wait_for_kernel_before();
  } else if (warp <= kRowBlocks) {
    wait_for_kernel_before();
    sum_rows<Traits>(smem, warp - 1, rows.n_min, rows.n_max);
    chunk_done<Traits>();
  } else {
    const int which = (warp - 1 - kRowBlocks) / Traits::kChunk;
    const int of_chunk = warp - 1 - kRowBlocks - which * Traits::kChunk;
    const ValuesCopy<Traits> copies(params, info, rows, first_column, of_chunk, which, smem);
    compute_probs<Traits>(params, rows, blocks.number(which), which, copies, smem);
    chunk_done<Traits>();
  }
  if (params.num_splits == 1) {
    return;
  }
  if (!__syncthreads_or(is_last) || warp >= Traits::kMergeWarps) {
    return;
  }
  __threadfence();  // the arrivals before the reads
  const int which = warp / kValueTiles;
  const int tile = warp - which * kValueTiles;
  const int row = which * kScoreRows + lane_row;
  const SplitRange visible = row < rows.count ? visible_splits(params, info, rows.token(row))
                                              : SplitRange{params.num_splits, -1};
  ValuesState<1> merged;
  merge_parts<Traits>(params, visible, first_part(which), tile, smem + warp * Traits::kMergeBytes,
                      merged);
  write_values_rows<Element>(params, info, rows, row, first_column + tile * 8, merged);
}

}  // namespace fad
