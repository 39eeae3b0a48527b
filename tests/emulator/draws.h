// Random numbers that calls are made of: a seed gives the same call on every machine.
#pragma once

#include <cmath>
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
