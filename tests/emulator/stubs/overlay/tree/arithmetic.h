// Stands in for the header of this name: the same functions without PTX.
#pragma once

#include <cmath>

namespace fad {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log_approx(float x) { return std::log2(x) * 0.693147181f; }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float multiply_keeping_denormals(float x, float y) { return x * y; }
inline float add_keeping_denormals(float x, float y) { return x + y; }

}  // namespace fad
