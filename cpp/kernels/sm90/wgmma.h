// Hopper's warpgroup matrix products (wgmma), asynchronous: 64 rows, kColumns columns, fp32
// accumulators. Chains of them give the bits that chains of mma.sync.m16n8k16 give over the same
// order of k.
//
//   fence   before the first product that reads registers written by this thread
//   commit  closes a group of products
//   wait    until at most so many groups are under way
//   hold    keeps the compiler from moving reads and writes of these registers across this point
//
// A thread holds of every eight columns two neighbouring ones of two rows: the layout of
// mma.sync's accumulators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tma.h"

namespace fad::sm90 {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

template <int kCount>
__device__ __forceinline__ void hold(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}

template <int kCount>
__device__ __forceinline__ void hold(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(registers[i])::"memory");
  }
}

// Where an operand lies in shared memory, in boxes as tma.h loads them (128-byte swizzle). A row of
// a box is contiguous along k (Q, K: one box wide at a time, chunk_bytes unused) or along the
// columns of the product (V: chunk_bytes from one box of 64 columns to the next).
__device__ __forceinline__ uint64_t operand(uint32_t address, int chunk_bytes) {
  constexpr uint64_t kEightRows = 8 * kBoxRowBytes;
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(chunk_bytes >> 4) << 16 | (kEightRows >> 4) << 32 |
         kSwizzle128 << 62;
}

// How far an operand moves for the next 16 of k: along a row of a box, or down 16 rows.
constexpr uint64_t kOperandColumns16 = 32 >> 4;
constexpr uint64_t kOperandRows16 = 16 * kBoxRowBytes >> 4;

// acc = a b^T, or acc + a b^T if accumulate; a (64 x 16) and b (kColumns x 16) in shared memory,
// contiguous along k.
template <typename Element, int kColumns>
struct SharedProduct;

// acc = a b, or acc + a b if accumulate; a (64 x 16, contiguous along k) and b (16 x kColumns,
// contiguous along its columns) in shared memory.
template <typename Element, int kColumns>
struct SharedPlainProduct;

// acc = a b, or acc + a b if accumulate; a (64 x 16) in registers, b (16 x kColumns) in shared
// memory, contiguous along its columns, or along k as in SharedProduct.
enum class Contiguous { kColumns, kK };
template <typename Element, int kColumns, Contiguous kAlong = Contiguous::kColumns>
struct RegisterProduct;

// Operands of the asm statements below, counted from %0.
#define FAD_ACC8(acc, i)                                                                \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), \
      "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define FAD_ACC32(acc, i) \
  FAD_ACC8(acc, i), FAD_ACC8(acc, i + 8), FAD_ACC8(acc, i + 16), FAD_ACC8(acc, i + 24)
#define FAD_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FAD_NAMES32                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FAD_NAMES48                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FAD_NAMES64                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FAD_NAMES96                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FAD_NAMES128                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FAD_ACC_OF16 FAD_ACC8(acc, 0), FAD_ACC8(acc, 8)
#define FAD_ACC_OF32 FAD_ACC32(acc, 0)
#define FAD_ACC_OF48 FAD_ACC32(acc, 0), FAD_ACC8(acc, 32), FAD_ACC8(acc, 40)
#define FAD_ACC_OF64 FAD_ACC32(acc, 0), FAD_ACC32(acc, 32)
#define FAD_ACC_OF96 FAD_ACC32(acc, 0), FAD_ACC32(acc, 32), FAD_ACC32(acc, 64)
#define FAD_ACC_OF128 FAD_ACC32(acc, 0), FAD_ACC32(acc, 32), FAD_ACC32(acc, 64), FAD_ACC32(acc, 96)

// registers: accumulators of a thread; the rest: names of the operands after them.
#define FAD_SHARED_PRODUCT(Product, Element, type, columns, registers, a_name, b_name,            \
                           accumulate_name, b_layout)                                             \
  template <>                                                                                     \
  struct Product<Element, columns> {                                                              \
    __device__ __forceinline__ static void issue(float (&acc)[registers], uint64_t a, uint64_t b, \
                                                 bool accumulate) {                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name                            \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type          \
                   " {" FAD_NAMES##registers "}, " a_name ", " b_name ", p, 1, 1, 0, " b_layout   \
                                             ";\n}\n"                                             \
                   : FAD_ACC_OF##registers                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                          \
    }                                                                                             \
  };

#define FAD_REGISTER_PRODUCT(Element, type, columns, registers, a_names, b_name, accumulate_name, \
                             along, transposed)                                                   \
  template <>                                                                                     \
  struct RegisterProduct<Element, columns, Contiguous::along> {                                   \
    __device__ __forceinline__ static void issue(float (&acc)[registers], const uint32_t* a,      \
                                                 uint64_t b, bool accumulate) {                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name                            \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type          \
                   " {" FAD_NAMES##registers "}, {" a_names "}, " b_name ", p, 1, 1, " transposed \
                                             ";\n}\n"                                             \
                   : FAD_ACC_OF##registers                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
                     "r"(static_cast<int>(accumulate)));                                          \
    }                                                                                             \
  };

#define FAD_PRODUCTS(Element, type)                                                               \
  FAD_SHARED_PRODUCT(SharedProduct, Element, type, 64, 32, "%32", "%33", "%34", "0")              \
  FAD_SHARED_PRODUCT(SharedProduct, Element, type, 128, 64, "%64", "%65", "%66", "0")             \
  FAD_SHARED_PRODUCT(SharedPlainProduct, Element, type, 32, 16, "%16", "%17", "%18", "1")         \
  FAD_SHARED_PRODUCT(SharedPlainProduct, Element, type, 64, 32, "%32", "%33", "%34", "1")         \
  FAD_REGISTER_PRODUCT(Element, type, 64, 32, "%32, %33, %34, %35", "%36", "%37", kK, "0")        \
  FAD_REGISTER_PRODUCT(Element, type, 128, 64, "%64, %65, %66, %67", "%68", "%69", kK, "0")       \
  FAD_REGISTER_PRODUCT(Element, type, 32, 16, "%16, %17, %18, %19", "%20", "%21", kColumns, "1")  \
  FAD_REGISTER_PRODUCT(Element, type, 64, 32, "%32, %33, %34, %35", "%36", "%37", kColumns, "1")  \
  FAD_REGISTER_PRODUCT(Element, type, 96, 48, "%48, %49, %50, %51", "%52", "%53", kColumns, "1")  \
  FAD_REGISTER_PRODUCT(Element, type, 128, 64, "%64, %65, %66, %67", "%68", "%69", kColumns, "1") \
  FAD_REGISTER_PRODUCT(Element, type, 192, 96, "%96, %97, %98, %99", "%100", "%101", kColumns,    \
                       "1")                                                                       \
  FAD_REGISTER_PRODUCT(Element, type, 256, 128, "%128, %129, %130, %131", "%132", "%133",         \
                       kColumns, "1")

FAD_PRODUCTS(__nv_bfloat16, "bf16")
FAD_PRODUCTS(__half, "f16")

#undef FAD_PRODUCTS
#undef FAD_REGISTER_PRODUCT
#undef FAD_SHARED_PRODUCT
#undef FAD_ACC_OF16
#undef FAD_NAMES16
#undef FAD_ACC_OF32
#undef FAD_NAMES32
#undef FAD_ACC_OF48
#undef FAD_NAMES48
#undef FAD_ACC_OF64
#undef FAD_NAMES64
#undef FAD_ACC_OF96
#undef FAD_NAMES96
#undef FAD_ACC_OF128
#undef FAD_NAMES128
#undef FAD_ACC32
#undef FAD_ACC8

}  // namespace fad::sm90
