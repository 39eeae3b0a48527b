// Stands in for CuTe on the CPU: what the kernels for a few rows use of it, and names that other
// headers mention.
#pragma once

#include "../../emulator.h"
#include "../cutlass/fast_math.h"

namespace cute {

struct uint128_t {
  uint64_t low, high;
};

template <typename Chunk>
struct SM80_CP_ASYNC_CACHEGLOBAL {
  static void copy(const Chunk& from, Chunk& to) {
    emulator::start_copy(&from, &to, true, sizeof(Chunk));
  }
};

template <typename Chunk>
struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL {
  static void copy(const Chunk& from, Chunk& to, bool inside) {
    emulator::start_copy(&from, &to, inside, sizeof(Chunk));
  }
};

template <typename Chunk>
using SM80_CP_ASYNC_CACHEALWAYS = SM80_CP_ASYNC_CACHEGLOBAL<Chunk>;
template <typename Chunk>
using SM80_CP_ASYNC_CACHEALWAYS_ZFILL = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Chunk>;

inline void cp_async_fence() { emulator::close_group(); }

template <int kAllowed>
void cp_async_wait() {
  emulator::wait_groups(kAllowed);
}

// Four matrices of 8 rows of 16 bytes; lane i brings the address of row i % 8 of matrix i / 8.
template <bool kTransposed>
struct LoadMatrices {
  static void copy(const uint128_t& from, uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3) {
    emulator::current->exchange.address = &from;
    emulator::meet_warp([](int warp) {
      for (int i = 0; i < 32; ++i) {
        for (int matrix = 0; matrix < 4; ++matrix) {
          const auto element = [&](int row, int column) -> uint32_t {
            return static_cast<const uint16_t*>(
                emulator::lane(warp, matrix * 8 + row).address)[column];
          };
          const int row = i / 4, pair = i % 4 * 2;
          emulator::lane(warp, i).out[matrix] =
              kTransposed ? element(pair, row) | element(pair + 1, row) << 16
                          : element(row, pair) | element(row, pair + 1) << 16;
        }
      }
    });
    const auto& out = emulator::current->exchange.out;
    d0 = out[0];
    d1 = out[1];
    d2 = out[2];
    d3 = out[3];
  }
};
using SM75_U32x4_LDSM_N = LoadMatrices<false>;
using SM75_U16x8_LDSM_T = LoadMatrices<true>;

// 16 x 8 results, 16 products each, added one by one to the old value.
template <typename Element>
struct Mma {
  static float number(uint32_t two, int which) {
    return static_cast<float>(Element::from_bits(static_cast<uint16_t>(two >> 16 * which)));
  }
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                  uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
    auto& mine = emulator::current->exchange;
    mine.a[0] = a0, mine.a[1] = a1, mine.a[2] = a2, mine.a[3] = a3;
    mine.b[0] = b0, mine.b[1] = b1;
    mine.c[0] = c0, mine.c[1] = c1, mine.c[2] = c2, mine.c[3] = c3;
    emulator::meet_warp([](int warp) {
      float a[16][16], b[16][8];
      for (int i = 0; i < 32; ++i) {
        const auto& from = emulator::lane(warp, i);
        const int row = i / 4, k = i % 4 * 2;
        for (int j = 0; j < 2; ++j) {
          a[row][k + j] = number(from.a[0], j);
          a[row + 8][k + j] = number(from.a[1], j);
          a[row][k + 8 + j] = number(from.a[2], j);
          a[row + 8][k + 8 + j] = number(from.a[3], j);
          b[k + j][row] = number(from.b[0], j);
          b[k + 8 + j][row] = number(from.b[1], j);
        }
      }
      for (int i = 0; i < 32; ++i) {
        auto& to = emulator::lane(warp, i);
        for (int j = 0; j < 4; ++j) {
          const int row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
          float sum = to.c[j];
          for (int k = 0; k < 16; ++k) {
            sum += a[row][k] * b[k][column];
          }
          to.d[j] = sum;
        }
      }
    });
    d0 = mine.d[0];
    d1 = mine.d[1];
    d2 = mine.d[2];
    d3 = mine.d[3];
  }
};
using SM80_16x8x16_F32F16F16F32_TN = Mma<cutlass::half_t>;
using SM80_16x8x16_F32BF16BF16F32_TN = Mma<cutlass::bfloat16_t>;

// Named by templates that are not used here.
struct Underscore {};
inline constexpr Underscore _;
template <typename... Any>
void copy(const Any&...);
template <typename... Any>
int make_tensor(const Any&...);
template <typename Any>
void clear(const Any&);
template <int, typename Any>
int size(const Any&);
template <int, typename Any>
int get(const Any&);

}  // namespace cute
