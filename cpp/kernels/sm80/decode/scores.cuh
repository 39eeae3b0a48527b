// Scores of a few rows, the first kernel of the path scores-first (scores_first.h): a warp takes
// one block of 64 keys and all rows, and writes scores as the tensor core gives them to threads,
// ready for the softmax, and each row's maximum.
#pragma once

#include "few_rows_copy.cuh"
#include "few_rows_fragments.cuh"
#include "scores_first.h"
#include "sm80/row_group.cuh"

namespace fad {

// Starts the copy of a block of keys by one warp; rows past the last key and columns from d on are
// zeros.
template <typename Traits>
__device__ __forceinline__ void copy_keys(const KvHead& from, const PageTable& table, int first_key,
                                          int seqlen_k, int d, char* slot) {
  using Chunk = cute::uint128_t;
  constexpr int kChunks = Traits::kHeadDim / 8;
  const int lane = threadIdx.x % 32;
  const bool whole = first_key + kKeysPerBlock <= seqlen_k && d == Traits::kHeadDim;
#pragma unroll
  for (int keys16 = 0; keys16 < kKeysPerBlock; keys16 += 16) {
    const int key = first_key + keys16;
    // Pages hold a multiple of 16. Entries past the last key may hold anything, and are not read.
    const int2 place =
        table.pages != nullptr && key < seqlen_k ? table.find(key) : make_int2(0, key);
    const char* const start = from.data + place.x * from.page_bytes + place.y * from.row_bytes;
    const auto row_of = [&](int i) { return (i * 32 + lane) / kChunks; };
    const auto chunk_of = [&](int i) { return (i * 32 + lane) % kChunks; };
    const auto to = [&](int i) -> Chunk& {
      return *reinterpret_cast<Chunk*>(
          slot + slot_offset<Traits::kHeadDim>(keys16 + row_of(i), chunk_of(i)));
    };
    const auto source = [&](int i) {
      return reinterpret_cast<const Chunk*>(start + row_of(i) * from.row_bytes) + chunk_of(i);
    };
    if (whole) {
#pragma unroll
      for (int i = 0; i < 16 * kChunks / 32; ++i) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<Chunk>::copy(*source(i), to(i));
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 16 * kChunks / 32; ++i) {
        const bool inside = key + row_of(i) < seqlen_k && chunk_of(i) * 8 < d;
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>::copy(
            inside ? *source(i) : *reinterpret_cast<const Chunk*>(from.data), to(i), inside);
      }
    }
  }
}

// Brings a block of values into L2 for the kernel that comes next.
__device__ __forceinline__ void prefetch_values(const KvHead& from, const PageTable& table,
                                                int first_key, int seqlen_k, int d) {
#pragma unroll
  for (int row = threadIdx.x % 32; row < kKeysPerBlock; row += 32) {
    const int key = first_key + row;
    if (key < seqlen_k) {
      const int2 place = table.pages != nullptr ? table.find(key) : make_int2(0, key);
      const char* const start = from.data + place.x * from.page_bytes + place.y * from.row_bytes;
      for (int byte = 0; byte < 2 * d; byte += 128) {
        prefetch_to_l2(start + byte);
      }
    }
  }
}

// q of 16 rows from memory, as the tensor cores take it; columns from d on are zeros. Rows past the
// last are the last: no row's result depends on another row, and theirs are not used.
template <typename Element, int kSteps>
__device__ __forceinline__ void read_queries(const FwdParams& params, const SequenceInfo& info,
                                             const RowGroup& rows, uint32_t (&q)[kSteps][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(lane / 4 + 8 * half, rows.count - 1);
    const Element* const source = query_row<Element>(params, info, rows, row) + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int column = step * 16 + eight * 8;
        q[step][eight * 2 + half] =
            column < params.d ? *reinterpret_cast<const uint32_t*>(source + column) : 0u;
      }
    }
  }
}

// This thread's scores of one of its two rows, and the row's maximum, to memory. block: of the row
// block and the keys.
__device__ __forceinline__ void write_scores(const ScoresFirst& to, int64_t block, int half,
                                             const float (&scores)[8][4]) {
  const int lane = threadIdx.x % 32;
  float4* const at = reinterpret_cast<float4*>(to.scores + block * kScoreFloats) + lane;
  float most = -INFINITY;
#pragma unroll
  for (int tile = 0; tile < 8; tile += 2) {
    const float4 four = make_float4(scores[tile][2 * half], scores[tile][2 * half + 1],
                                    scores[tile + 1][2 * half], scores[tile + 1][2 * half + 1]);
    at[tile / 2 * 32] = four;
    most = fmaxf(most, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
  }
  most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
  most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
  if (lane % 4 == 0) {
    to.maxima[block * kScoreRows + lane / 4] = most;
  }
}

template <typename Traits>
__global__ __launch_bounds__(Traits::kThreads) void scores_kernel(
    const __grid_constant__ FwdParams params) {
  constexpr int kSteps = Traits::kHeadDim / 16;
  extern __shared__ char smem[];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const ScoresFirst& to = params.scores;
  const int rows_of_unit = params.seqlen_q * params.group;
  const int row_blocks = num_blocks(rows_of_unit, kScoreRows);
  const int ctas_of_unit = num_blocks(to.blocks, Traits::kWarps);
  const int unit = blockIdx.x / ctas_of_unit;
  const int first_block = (blockIdx.x - unit * ctas_of_unit) * Traits::kWarps;
  if (first_block == 0) {  // the values kernel counts from 0
    const int count = row_blocks * (Traits::kHeadDim / kValueColumns);
    for (int i = threadIdx.x; i < count; i += Traits::kThreads) {
      to.arrivals[unit * count + i] = 0;
    }
  }

  const int n_block = first_block + warp;
  const int first_cta = unit * row_blocks;  // row blocks of a unit are neighbours
  Place place = group_place(params, kScoreRows, params.parts.first_cta + first_cta);
  const SequenceInfo info(params, place.bidb);
  place.m_block = 0;
  const RowGroup all(params, info, place, rows_of_unit);
  if (all.count <= 0 || n_block < all.n_min || n_block >= all.n_max) {
    return;
  }

  const int head_k = all.bidh / params.h_h_k_ratio;
  const KvHead keys = kv_head(params, info, all.bidb, head_k, params.k_ptr, params.k_batch_stride,
                              params.k_row_stride, params.k_head_stride);
  const PageTable table{params.block_table == nullptr
                            ? nullptr
                            : params.block_table + all.bidb * params.block_table_batch_stride,
                        params.page_block_size};
  char* const slot = smem + warp * Traits::kSlotBytes;
  const int first_key = n_block * kKeysPerBlock;
  copy_keys<Traits>(keys, table, first_key, all.seqlen_k, params.d, slot);
  cute::cp_async_fence();
  if (to.prefetch) {
    const KvHead values = kv_head(params, info, all.bidb, head_k, params.v_ptr,
                                  params.v_batch_stride, params.v_row_stride, params.v_head_stride);
    prefetch_values(values, table, first_key, all.seqlen_k, params.d);
  }

  // Two row blocks at a time, as the tensor core takes them.
#pragma unroll 1
  for (place.m_block = 0; 2 * place.m_block < row_blocks; ++place.m_block) {
    const RowGroup rows(params, info, place, 2 * kScoreRows);
    // A block of keys that none of these rows sees is not read by the values kernel.
    if (rows.count <= 0 || n_block < rows.n_min || n_block >= rows.n_max) {
      continue;
    }
    uint32_t q[kSteps][4];
    read_queries<typename Traits::Element>(params, info, rows, q);
    const ThreadRows mine(params, rows, lane / 4);
    cute::cp_async_wait<0>();
    __syncwarp();  // all lanes' copies are there
    float scores[8][4] = {};
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        uint32_t k[4];
        load_eight_keys<Traits::kHeadDim>(slot, tile * 8, pair, k);
        mma<typename Traits::Element>(scores[tile], q[2 * pair], k[0], k[1]);
        mma<typename Traits::Element>(scores[tile], q[2 * pair + 1], k[2], k[3]);
      }
    }
    finish_scores(params, rows, mine, first_key + lane % 4 * 2, rows.is_cut(first_key), scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row_block = 2 * place.m_block + half;
      if (row_block < row_blocks) {  // they are numbered from the last one down (group_place)
        const int64_t cta = first_cta + row_blocks - 1 - row_block;
        write_scores(to, cta * to.blocks + n_block, half, scores);
      }
    }
  }
}

}  // namespace fad
