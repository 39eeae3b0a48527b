// What rounding takes from the output (docs/adr/0020), in upstream's bodies: the forward keeps it,
// the backward adds it to the output again. Patches call these functions.
#pragma once

#include <cute/tensor.hpp>

#include "block_info.h"  // upstream
#include "bwd_turns.h"
#include "params.h"
#include "row_block.h"
#include "tree/row_end.h"

namespace fad {

template <typename Traits>
using Normalised = float[Fragment<Traits>::kMmaN][Fragment<Traits>::kMmaM][4];

// The normalised accumulator is rounded here once more. Not inlined: with so many instructions in
// it, the compiler would make upstream's body a function of its own.
template <typename Traits>
static __device__ __noinline__ void write_residual(const FwdParams& params,
                                                   const Normalised<Traits>& exact) {
  using Element = typename Traits::Element;
  using F = Fragment<Traits>;
  const auto [bidb, bidh, m_block] = place_of<Traits::kBlockM>(params, read_cta());
  const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
  const int first_column = read_thread() % 4 * 2;
#pragma unroll 1
  for (int i = 0; i < 2 * F::kMmaM; ++i) {
    const int mi = i / 2;
    const int half = i % 2;
    const int row = m_block * Traits::kBlockM + thread_row() + mi * F::kRowStep + 8 * half;
    if (row < info.actual_seqlen_q) {
      cutlass::bfloat16_t* const to =
          residual_of(params, out_row<Element>(params, info, bidb, bidh, row));
#pragma unroll 4
      for (int nj = 0; nj < F::kMmaN; ++nj) {
        const int column = nj * 8 + first_column;
        if (column < params.d) {
          const float* const pair = exact[nj][mi] + 2 * half;
          cutlass::Array<cutlass::bfloat16_t, 2> two;
          two[0] = static_cast<cutlass::bfloat16_t>(lost<Element>(pair[0]));
          two[1] = static_cast<cutlass::bfloat16_t>(lost<Element>(pair[1]));
          *reinterpret_cast<uint32_t*>(to + column) = reinterpret_cast<const uint32_t&>(two);
        }
      }
    }
  }
}

// acc: the normalised accumulator, (4, rows of 16, eights of columns).
template <typename Traits, typename Acc>
__device__ __forceinline__ void keep_residual(const FwdParams& params, const Acc& acc) {
  if constexpr (Traits::kKeepsResidual) {
    if (params.residual == nullptr) {
      return;
    }
    Normalised<Traits> exact;
#pragma unroll
    for (int nj = 0; nj < Fragment<Traits>::kMmaN; ++nj) {
#pragma unroll
      for (int mi = 0; mi < Fragment<Traits>::kMmaM; ++mi) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          exact[nj][mi][i] = acc(i, mi, nj);
        }
      }
    }
    write_residual<Traits>(params, exact);
  }
}

// The same for rows that see no key. Few instructions: with many, the compiler would make
// upstream's body a function of its own.
template <typename Traits>
__device__ __forceinline__ void clear_residual(const FwdParams& params) {
  if constexpr (Traits::kKeepsResidual) {
    if (params.residual == nullptr) {
      return;
    }
    const auto [bidb, bidh, m_block] = place_of<Traits::kBlockM>(params, read_cta());
    const FLASH_NAMESPACE::BlockInfo</*Varlen=*/true> info(params, bidb);
    const int end = min((m_block + 1) * Traits::kBlockM, info.actual_seqlen_q);
#pragma unroll 1
    for (int row = m_block * Traits::kBlockM + threadIdx.x; row < end; row += Traits::kNThreads) {
      cutlass::bfloat16_t* const to =
          residual_of(params, out_row<typename Traits::Element>(params, info, bidb, bidh, row));
#pragma unroll 1
      for (int column = 0; column < params.d; column += 8) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(0, 0, 0, 0);
      }
    }
  }
}

// Where there is none to add.
struct NoResidual {
  template <typename Out>
  __device__ void operator()(Out&) const {}
};

// out: (rows, columns) of a row block as the thread holds them, eight neighbouring columns at a
// time; places: (eight columns, rows, eights of columns), where they lie in the row block.
template <typename Traits, typename Info, typename Places, typename Out>
__device__ __forceinline__ void add_residual(const BwdParams& params, const Info& info,
                                             const Places& places, Out& out) {
  if constexpr (Traits::kAddsResidual) {
    if (params.residual == nullptr) {
      return;
    }
    constexpr int kBlockM = Traits::kBlockM;
    static_assert(decltype(cute::size<0>(places))::value == 8);
    const auto [bidb, bidh, m_block] = row_place<kBlockM>(params);
    const int64_t row_stride = static_cast<int64_t>(params.h) * params.d;
    const auto* const head = static_cast<const cutlass::bfloat16_t*>(params.residual) +
                             info.q_offset(params.seqlen_q * row_stride, row_stride, bidb) +
                             bidh * params.d;
#pragma unroll
    for (int mi = 0; mi < cute::size<1>(places); ++mi) {
#pragma unroll
      for (int k = 0; k < cute::size<2>(places); ++k) {
        const int row = m_block * kBlockM + cute::get<0>(places(0, mi, k));
        const int column = cute::get<1>(places(0, mi, k));
        if (row < info.actual_seqlen_q && column < params.d) {
          using Eight = cutlass::AlignedArray<cutlass::bfloat16_t, 8>;
          const Eight eight = *reinterpret_cast<const Eight*>(head + row * row_stride + column);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            out(mi, 8 * k + i) = __fadd_rn(out(mi, 8 * k + i), static_cast<float>(eight[i]));
          }
        }
      }
    }
  }
}

}  // namespace fad
