// What hides keys from queries, as kernel instances know it.
#pragma once

namespace fad {

// kGeneral: windows, ALiBi and softcap; kFull and kCausal leave their cost out.
enum class Masking { kFull, kCausal, kGeneral };

// Further than any key, and far from overflow when positions are added to it.
constexpr int kUnlimited = 1 << 29;

template <typename Params>
void limit_windows(Params& params) {
  params.window_size_left = params.window_size_left < 0 ? kUnlimited : params.window_size_left;
  params.window_size_right = params.window_size_right < 0 ? kUnlimited : params.window_size_right;
}

}  // namespace fad
