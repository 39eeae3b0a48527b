// Random numbers that calls are made of: a seed gives the same call on every machine.
#pragma once

#include <cmath>
#include <initializer_list>
#include <random>

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
