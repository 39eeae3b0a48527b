// Chains of products over k, 16 at a time: by wgmma, through the wrappers of the sm90 family, and
// by mma.sync. Compiled and run by test_wgmma.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/barrier.h"
#include "sm90/wgmma.h"

namespace {

using namespace fad::sm90;

constexpr int kRows = 64;

template <typename Element>
__device__ __forceinline__ uint32_t pair(const Element* at) {
  return *reinterpret_cast<const uint32_t*>(at);
}

template <typename Element>
__device__ __forceinline__ uint32_t pair(Element low, Element high) {
  Element both[2] = {low, high};
  return *reinterpret_cast<const uint32_t*>(both);
}

__device__ __forceinline__ void mma_sync(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_sync(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where element (row, column) of a box of 64 columns lies: 128-byte rows, whose eight units of 16
// bytes are exchanged by the row's number modulo 8.
__device__ __forceinline__ int in_box(int row, int column) {
  return row * 64 + (((column / 8) ^ (row % 8)) * 8 + column % 8);
}

enum class Way { kMmaSync, kShared, kRegisters };  // the last two by wgmma: where a lies

// A warpgroup. c (64, kColumns) += a (64, k) b, with a contiguous along k. b: (kColumns, k), as K
// lies in q k^T; transposed: (k, kColumns), as V lies in p v, for which a lies in registers. k is a
// multiple of 64.
template <typename Element, int kColumns, bool kTransposed, Way kWay>
__global__ void __launch_bounds__(128)
    products(const Element* a, const Element* b, const float* c, float* out, int k) {
  extern __shared__ __align__(1024) char memory[];
  Element* const a_box = reinterpret_cast<Element*>(memory);
  Element* const b_box = a_box + kRows * 64;
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  const int column = lane % 4 * 2;
  const Element* const a_all = a + int64_t{blockIdx.x} * kRows * k;
  const Element* const b_all = b + int64_t{blockIdx.x} * kColumns * k;
  const int64_t at = int64_t{blockIdx.x} * kRows * kColumns;

  float acc[kColumns / 2];
  for (int j = 0; j < kColumns / 2; ++j) {
    acc[j] = c[at + (row + j / 2 % 2 * 8) * kColumns + j / 4 * 8 + column + j % 2];
  }
  for (int first = 0; first < k; first += 64) {
    __syncthreads();
    for (int i = thread; i < kRows * 64; i += 128) {
      a_box[in_box(i / 64, i % 64)] = a_all[i / 64 * k + first + i % 64];
    }
    if constexpr (kTransposed) {  // a box of 64 rows of k for each 64 columns
      for (int i = thread; i < kColumns * 64; i += 128) {
        const int in_k = i / kColumns;
        const int col = i % kColumns;
        b_box[col / 64 * 64 * 64 + in_box(in_k, col % 64)] =
            b_all[int64_t{first + in_k} * kColumns + col];
      }
    } else {
      for (int i = thread; i < kColumns * 64; i += 128) {
        b_box[in_box(i / 64, i % 64)] = b_all[i / 64 * k + first + i % 64];
      }
    }
    fence_async_proxy();
    __syncthreads();
    const auto a_at = [&](int step, int r, int col) {
      return a_box + in_box(row + 8 * r, step * 16 + col + column);
    };
    if constexpr (kWay != Way::kMmaSync) {
      hold(acc);
      uint32_t registers[4][4];
      for (int step = 0; step < 4; ++step) {
        for (int i = 0; i < 4; ++i) {
          registers[step][i] = pair(a_at(step, i % 2, i / 2 * 8));
        }
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if constexpr (kTransposed) {
          const uint64_t operand_b = operand(shared_address(b_box), 64 * kBoxRowBytes);
          RegisterProduct<Element, kColumns>::issue(acc, registers[step],
                                                    operand_b + step * kOperandRows16, true);
        } else if constexpr (kWay == Way::kRegisters) {
          RegisterProduct<Element, kColumns, Contiguous::kK>::issue(
              acc, registers[step], operand(shared_address(b_box), 16) + step * kOperandColumns16,
              true);
        } else {
          SharedProduct<Element, kColumns>::issue(
              acc, operand(shared_address(a_box), 16) + step * kOperandColumns16,
              operand(shared_address(b_box), 16) + step * kOperandColumns16, true);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(acc);
    } else {
      for (int step = 0; step < 4; ++step) {
        uint32_t fragment[4];
        for (int i = 0; i < 4; ++i) {
          fragment[i] = pair(a_at(step, i % 2, i / 2 * 8));
        }
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          const int col = j * 8 + lane / 4;
          uint32_t operands[2];
          for (int i = 0; i < 2; ++i) {
            const int in_k = step * 16 + column + 8 * i;
            if constexpr (kTransposed) {
              const Element* const box = b_box + col / 64 * 64 * 64;
              operands[i] = pair(box[in_box(in_k, col % 64)], box[in_box(in_k + 1, col % 64)]);
            } else {
              operands[i] = pair(b_box + in_box(col, in_k));
            }
          }
          float (&sums)[4] = *reinterpret_cast<float (*)[4]>(acc + 4 * j);
          mma_sync(sums, fragment, operands[0], operands[1], Element{});
        }
      }
    }
  }
  for (int j = 0; j < kColumns / 2; ++j) {
    out[at + (row + j / 2 % 2 * 8) * kColumns + j / 4 * 8 + column + j % 2] = acc[j];
  }
}

template <typename Element, int kColumns, bool kTransposed, Way kWay>
int run(const void* a, const void* b, const float* c, float* out, int k, int count) {
  constexpr int kBoxed = (kColumns + 63) / 64 * 64;  // boxes are whole
  const int shared = (kRows + kBoxed) * 64 * static_cast<int>(sizeof(Element));
  auto* const kernel = products<Element, kColumns, kTransposed, kWay>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<count, 128, shared>>>(static_cast<const Element*>(a), static_cast<const Element*>(b), c,
                                 out, k);
  const cudaError_t launched = cudaGetLastError();
  return static_cast<int>(launched != cudaSuccess ? launched : cudaDeviceSynchronize());
}

using Run = int (*)(const void*, const void*, const float*, float*, int, int);

template <typename Element, Way kWay>
Run find(int columns, bool transposed) {
  if constexpr (kWay != Way::kShared) {
    if (transposed) {
      return columns == 32    ? run<Element, 32, true, kWay>
             : columns == 64  ? run<Element, 64, true, kWay>
             : columns == 96  ? run<Element, 96, true, kWay>
             : columns == 128 ? run<Element, 128, true, kWay>
             : columns == 192 ? run<Element, 192, true, kWay>
                              : run<Element, 256, true, kWay>;
    }
  }
  return columns == 64 ? run<Element, 64, false, kWay> : run<Element, 128, false, kWay>;
}

template <typename Element>
Run find(int columns, bool transposed, int way) {
  return way == 0   ? find<Element, Way::kMmaSync>(columns, transposed)
         : way == 1 ? find<Element, Way::kShared>(columns, transposed)
                    : find<Element, Way::kRegisters>(columns, transposed);
}

}  // namespace

// Returns a cudaError_t. count: products side by side. way: 0, mma.sync; 1, wgmma with a in shared
// memory, not for b transposed; 2, wgmma with a in registers.
extern "C" int run_products(const void* a, const void* b, const float* c, float* out, int k,
                            int count, int columns, int way, bool transposed, bool bf16) {
  const Run chosen =
      bf16 ? find<__nv_bfloat16>(columns, transposed, way) : find<__half>(columns, transposed, way);
  return chosen(a, b, c, out, k, count);
}
