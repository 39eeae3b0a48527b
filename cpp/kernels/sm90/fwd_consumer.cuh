// The warpgroups that compute: each owns 64 rows of the tile. Scores of a block are computed while
// the values of the block before are added; the softmax runs in steps of 64 keys, last to first,
// with the functions that every other kernel uses, and in their order.
#pragma once

#include <cmath>
#include <type_traits>

#include "../tree/softmax_steps.h"
#include "../tree/split_state.h"
#include "barrier.h"
#include "fragment.h"
#include "fwd_tile.h"
#include "fwd_walk.h"
#include "wgmma.h"

namespace fad::sm90 {

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four threads that share a row, in the order of upstream's Allreduce<4>.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 1));
}

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
}

// The running softmax of the thread's two rows.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
};

// What one block does to it, for each step of T::kStep keys: factors of what is there already, and
// the scaled maximum to take scores against.
template <int kSteps>
struct StepScales {
  float factor[kSteps][2], max_scaled[kSteps][2];
};

// Step 0 is the last T::kStep keys of the block.
template <typename T>
__device__ __forceinline__ constexpr int first_score(int step) {
  return (T::kSteps - 1 - step) * (T::kStep / 2);
}

template <typename T>
__device__ __forceinline__ void find_maxima(const FwdCall& call,
                                            const float (&scores)[T::kKeys / 2], RowState& rows,
                                            StepScales<T::kSteps>& scales) {
  float maxima[T::kSteps][2];
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Two chains: a maximum has no order.
      const float* const s = scores + first_score<T>(step) + 2 * r;
      float a = fmaxf(s[0], s[1]);
      float b = fmaxf(s[T::kStep / 4], s[T::kStep / 4 + 1]);
#pragma unroll
      for (int j = 4; j < T::kStep / 4; j += 4) {
        a = fmaxf(a, fmaxf(s[j], s[j + 1]));
        b = fmaxf(b, fmaxf(s[T::kStep / 4 + j], s[T::kStep / 4 + j + 1]));
      }
      maxima[step][r] = fmaxf(a, b);
    }
  }
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima[step][r] = quad_max(maxima[step][r]);
    }
  }
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = rows.max[r];
      if constexpr (T::kLazy) {
        const float growth = __fmul_rn(__fsub_rn(maxima[step][r], before), call.scale_log2);
        // The first one counts whatever the scale's sign.
        rows.max[r] = before == -INFINITY || growth > kLazyGrowth ? maxima[step][r] : before;
      } else {
        rows.max[r] = fmaxf(before, maxima[step][r]);
      }
      const float now = rows.max[r] == -INFINITY ? 0.f : rows.max[r];
      scales.factor[step][r] = rescale_factor(before, now, call.scale_log2);
      scales.max_scaled[step][r] = scaled_max(now, call.scale_log2);
    }
  }
}

// Scores of one step become their exponentials, and are added to the rows' sums.
template <typename T>
__device__ __forceinline__ void exponentiate_step(const FwdCall& call, int step,
                                                  float (&scores)[T::kKeys / 2], RowState& rows,
                                                  const StepScales<T::kSteps>& scales) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] = rescaled_sum(rows.sum[r], scales.factor[step][r]);
  }
#pragma unroll
  for (int j = 0; j < T::kStep / 2; ++j) {
    const int r = j / 2 % 2;
    float& s = scores[first_score<T>(step) + j];
    s = scaled_exp2(s, call.scale_log2, scales.max_scaled[step][r]);
    rows.sum[r] = __fadd_rn(rows.sum[r], s);
  }
}

template <typename T>
__device__ __forceinline__ void exponentiate(const FwdCall& call, float (&scores)[T::kKeys / 2],
                                             RowState& rows, const StepScales<T::kSteps>& scales) {
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step) {
    exponentiate_step<T>(call, step, scores, rows, scales);
  }
}

template <int kCount>
__device__ __forceinline__ void rescale(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (__any_sync(~0u, factor[r] != 1.f)) {
#pragma unroll
      for (int j = 2 * r; j < kCount; j += 4) {
        acc[j] = rescaled_acc(acc[j], factor[r]);
        acc[j + 1] = rescaled_acc(acc[j + 1], factor[r]);
      }
    }
  }
}

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
  static constexpr int kLinesOfRow = T::kHeadDim / 64;
  static_assert(kCount <= 4 * kLinesOfRow);

  char* first;        // of this lane
  int64_t four_rows;  // bytes
  bool whole;         // the same in all lanes: whether the warp has such rows

  __device__ __forceinline__ char* at(int i) const {
    return first + i / kLinesOfRow * four_rows + i % kLinesOfRow * 128;
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
                                              float (&acc)[T::kHeadDim / 2]) {
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
                                            float (&acc)[T::kHeadDim / 2]) {
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
                                              const float (&acc)[T::kHeadDim / 2]) {
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

// The first sixteens of columns of Q as operands in registers: of each, a thread's two rows and two
// pairs of columns. Boxes are swizzled as wgmma.h says.
template <typename T>
using QueryWords = uint32_t[T::kRegisterQueries > 0 ? 4 * T::kRegisterQueries : 1];

template <typename T>
__device__ __forceinline__ void load_query_words(uint32_t queries, int thread,
                                                 QueryWords<T>& words) {
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  const uint32_t at = queries + row * kBoxRowBytes + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < T::kRegisterQueries; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit = (i % 4 * 2 + half) ^ (row % 8);
      const uint32_t pair = at + i / 4 * T::kQBoxBytes + unit * 16;
      words[4 * i + 2 * half] = load_shared_word(pair);
      words[4 * i + 2 * half + 1] = load_shared_word(pair + 8 * kBoxRowBytes);
    }
  }
}

template <typename T>
__device__ __forceinline__ void consume(const FwdCall& call, uint32_t shared, int group) {
  using Element = typename T::Element;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int row_in_group = thread / 32 * 16 + lane / 4;  // and the one 8 below it
  const uint32_t queries = shared + group * T::kQGroupBytes;
  const uint32_t q_full = shared + T::kQFull + 8 * group;
  const uint32_t q_empty = shared + T::kQEmpty + 8 * group;

  float scores[T::kKeys / 2];
  float acc[T::kHeadDim / 2];
  uint32_t weights[T::kKeys / 4];  // exponentials in 16 bit, as an operand
  [[maybe_unused]] QueryWords<T> query_words;
  StepScales<T::kSteps> scales;
  Ring ring;

  const auto wait_full = [&](const Ring& at) {
    barrier_wait(shared + T::kFull + 8 * at.slot, at.parity);
  };
  // The same, and not before these values are there: no arithmetic has 0xffffffff as its result.
  // The compiler may move arithmetic behind a wait, but not behind its operand.
  const auto wait_full_after = [&](const float (&values)[2], const Ring& at) {
    const uint32_t bits = __float_as_uint(values[0]) & __float_as_uint(values[1]);
    barrier_wait(shared + T::kFull + 8 * at.slot, at.parity ^ (bits == 0xffffffffu ? 1u : 0u));
  };
  const auto free_block = [&](const Ring& at) {
    if (lane == 0) {
      barrier_arrive(shared + T::kEmpty + 8 * at.slot);
    }
  };
  const auto free_queries = [&] {
    __syncwarp();  // the other lanes are done with theirs
    if (lane == 0) {
      barrier_arrive(q_empty);
    }
  };
  const auto block_at = [&](const Ring& at) {
    return shared + T::kRingAt + at.slot * T::kBlockBytes;
  };
  // Every warpgroup takes as many turns as the tile has blocks, minus one.
  const auto await_turn = [&] {
    if constexpr (T::kTakesTurns) {
      named_barrier_sync(1 + group, 256);
    }
  };
  const auto end_turn = [&] {
    if constexpr (T::kTakesTurns) {
      named_barrier_arrive(group + 1 == T::kWarpgroups ? 1 : 2 + group, 256);
    }
  };
  if (T::kTakesTurns && group + 1 == T::kWarpgroups) {
    end_turn();
  }
  // Blocks of the ring, and whole steps, that this warpgroup leaves to the others.
  const auto pass = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_full(ring);
      __syncwarp();  // no lane may still wait for a phase that lane 0 lets pass
      free_block(ring);
      ring.advance(call.blocks);
    }
  };
  const auto pass_steps = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      pass(2);
      await_turn();
      end_turn();
    }
  };
  const auto issue_scores = [&](const Ring& at) {
    [[maybe_unused]] const uint64_t q = operand(queries, 16);
    const uint64_t k = operand(block_at(at), 16);
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 16; ++i) {
      const int in_box = i % 4 * kOperandColumns16;
      const uint64_t keys = k + (i / 4 * T::kBoxBytes / 16 + in_box);
      if (i < T::kRegisterQueries) {
        RegisterProduct<Element, T::kKeys, Contiguous::kK>::issue(scores, query_words + 4 * i, keys,
                                                                  i > 0);
      } else {
        const int box = i / 4 - T::kRingBoxes;
        SharedProduct<Element, T::kKeys>::issue(scores, q + (box * T::kQBoxBytes / 16 + in_box),
                                                keys, i > 0);
      }
    }
  };
  const auto issue_values = [&](const Ring& at, int step, bool accumulate) {
    const int first = (T::kSteps - 1 - step) * T::kStep;
    const uint64_t v = operand(block_at(at) + first * kBoxRowBytes, T::kBoxBytes);
#pragma unroll
    for (int i = 0; i < T::kStep / 16; ++i) {
      RegisterProduct<Element, T::kHeadDim>::issue(acc, weights + first / 4 + 4 * i,
                                                   v + i * kOperandRows16, i > 0 || accumulate);
    }
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int j = 0; j < T::kKeys / 4; ++j) {
      weights[j] = packed<Element>(scores[2 * j], scores[2 * j + 1]);
    }
  };

  // Rows of the output are looked up where they are needed: that saves registers in the loop.
  const auto row_of_out = [&](const Work& now, int row) {
    const int64_t first = call.cu_seqlens_q == nullptr ? now.bidb * call.out_batch_stride
                                                       : now.q_row * call.out_row_stride;
    return static_cast<Element*>(call.out) + first + now.bidh * call.out_head_stride +
           row * call.out_row_stride;
  };
  const auto out_row = [&](const Work& now, int r) {
    const int row = now.first_row + group * kGroupRows + row_in_group + 8 * r;
    return row < now.rows ? row_of_out(now, row) : nullptr;
  };
  // The end of the rows of a tile: `acc` is normalised and packed, then stored. Four threads
  // exchange columns, so that each stores eight of them at once.
  using RowWords = uint32_t[2][T::kColumns];
  const auto store_row = [&](Element* row, const uint32_t (&words)[T::kColumns]) {
#pragma unroll
    for (int j = 0; j < T::kColumns; j += 4) {
      const uint4 eight = quad_transpose(words[j], words[j + 1], words[j + 2], words[j + 3]);
      const int column = 8 * (j + lane % 4);
      if (row != nullptr && column < call.head_dim) {
        reinterpret_cast<uint4*>(row)[column / 8] = eight;
      }
    }
  };
  const auto pack_rows = [&](int turn, const RowState& rows, RowWords& words) {
    const float inverse[2] = {inverse_sum(rows.sum[0]), inverse_sum(rows.sum[1])};
#pragma unroll
    for (int j = 0; j < T::kHeadDim / 2; ++j) {
      acc[j] = normalised(acc[j], inverse[j / 2 % 2]);
    }
    if (call.residual != nullptr) {
      const Work now = read_work_by_warp(shared + T::kWorkAt + 32 * (turn & 1));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < T::kColumns; ++j) {
          const float* const a = acc + 4 * j + 2 * r;
          words[r][j] = packed_residual<Element>(a[0], a[1]);
        }
        Element* const out = out_row(now, r);
        store_row(out == nullptr ? nullptr
                                 : static_cast<Element*>(call.residual) +
                                       (out - static_cast<Element*>(call.out)),
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
  };
  const auto end_rows = [&](int turn, const RowState& rows, const RowWords& words) {
    const Work now = read_work_by_warp(shared + T::kWorkAt + 32 * (turn & 1));
    const int64_t lse_at =
        (call.cu_seqlens_q == nullptr ? now.bidb * call.lse_batch_stride : now.q_row) +
        now.bidh * call.lse_head_stride + now.first_row + group * kGroupRows + row_in_group;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Element* const out = out_row(now, r);
      if (lane % 4 == 0 && out != nullptr) {
        call.softmax_lse[lse_at + 8 * r] =
            log_sum_exp(rows.max[r], call.scale, rows.sum[r], INFINITY);
      }
      store_row(out, words[r]);
    }
    if (lane == 0) {
      barrier_arrive(shared + T::kWorkEmpty + 8 * (turn & 1));
    }
  };
  // The end of a tile's rows if they are a part: stored as they are, for the merge kernel.
  const auto store_part = [&](int turn, const RowState& rows) {
    const Work now = read_work_by_warp(shared + T::kWorkAt + 32 * (turn & 1));
    const int row = group * kGroupRows + row_in_group;
    const int unit = now.bidb * call.units + (now.bidh >> call.group_bits);
    const int tile = (unit + 1) * call.row_tiles - 1 - now.first_row / T::kRows - call.first_tile;
    const int64_t part =
        (static_cast<int64_t>(now.split) * call.split_tiles + tile) * call.parts.rows + row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (now.first_row + row + 8 * r < now.rows) {
        if (lane % 4 == 0) {
          call.parts.state[part + 8 * r] = make_float2(rows.max[r], rows.sum[r]);
        }
        float2* const to =
            reinterpret_cast<float2*>(call.parts.acc + (part + 8 * r) * T::kHeadDim) + lane % 4;
#pragma unroll
        for (int j = 0; j < T::kColumns; ++j) {
          to[4 * j] = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
        }
      }
    }
    if (lane == 0) {
      barrier_arrive(shared + T::kWorkEmpty + 8 * (turn & 1));
    }
  };
  // Of the tile before, if its rows end late.
  [[maybe_unused]] RowState ended;
  [[maybe_unused]] RowWords ended_words;

#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const uint32_t work_at = shared + T::kWorkAt + 32 * (turn & 1);
    barrier_wait(shared + T::kWorkFull + 8 * (turn & 1), turn >> 1 & 1);
    const Work work = read_work_by_warp(work_at);
    if (work.first_row < 0) {
      if (T::kEndsLate && turn > 0) {
        end_rows(turn - 1, ended, ended_words);
      }
      return;
    }
    const int first_row = work.first_row + group * kGroupRows;
    const int diagonal = work.seqlen_k - (work.rows >> call.group_bits);
    // Blocks of the tile, and those of this warpgroup's rows.
    const KeyRange tile_blocks = blocks_of_rows<T>(call, work, work.first_row, T::kRows);
    KeyRange own = {0, 0};
    if (first_row < work.rows) {
      own = blocks_of_rows<T>(call, work, first_row, kGroupRows);
    }
    // Keys that all rows of this warp see.
    const int warp_row = first_row + thread / 32 * 16;
    const int first_token = warp_row >> call.group_bits;
    const int last_token = (warp_row + 15) >> call.group_bits;
    const int seen_end = min(work.seqlen_k, first_token + diagonal + 1 + call.window_right);
    const int seen_begin = last_token + diagonal - call.window_left;

    RowState rows;
    Waiting<T> waiting;
    waiting.shared = shared + T::kStateAt + (group * T::kStateColumns * 128 + thread) * 16;
    const auto find_out = [&] {
      if constexpr (Waiting<T>::kUsesOut) {
        const Work now = read_work_by_warp(work_at);
        waiting.out_columns = call.head_dim / 8;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          Element* const row = out_row(now, r);
          waiting.out[r] = row == nullptr ? nullptr : reinterpret_cast<float*>(row) + lane % 4 * 2;
        }
      }
    };
    const auto find_lines = [&] {
      WaitingLines<T> lines{};
      if constexpr (T::kWaitsInLines) {
        const Work now = read_work_by_warp(work_at);
        const int row = now.first_row + group * kGroupRows + thread / 32 * 16;
        lines.whole = __all_sync(~0u, row + 16 <= now.rows && call.head_dim == T::kHeadDim);
        lines.four_rows = 4 * static_cast<int64_t>(sizeof(Element)) * call.out_row_stride;
        lines.first = reinterpret_cast<char*>(row_of_out(now, row + lane / 8)) + lane % 8 * 16;
      }
      return lines;
    };
    // A split is done: the state of the later ones is merged into it and kept with it.
    const auto keep_state = [&](const WaitingLines<T>& lines, RowState& done) {
      const RowWeights weights = merge_rows<T>(call, waiting, done);
      bool kept = false;
      if constexpr (T::kWaitsInLines) {
        if (lines.whole) {
          if (waiting.any) {
            float4 far[T::kFarLoads];
#pragma unroll
            for (int j = 0; j < T::kFarLoads; ++j) {
              far[j] = load_four(lines.at(j));
            }
            merge_lines<T, true>(waiting, lines, weights, far, acc);
          } else {
            keep_in_lines<T>(waiting, lines, acc);
          }
          kept = true;
        }
      }
      if (!kept) {
        find_out();
        merge_waiting<T, true>(waiting, weights, acc);
      }
      waiting.rows = done;
      waiting.any = true;
    };
    const auto hide_keys = [&](int block) {
      if constexpr (T::kSoftcap) {
#pragma unroll
        for (int j = 0; j < T::kKeys / 2; ++j) {
          scores[j] = tanh_approx(__fmul_rn(scores[j], call.softcap));
        }
      }
      const int key = block * T::kKeys;
      if (key + T::kKeys > seen_end || key < seen_begin) {
        const int row = first_row + row_in_group;
        const int column = key + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int position = ((row + 8 * r) >> call.group_bits) + diagonal;
          const int end = min(work.seqlen_k, position + 1 + call.window_right) - column;
          const int begin = position - call.window_left - column;
#pragma unroll
          for (int j = 2 * r; j < T::kKeys / 2; j += 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int at = j / 4 * 8 + i;
              if (at >= end || at < begin) {
                scores[j + i] = -INFINITY;
              }
            }
          }
        }
      }
    };

    if (own.end > own.begin) {
      const int hidden_after = tile_blocks.end - own.end;
      int block = own.end - 1;
      bool empty_acc = true;
      if constexpr (T::kQueriesThroughRing) {
        Ring own_queries = ring;
        int in_block = group * T::kRingBoxes * T::kQBoxBytes;
        if constexpr (T::kRingQueryBlocks > 1) {  // one for each warpgroup
          for (int before = 0; before < group; ++before) {
            own_queries.advance(call.blocks);
          }
          in_block = 0;
        }
        wait_full(own_queries);
        load_query_words<T>(block_at(own_queries) + in_block, thread, query_words);
        // Arriving at a barrier orders loads before what other threads do, not before what the copy
        // engine does: without the fence it overwrote words that were still being read.
        fence_async_proxy();
        pass(T::kRingQueryBlocks);
      }
      if (hidden_after > 0) {
        pass(1);
        pass_steps(hidden_after - 1);
      }
      if constexpr (T::kQueriesInShared) {
        barrier_wait(q_full, turn & 1);
      }
      if constexpr (T::kRegisterQueries > 0 && !T::kQueriesThroughRing) {
        load_query_words<T>(queries, thread, query_words);
      }
      if constexpr (T::kQueriesInRegisters && T::kQueriesInShared) {
        fence_async_proxy();  // as above
        free_queries();
      }
      wait_full(ring);
      hold(scores);
      wgmma_fence();
      issue_scores(ring);
      wgmma_commit();
      if (T::kEndsLate && turn > 0) {
        end_rows(turn - 1, ended, ended_words);
      }
      wgmma_wait<0>();
      hold(scores);
      free_block(ring);
      ring.advance(call.blocks);
      hide_keys(block);
      find_maxima<T>(call, scores, rows, scales);
      exponentiate<T>(call, scores, rows, scales);
      pack_weights();
      if (hidden_after > 0) {
        pass(1);
        await_turn();
        end_turn();
      }

      // Scores of `block`, and the values of the block after it. is_new_split: that one was the
      // first of its split.
      // is_second, if state is merged late: the one after that.
      [[maybe_unused]] RowState done;  // the split before, until it is merged
      const auto step = [&](auto is_new_split, auto is_second) {
        constexpr bool kNewSplit = decltype(is_new_split)::value;
        constexpr bool kSecond = decltype(is_second)::value;
        const Ring k_at = ring;
        ring.advance(call.blocks);
        const Ring v_at = ring;
        ring.advance(call.blocks);
        if constexpr (!T::kWaitsLast) {
          wait_full(k_at);
        }
        wait_full(v_at);
        hold(scores);
        hold(acc);
        hold(weights);
        [[maybe_unused]] const float last_factor[2] = {scales.factor[T::kSteps - 1][0],
                                                       scales.factor[T::kSteps - 1][1]};
        await_turn();
        wgmma_fence();
        issue_scores(k_at);
        wgmma_commit();
        if constexpr (kSecond) {
          end_turn();
          keep_state(find_lines(), done);
          // Products that are under way together may not have an accumulator that is read
          // meanwhile: ptxas would serialise them (C7514).
          wgmma_wait<0>();
          hold(scores);
          wgmma_fence();
          issue_values(v_at, 0, false);
          wgmma_commit();
        } else {
          issue_values(v_at, 0, !empty_acc);
          wgmma_commit();
          end_turn();
          wgmma_wait<1>();
          hold(scores);
        }
        free_block(k_at);
        if constexpr (kNewSplit) {
          done = rows;
          rows = RowState{};
        }
        hide_keys(block);
        find_maxima<T>(call, scores, rows, scales);
        if constexpr (T::kSteps == 2) {
          if constexpr (T::kBeforeValues == BeforeValues::kMaxima) {
            wait_full_after(rows.max, v_at);  // already there: this only fixes the order
          } else if constexpr (T::kBeforeValues == BeforeValues::kFirstStep) {
            exponentiate_step<T>(call, 0, scores, rows, scales);
            wait_full_after(rows.sum, v_at);  // likewise
          }
          wgmma_wait<0>();
          hold(acc);
          rescale(acc, last_factor);
          hold(acc);
          wgmma_fence();
          issue_values(v_at, 1, true);
          wgmma_commit();
        }
        [[maybe_unused]] WaitingLines<T> lines{};
        if constexpr (kNewSplit && !T::kMergesLate) {
          lines = find_lines();  // as part of the softmax: the products are under way
        }
        if constexpr (T::kBeforeValues == BeforeValues::kFirstStep) {
          exponentiate_step<T>(call, T::kSteps - 1, scores, rows, scales);
        } else {
          exponentiate<T>(call, scores, rows, scales);
        }
        if constexpr (T::kWaitsLast) {
          wait_full_after(rows.sum, ring);  // the next keys, or the last values
        }
        wgmma_wait<0>();
        hold(acc);
        hold(weights);
        free_block(v_at);
        if constexpr (kNewSplit) {
          pack_weights();  // leaves the registers of the scores to the merge
          if constexpr (!T::kMergesLate) {
            keep_state(lines, done);
          }
          empty_acc = true;
        } else {
          rescale(acc, scales.factor[0]);
          empty_acc = false;
          pack_weights();
        }
      };
      if constexpr (T::kWaitsLast) {
        wait_full(ring);
      }
#pragma unroll 1
      for (;;) {
        const int split_begin = max(own.begin, block / call.split_blocks * call.split_blocks);
#pragma unroll 1
        while (block > split_begin) {
          --block;
          step(std::false_type{}, std::false_type{});
        }
        if (block == own.begin) {
          break;
        }
        --block;
        step(std::true_type{}, std::false_type{});
        if constexpr (T::kMergesLate) {
          if (block > own.begin && block % call.split_blocks != 0) {
            --block;
            step(std::false_type{}, std::true_type{});
          } else {
            keep_state(find_lines(), done);
          }
        }
      }
      if constexpr (!T::kQueriesInRegisters) {
        free_queries();
      }

      const int hidden_before = own.begin - tile_blocks.begin;
      if (hidden_before > 0) {
        pass(1);
        await_turn();
        end_turn();
      }
      const WaitingLines<T> lines = find_lines();
      wait_full(ring);
      hold(acc);
      hold(weights);
      wgmma_fence();
      issue_values(ring, 0, !empty_acc);
      wgmma_commit();
      [[maybe_unused]] float4 far[T::kLastFarLoads];  // the registers of scores and Q are free
      if constexpr (T::kWaitsInLines) {
#pragma unroll
        for (int j = 0; j < T::kLastFarLoads; ++j) {
          far[j] = load_four_if(lines.whole && waiting.any, lines.at(j));
        }
      }
      wgmma_wait<0>();
      hold(acc);
      if constexpr (T::kSteps == 2) {
        rescale(acc, scales.factor[1]);
        hold(acc);
        wgmma_fence();
        issue_values(ring, 1, true);
        wgmma_commit();
        wgmma_wait<0>();
        hold(acc);
      }
      free_block(ring);
      ring.advance(call.blocks);
      if (hidden_before > 0) {
        pass_steps(hidden_before - 1);
        pass(1);
      }
      const RowWeights merge_weights = merge_rows<T>(call, waiting, rows);
      if (waiting.any) {
        bool done = false;
        if constexpr (T::kWaitsInLines) {
          if (lines.whole) {
            merge_lines<T, false>(waiting, lines, merge_weights, far, acc);
            done = true;
          }
        }
        if (!done) {
          find_out();
          merge_waiting<T, false>(waiting, merge_weights, acc);
        }
      }
      __syncwarp();  // the rows of the output are free
    } else {
      if (T::kEndsLate && turn > 0) {
        end_rows(turn - 1, ended, ended_words);
      }
      if (tile_blocks.end > tile_blocks.begin) {
        pass(T::kRingQueryBlocks + 1);
        pass_steps(tile_blocks.end - tile_blocks.begin - 1);
        pass(1);
      }
      if constexpr (T::kQueriesInShared) {
        barrier_wait(q_full, turn & 1);
        free_queries();
      }
#pragma unroll
      for (int j = 0; j < T::kHeadDim / 2; ++j) {
        acc[j] = 0.f;
      }
    }

    if constexpr (T::kEndsLate) {
      pack_rows(turn, rows, ended_words);
      ended = rows;
    } else if (call.parts.acc != nullptr) {
      store_part(turn, rows);
    } else {
      RowWords words;
      pack_rows(turn, rows, words);
      end_rows(turn, rows, words);
    }
  }
}

}  // namespace fad::sm90
