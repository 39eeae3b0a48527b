// What calls are made of: a seed gives the same call on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

inline std::mt19937 draw_source;

inline int draw(int low, int high) {
  return low + static_cast<int>(draw_source() % (high - low + 1));
}

template <typename Value>
Value pick(std::initializer_list<Value> values) {
  return values.begin()[draw(0, static_cast<int>(values.size()) - 1)];
}

inline bool chance(int percent) { return draw(1, 100) <= percent; }

inline int about(int length) { return std::max(1, length + draw(-1, 1)); }

// The first place from a pointer on that is a multiple of some bytes.
template <typename Value>
Value* aligned(Value* pointer, std::size_t bytes) {
  return reinterpret_cast<Value*>((reinterpret_cast<uintptr_t>(pointer) + bytes - 1) & -bytes);
}

// Numbers about as attention sees them; NaN where nothing may be read.
template <typename Number>
struct NumbersOf {
  std::vector<Number> data;
  explicit NumbersOf(std::size_t count) : data(count + 16, Number(NAN)) {}
  Number* start() { return aligned(data.data(), 16); }  // as the copy engine wants it
  void fill(std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < first + count; ++i) {
      start()[i] = Number(draw(-1000, 1000) / 500.f);
    }
  }
  float at(std::size_t i) { return static_cast<float>(start()[i]); }
};

// Strides of contiguous tensors. rows_k: of a sequence of keys, or of a page.
template <typename Params>
void set_strides(Params& params, int rows_k) {
  params.q_head_stride = params.o_head_stride = params.d;
  params.q_row_stride = params.o_row_stride = static_cast<int64_t>(params.h) * params.d;
  params.q_batch_stride = params.o_batch_stride = params.q_row_stride * params.seqlen_q;
  params.k_head_stride = params.v_head_stride = params.d;
  params.k_row_stride = params.v_row_stride = static_cast<int64_t>(params.h_k) * params.d;
  params.k_batch_stride = params.v_batch_stride = params.k_row_stride * rows_k;
}

// How scores are scaled, capped and masked. most_right: the widest window behind a query.
template <typename Params>
void draw_scores(Params& params, int head_dim, int most_right) {
  params.scale_softmax = 1.f / std::sqrt(static_cast<float>(head_dim));
  if (chance(20)) {
    params.softcap = params.scale_softmax / 5.f;
    params.scale_softmax = 5.f;
  }
  params.scale_softmax_log2 = params.scale_softmax * 1.44269504f;
  params.window_size_left = chance(25) ? draw(0, 300) : -1;
  params.window_size_right = chance(25) ? draw(0, most_right) : chance(50) ? 0 : -1;
}

// Sinks of query heads, in every third call: none of these draws changes what else a seed gives.
inline std::vector<float> draw_sinks(unsigned seed, int heads) {
  std::mt19937 source(seed);
  std::vector<float> sinks(seed % 3 == 0 ? heads : 0);
  for (float& sink : sinks) {
    const int kind = static_cast<int>(source() % 8);
    sink = kind == 0   ? -INFINITY
           : kind == 1 ? 300.f
                       : static_cast<float>(source() % 1000) / 100.f - 5.f;
  }
  return sinks;
}
