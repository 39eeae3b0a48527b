// The state of the later splits of a warpgroup's rows waits in memory while an earlier split is
// worked on, and is merged with it at its end.
#pragma once

#include "fwd_softmax.cuh"
#include "fwd_tile.h"
#include "fwd_walk.h"
#include "sm90/barrier.h"
#include "tree/split_state.h"

namespace fad::sm90 {

// Two floats, or zeros where `present` is false: predicated, as branches would keep loads from
// running side by side.
__device__ __forceinline__ float2 load_pair_if(bool present, const float* from) {
  float2 pair;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, "
      "0f00000000;\n@p ld.global.v2.f32 {%0, %1}, [%2];\n}\n"
      : "=&f"(pair.x), "=&f"(pair.y)
      : "l"(from), "r"(static_cast<int>(present))
      : "memory");
  return pair;
}

__device__ __forceinline__ void store_pair_if(bool present, float* to, float2 pair) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.f32 [%2], {%0, %1};\n}\n" ::"f"(
          pair.x),
      "f"(pair.y), "l"(to), "r"(static_cast<int>(present))
      : "memory");
}

// The same of four floats, 16 bytes.
__device__ __forceinline__ float4 load_four_if(bool present, const char* from) {
  float4 four;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, "
      "0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n@p ld.global.v4.f32 "
      "{%0, %1, %2, %3}, [%4];\n}\n"
      : "=&f"(four.x), "=&f"(four.y), "=&f"(four.z), "=&f"(four.w)
      : "l"(from), "r"(static_cast<int>(present))
      : "memory");
  return four;
}

__device__ __forceinline__ float4 load_four(const char* from) {
  float4 four;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(from)
               : "memory");
  return four;
}

__device__ __forceinline__ void store_four(char* to, float4 four) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four.x), "f"(four.y),
               "f"(four.z), "f"(four.w)
               : "memory");
}

// Where a thread keeps its part of the state of the later splits while it works on an earlier one:
// in shared memory and, where that is too small, in its rows of the output.
template <typename T>
struct Waiting {
  static constexpr bool kUsesOut = T::kStateColumns < T::kColumns;

  uint32_t shared;      // of this thread's first four values
  float* out[2] = {};   // this thread's part of its two rows; nullptr: no such row
  int out_columns = 0;  // eights of columns that the output's rows have
  RowState rows;
  bool any = false;

  __device__ __forceinline__ float4 load(int column) const {
    if (column < T::kStateColumns) {
      return load_shared(shared + column * 128 * 16);
    }
    const float2 upper = load_pair_if(in_row(0, column), at(0, column));
    const float2 lower = load_pair_if(in_row(1, column), at(1, column));
    return make_float4(upper.x, upper.y, lower.x, lower.y);
  }

  __device__ __forceinline__ void store(int column, float4 value) const {
    if (column < T::kStateColumns) {
      store_shared(shared + column * 128 * 16, value);
    } else {
      store_pair_if(in_row(0, column), at(0, column), make_float2(value.x, value.y));
      store_pair_if(in_row(1, column), at(1, column), make_float2(value.z, value.w));
    }
  }

 private:
  __device__ __forceinline__ bool in_row(int r, int column) const {
    return out[r] != nullptr && column < out_columns;
  }

  __device__ __forceinline__ float* at(int r, int column) const {
    return out[r] + (column - T::kStateColumns) * 8;
  }
};

// The place of that state in the rows of the output where a warp has all of its sixteen rows, as
// wide as the tile's. Only this warp uses them before they get their results, so that it may
// arrange them freely: a lane keeps 16 bytes of an eight of columns, eight lanes a line of 128, the
// warp a line of four rows. If every thread used its own two rows, that would take twice the
// accesses, to four times as many lines.
template <typename T>
struct WaitingLines {
  static constexpr int kCount = T::kColumns - T::kStateColumns;
  static constexpr int kLinesOfRow = T::kHeadDimV / 64;
  static_assert(kCount <= 4 * kLinesOfRow);

  char* first;                    // of this lane
  int64_t four_rows, eight_rows;  // bytes to the row that is so many further
  bool whole;                     // the same in all lanes: whether the warp has such rows

  __device__ __forceinline__ char* at(int i) const {
    const int fours = i / kLinesOfRow;
    return first + fours % 2 * four_rows + fours / 2 * eight_rows + i % kLinesOfRow * 128;
  }
};

// Weights of the thread's two rows.
struct RowWeights {
  MergeWeights upper, lower;
};

__device__ __forceinline__ float4 merged(float4 later, const float* acc,
                                         const RowWeights& weights) {
  const auto [upper, lower] = weights;
  return make_float4(merge_value(later.x, upper.later, acc[0], upper.earlier),
                     merge_value(later.y, upper.later, acc[1], upper.earlier),
                     merge_value(later.z, lower.later, acc[2], lower.earlier),
                     merge_value(later.w, lower.later, acc[3], lower.earlier));
}

// The split in `rows` and `acc` is done: the state of the later splits is merged into it. kKeep:
// the result is kept for the next split, each column stored as soon as it is merged, and `acc` is
// not written. Otherwise `acc` gets the result. This first function merges the maxima and sums.
template <typename T>
__device__ __forceinline__ RowWeights merge_rows(const FwdCall& call, const Waiting<T>& waiting,
                                                 RowState& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] = quad_sum(rows.sum[r]);
  }
  if (!waiting.any) {
    return {};
  }
  return {merge_state(waiting.rows.max[0], waiting.rows.sum[0], rows.max[0], rows.sum[0],
                      call.scale_log2),
          merge_state(waiting.rows.max[1], waiting.rows.sum[1], rows.max[1], rows.sum[1],
                      call.scale_log2)};
}

// Loads run four eights of columns ahead.
template <typename T, bool kKeep>
__device__ __forceinline__ void merge_waiting(const Waiting<T>& waiting, const RowWeights& weights,
                                              float (&acc)[T::kHeadDimV / 2]) {
  if (!waiting.any) {
    if constexpr (kKeep) {
#pragma unroll
      for (int j = 0; j < T::kColumns; ++j) {
        const float* const a = acc + 4 * j;
        waiting.store(j, make_float4(a[0], a[1], a[2], a[3]));
      }
    }
    return;
  }
  constexpr int kAhead = 4;
  static_assert(T::kColumns % kAhead == 0);
  float4 later[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    later[j] = waiting.load(j);
  }
#pragma unroll
  for (int first = 0; first < T::kColumns; first += kAhead) {
    float4 next[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + kAhead < T::kColumns) {
        next[j] = waiting.load(first + kAhead + j);
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      float* const a = acc + 4 * (first + j);
      const float4 value = merged(later[j], a, weights);
      if constexpr (kKeep) {
        waiting.store(first + j, value);
      } else {
        a[0] = value.x;
        a[1] = value.y;
        a[2] = value.z;
        a[3] = value.w;
      }
      later[j] = next[j];
    }
  }
}

// The same where part of the state is kept in lines. The caller has started the loads of the first
// of them into `far`. While they arrive, the state in shared memory is merged, in as many portions
// as `far` is filled.
template <typename T, bool kKeep, int kFar>
__device__ __forceinline__ void merge_lines(const Waiting<T>& waiting, const WaitingLines<T>& lines,
                                            const RowWeights& weights, float4 (&far)[kFar],
                                            float (&acc)[T::kHeadDimV / 2]) {
  constexpr int kCount = WaitingLines<T>::kCount;
  constexpr int kPortions = (kCount + kFar - 1) / kFar;
  constexpr int kNear = T::kStateColumns / kPortions;
  static_assert(kNear * kPortions == T::kStateColumns);
  const auto merge = [&](int column, float4 later) {
    float* const a = acc + 4 * column;
    const float4 value = merged(later, a, weights);
    if constexpr (!kKeep) {
      a[0] = value.x;
      a[1] = value.y;
      a[2] = value.z;
      a[3] = value.w;
    } else if (column < T::kStateColumns) {
      waiting.store(column, value);
    } else {
      store_four(lines.at(column - T::kStateColumns), value);
    }
  };
#pragma unroll
  for (int portion = 0; portion < kPortions; ++portion) {
    float4 next = waiting.load(portion * kNear);
#pragma unroll
    for (int j = 0; j < kNear; ++j) {
      const float4 later = next;
      if (j + 1 < kNear) {
        next = waiting.load(portion * kNear + j + 1);
      }
      merge(portion * kNear + j, later);
    }
    __syncwarp();  // the compiler would wait for `far` first
#pragma unroll
    for (int j = 0; j < kFar; ++j) {
      const int i = portion * kFar + j;
      if (i < kCount) {
        merge(T::kStateColumns + i, far[j]);
        if (i + kFar < kCount) {
          far[j] = load_four(lines.at(i + kFar));
        }
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void keep_in_lines(const Waiting<T>& waiting,
                                              const WaitingLines<T>& lines,
                                              const float (&acc)[T::kHeadDimV / 2]) {
#pragma unroll
  for (int j = 0; j < T::kColumns; ++j) {
    const float4 value = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
    if (j < T::kStateColumns) {
      waiting.store(j, value);
    } else {
      store_four(lines.at(j - T::kStateColumns), value);
    }
  }
}

}  // namespace fad::sm90
