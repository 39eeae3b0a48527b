// What hides keys from queries.
#pragma once

namespace fad {

// Further than any key, and far from overflow when positions are added to it.
constexpr int kUnlimited = 1 << 29;

// The masks that upstream's body is compiled for. kLocal: windows, whose edges are numbers (a
// missing one is kUnlimited); kFull and kCausal leave their cost out.
enum class Masking { kFull, kCausal, kLocal };

template <typename Params>
void limit_windows(Params& params) {
  params.window_size_left = params.window_size_left < 0 ? kUnlimited : params.window_size_left;
  params.window_size_right = params.window_size_right < 0 ? kUnlimited : params.window_size_right;
}

}  // namespace fad
