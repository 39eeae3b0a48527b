// Random numbers that calls are made of: a seed gives the same call on every machine.
#pragma once

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
