// The copy engine (TMA): tensor maps on the host, loads of boxes on the device.
//
// A tensor of (batch, rows, heads, head_dim) is loaded in boxes of 64 columns of some heads, mostly
// one, and of some rows. Each row of a head takes 128 bytes of shared memory, those of one row
// follow one another, swizzled as wgmma.h reads them. Columns from head_dim on and rows beyond the
// tensor are filled with zeros.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace fad::sm90 {

constexpr int kBoxColumns = 64;
constexpr int kBoxRowBytes = 128;

struct MappedTensor {
  const void* data;
  int64_t batch_stride, row_stride, head_stride;  // in elements
  int64_t batch, rows;
  int heads, head_dim;
};

// Whether the copy engine takes tensors laid out like this, of 16-bit elements.
inline bool can_map(const MappedTensor& tensor) {
  const auto stride = [](int64_t value, int64_t size) {
    return size == 1 || (value > 0 && value % 8 == 0 && value < (int64_t{1} << 39));
  };
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch > 0 &&
         tensor.rows > 0 && tensor.rows < (int64_t{1} << 31) &&
         stride(tensor.row_stride, tensor.rows) && stride(tensor.head_stride, tensor.heads) &&
         stride(tensor.batch_stride, tensor.batch);
}

// The driver's function, looked up at run time, so that nothing links libcuda.
inline auto encode_tensor_map() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &result));
#else
    C10_CUDA_CHECK(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error("cuTensorMapEncodeTiled: not offered by this driver");
    }
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

// Element: __half or __nv_bfloat16.
template <typename Element>
CUtensorMap tensor_map(const MappedTensor& tensor, int box_rows, int box_heads = 1) {
  constexpr CUtensorMapDataType kType = std::is_same_v<Element, __half>
                                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // The stride of a dimension of size 1 may be anything, but the driver checks it.
  const auto bytes = [](int64_t stride, int64_t size) {
    return static_cast<cuuint64_t>(size == 1 ? 16 : 2 * stride);
  };
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(tensor.head_dim), static_cast<cuuint64_t>(tensor.heads),
      static_cast<cuuint64_t>(tensor.rows), static_cast<cuuint64_t>(tensor.batch)};
  const cuuint64_t strides[3] = {bytes(tensor.head_stride, tensor.heads),
                                 bytes(tensor.row_stride, tensor.rows),
                                 bytes(tensor.batch_stride, tensor.batch)};
  const cuuint32_t box[4] = {kBoxColumns, static_cast<cuuint32_t>(box_heads),
                             static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode_tensor_map()(&map, kType, 4, const_cast<void*>(tensor.data), sizes, strides, box,
                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(result));
  }
  return map;
}

#ifdef __CUDACC__
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads a box; its bytes count towards the barrier's phase.
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                         int column, int head, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(batch)
      : "memory");
}

// Adds fp32 numbers of shared memory to global memory, denormals kept: a group of its own.
__device__ __forceinline__ void add_bulk(float* global, uint32_t shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

// Waits until what this thread has added is read from shared memory, ...
__device__ __forceinline__ void wait_bulk_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// ... and until it is in global memory.
__device__ __forceinline__ void wait_bulk_added() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders what this thread knows of global memory and what the copy engine does there.
__device__ __forceinline__ void fence_global_async_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
#endif

}  // namespace fad::sm90
