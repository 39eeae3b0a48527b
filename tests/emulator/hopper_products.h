// The products of wgmma.h: run.py appends this to it.
#pragma once

#include "hopper.h"

namespace fad::sm90 {

template <typename Element, int kColumns>
struct SharedProduct {
  static void issue(float (&acc)[kColumns / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulator::issue_product({kColumns, is_half<Element>, accumulate, false, {a, true}, {b, true}},
                            acc, nullptr);
  }
};

template <typename Element, int kColumns>
struct SharedPlainProduct {
  static void issue(float (&acc)[kColumns / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulator::issue_product({kColumns, is_half<Element>, accumulate, false, {a, true}, {b, false}},
                            acc, nullptr);
  }
};

template <typename Element, int kColumns, Contiguous kAlong>
struct RegisterProduct {
  static void issue(float (&acc)[kColumns / 2], const uint32_t* a, uint64_t b, bool accumulate) {
    emulator::issue_product(
        {kColumns, is_half<Element>, accumulate, true, {}, {b, kAlong == Contiguous::kK}}, acc, a);
  }
};

}  // namespace fad::sm90
