// The end of the rows of a tile: normalised, packed and stored, or stored as a part for the merge
// kernel.
#pragma once

#include "fwd_softmax.cuh"
#include "fwd_tile.h"
#include "fwd_walk.h"
#include "sm90/barrier.h"
#include "sm90/fragment.h"
#include "tree/split_state.h"

namespace fad::sm90 {

template <typename T>
struct RowEnds {
  using Element = typename T::Element;
  using RowWords = uint32_t[2][T::kColumns];  // eights of columns of the thread's two rows

  const FwdCall& call;
  uint32_t shared;
  int group;
  int lane;
  int row_in_group;  // and the one 8 below it

  // A note stays until end or store_part frees it. Rows of the output are looked up where they are
  // needed: that saves registers in the loop.
  __device__ __forceinline__ Work work_of(int turn) const {
    return read_work_by_warp(shared + T::kWorkAt + 32 * (turn & 1));
  }

  // Where a row lies, from the first query of its sequence and the first head of its group.
  __device__ __forceinline__ int64_t offset(int row, int64_t row_stride,
                                            int64_t head_stride) const {
    return (row >> call.group_bits) * row_stride + head_of(row) * head_stride;
  }

  __device__ __forceinline__ int head_of(int row) const {
    return row & ((1 << call.group_bits) - 1);
  }

  __device__ __forceinline__ bool is_row(const Work& work, int row) const {
    return row < work.rows && head_of(row) < call.group;
  }

  __device__ __forceinline__ Element* row_of_out(const Work& work, int row) const {
    const int64_t first = call.cu_seqlens_q == nullptr ? work.bidb * call.out_batch_stride
                                                       : work.q_row * call.out_row_stride;
    return static_cast<Element*>(call.out) + first + work.bidh * call.out_head_stride +
           offset(row, call.out_row_stride, call.out_head_stride);
  }

  __device__ __forceinline__ Element* out_row(const Work& work, int r) const {
    const int row = work.first_row + group * kGroupRows + row_in_group + 8 * r;
    return is_row(work, row) ? row_of_out(work, row) : nullptr;
  }

  // Where softmax_lse of a sequence's first query and a group's first head lies.
  __device__ __forceinline__ int64_t first_lse(const Work& work) const {
    return work.bidh * call.lse_head_stride +
           (call.cu_seqlens_q == nullptr ? work.bidb * call.lse_batch_stride : work.q_row);
  }

  // `acc` becomes the rows' result, which is stored.
  __device__ __forceinline__ void end(int turn, RowState rows,
                                      float (&acc)[T::kHeadDimV / 2]) const {
    if (call.row_max != nullptr) {
      const Work work = work_of(turn);
      float* const first = call.row_max + first_lse(work);
      const int row = work.first_row + group * kGroupRows + row_in_group;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (lane % 4 == 0 && is_row(work, row + 8 * r)) {
          first[offset(row + 8 * r, 1, call.lse_head_stride)] =
              largest_score(rows.max[r], call.scale, rows.sum[r]);
        }
      }
    }
    if (call.sinks != nullptr) {
      const Work work = work_of(turn);
      const int row = work.first_row + row_in_group;  // warpgroups begin with a group's first head
      float weights[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sink = call.sinks[work.bidh + min(head_of(row + 8 * r), call.group - 1)];
        weights[r] = merge_sink(sink, call.scale, call.scale_log2, rows.max[r], rows.sum[r]);
      }
      rescale(acc, weights);
    }
    RowWords words;
    pack(turn, rows, acc, words);
    const Work work = work_of(turn);
    float* const lse = call.softmax_lse + first_lse(work);
    const int row = work.first_row + group * kGroupRows + row_in_group;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Element* const out = out_row(work, r);
      if (lane % 4 == 0 && out != nullptr) {
        lse[offset(row + 8 * r, 1, call.lse_head_stride)] =
            log_sum_exp(rows.max[r], call.scale, rows.sum[r], INFINITY);
      }
      store(out, words[r]);
    }
    free_work(turn);
  }

  __device__ __forceinline__ void store_part(int turn, const RowState& rows,
                                             const float (&acc)[T::kHeadDimV / 2]) const {
    const Work work = work_of(turn);
    const int row = group * kGroupRows + row_in_group;
    const int unit = work.bidb * call.units + work.bidh / call.group;
    const int tile = (unit + 1) * call.row_tiles - 1 - work.first_row / T::kRows - call.first_tile;
    const int64_t first =
        (static_cast<int64_t>(work.split) * call.split_tiles + tile) * call.parts.rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (is_row(work, work.first_row + row + 8 * r)) {
        const int64_t part = first + offset(row + 8 * r, call.group, 1);
        if (lane % 4 == 0) {
          call.parts.state[part] = make_float2(rows.max[r], rows.sum[r]);
        }
        float2* const to =
            reinterpret_cast<float2*>(call.parts.acc + part * T::kHeadDim) + lane % 4;
#pragma unroll
        for (int j = 0; j < T::kColumns; ++j) {
          to[4 * j] = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
        }
      }
    }
    free_work(turn);
  }

 private:
  // Normalised, in 16 bit. What rounding takes from it is stored where it is wanted.
  __device__ __forceinline__ void pack(int turn, const RowState& rows,
                                       float (&acc)[T::kHeadDimV / 2], RowWords& words) const {
    const float inverse[2] = {inverse_sum(rows.sum[0]), inverse_sum(rows.sum[1])};
#pragma unroll
    for (int j = 0; j < T::kHeadDimV / 2; ++j) {
      acc[j] = normalised(acc[j], inverse[j / 2 % 2]);
    }
    if (call.residual != nullptr) {
      const Work work = work_of(turn);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < T::kColumns; ++j) {
          const float* const a = acc + 4 * j + 2 * r;
          words[r][j] = packed_residual<Element>(a[0], a[1]);
        }
        Element* const out = out_row(work, r);
        store(out == nullptr
                  ? nullptr
                  : static_cast<Element*>(call.residual) + (out - static_cast<Element*>(call.out)),
              words[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j) {
        const float* const a = acc + 4 * j + 2 * r;
        words[r][j] = packed<Element>(a[0], a[1]);
      }
    }
  }

  // Four threads exchange columns, so that each stores eight of them at once.
  __device__ __forceinline__ void store(Element* row, const uint32_t (&words)[T::kColumns]) const {
#pragma unroll
    for (int j = 0; j < T::kColumns; j += 4) {
      const uint4 eight = quad_transpose(words[j], words[j + 1], words[j + 2], words[j + 3]);
      const int column = 8 * (j + lane % 4);
      if (row != nullptr && column < call.head_dim_v) {
        reinterpret_cast<uint4*>(row)[column / 8] = eight;
      }
    }
  }

  __device__ __forceinline__ void free_work(int turn) const {
    if (lane == 0) {
      barrier_arrive(shared + T::kWorkEmpty + 8 * (turn & 1));
    }
  }
};

}  // namespace fad::sm90
