// Stands in for CUTLASS on the CPU: 16-bit numbers, arrays and tanh.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace cutlass {

struct bfloat16_t {
  uint16_t bits;
  static bfloat16_t from_bits(uint16_t bits) {
    bfloat16_t number;
    number.bits = bits;
    return number;
  }
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits =
        value != value ? 0x7fff : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};

struct half_t {
  _Float16 value;
  static half_t from_bits(uint16_t bits) {
    half_t number;
    std::memcpy(&number.value, &bits, 2);
    return number;
  }
  half_t() = default;
  explicit half_t(float number) : value(static_cast<_Float16>(number)) {}
  explicit operator float() const { return static_cast<float>(value); }
};

template <typename Element, int kSize>
struct Array {
  Element elements[kSize];
  Element& operator[](int i) { return elements[i]; }
};

inline float fast_tanh(float x) { return std::tanh(x); }

}  // namespace cutlass
