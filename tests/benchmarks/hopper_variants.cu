// The Hopper forward in several shapes at once, to time them in turns: hopper_variants.py compiles
// this for one head dim (-DFAD_HEAD_DIM=...) and calls it. bf16, no softcap.
#include <cmath>

#include "sm90/forward/fwd_launch.cuh"

// Shapes that lost against the product's: types, as fwd_tile.h takes them. Not in a namespace
// without a name: kernels are named after them.
namespace shapes {

using fad::sm90::FwdShape;

template <int kKeys, int kStateColumns, bool kTurns, bool kWaits, int kQueries, bool kRing = false>
struct Plain {
  static constexpr FwdShape value = {kKeys, kStateColumns, kTurns, kWaits, kQueries, kRing};
};

template <typename Base>
struct InLines {
  static constexpr FwdShape with_lines(FwdShape shape) {
    shape.waits_in_lines = true;
    return shape;
  }
  static constexpr FwdShape value = with_lines(Base::value);
};

// So many CTAs to an SM.
template <typename Base, int kCtas>
struct Side {
  static constexpr FwdShape with(FwdShape shape) {
    shape.ctas_per_sm = kCtas;
    return shape;
  }
  static constexpr FwdShape value = with(Base::value);
};

}  // namespace shapes

namespace {

using namespace fad::sm90;
using shapes::InLines;
using shapes::Plain;
using shapes::Side;

struct Variant {
  const char* name;
  int rows, ctas_per_sm;
  void (*launch)(const FwdParams&, unsigned, cudaStream_t);
};

template <int kWarpgroups, typename Shape>
constexpr Variant variant(const char* name) {
  return {name, kWarpgroups * kGroupRows, Shape::value.ctas_per_sm,
          &launch_fwd<FwdTile<__nv_bfloat16, FAD_HEAD_DIM, false, kWarpgroups, Shape>>};
}

template <int kBlockM>
constexpr Variant product(const char* name) {
  return variant<kBlockM / kGroupRows, ShapeOf<FAD_HEAD_DIM, kBlockM>>(name);
}

// The first is the product's. Names: one to four: warpgroups; twice, four-times: CTAs to an SM;
// k128: 128 keys to a product; turns, free: with turns and without; wait: waits_last; q8: eight
// sixteens of Q in registers, ring: they come through the ring; s24: eights of columns of what
// waits in shared memory; lines: waits_in_lines of fwd_shape.h.
constexpr Variant kVariants[] = {
#if FAD_HEAD_DIM == 32
    product<128>("two-free-q2-twice"),
    variant<2, Side<Plain<64, 4, false, true, 2>, 2>>("two-free-wait-q2-twice"),
    variant<2, Side<Plain<64, 4, false, false, 0>, 2>>("two-free-twice"),
    variant<1, Side<Plain<64, 4, false, true, 2>, 4>>("one-free-wait-q2-four-times"),
    variant<3, Plain<128, 4, false, false, 2>>("three-k128-free-q2"),
    variant<4, Plain<64, 4, false, false, 2>>("four-free-q2"),
#elif FAD_HEAD_DIM == 64
    product<256>("four-free"),
    variant<4, Plain<64, 8, true, false, 0>>("four-turns"),
    variant<4, Plain<64, 8, false, true, 0>>("four-free-wait"),
    variant<3, Plain<128, 8, false, false, 0>>("three-k128-free"),
    variant<3, Plain<64, 8, false, false, 4>>("three-free-q4"),
#elif FAD_HEAD_DIM == 96
    product<192>("three-free-q6"),
    variant<3, Plain<64, 12, true, false, 0>>("three-turns"),
    variant<3, Plain<64, 12, false, true, 6>>("three-free-wait-q6"),
    variant<3, Plain<64, 12, true, true, 6>>("three-turns-wait-q6"),
#elif FAD_HEAD_DIM == 128
    product<192>("three-turns-wait-q4"),
    product<128>("two-k128-free"),
    variant<3, Plain<64, 16, true, true, 4, true>>("three-turns-wait-q4-ring"),
    variant<3, Plain<64, 16, false, true, 4>>("three-free-wait-q4"),
    variant<3, Plain<64, 16, true, false, 4>>("three-turns-q4"),
    variant<2, Plain<64, 16, false, true, 8>>("two-free-wait-q8"),
#elif FAD_HEAD_DIM == 192
    product<128>("two-free-wait-q12-ring-s20-lines"),
    // Five and seven blocks in the ring instead of six.
    variant<2, Plain<64, 12, false, true, 12>>("two-free-wait-q12"),
    variant<2, InLines<Plain<64, 16, false, true, 12, true>>>("two-free-wait-q12-ring-s16-lines"),
    variant<2, Plain<64, 20, false, true, 12, true>>("two-free-wait-q12-ring-s20"),
    variant<2, InLines<Plain<64, 20, true, true, 12, true>>>("two-turns-wait-q12-ring-s20-lines"),
#elif FAD_HEAD_DIM == 256
    product<128>("two-free-wait-q8-ring-lines"),
    variant<2, Plain<64, 16, false, true, 8, true>>("two-free-wait-q8-ring"),
    variant<2, InLines<Plain<64, 16, true, true, 8, true>>>("two-turns-wait-q8-ring-lines"),
#endif
};

}  // namespace

extern "C" {

int fad_variants() { return static_cast<int>(sizeof(kVariants) / sizeof(kVariants[0])); }

const char* fad_name(int variant) { return kVariants[variant].name; }

// q, out: (batch, seqlen_q, heads, head dim), k, v: (batch, seqlen_k, heads_k, head dim), bf16,
// contiguous; softmax_lse: (batch, heads, seqlen_q), fp32; counter: 4 bytes of the device.
// window_left, window_right: below 0, no limit; causal is (-1, 0). Returns 0, or 1 where the
// variant does not take the call.
int fad_run(int variant, const void* q, const void* k, const void* v, void* out, float* softmax_lse,
            unsigned* counter, int batch, int seqlen_q, int seqlen_k, int heads, int heads_k,
            int window_left, int window_right, int split_tokens, int sms, void* stream) {
  const auto rows = [&](const void* data, int seqlen, int count) {
    const int64_t row = static_cast<int64_t>(count) * FAD_HEAD_DIM;
    return Rows{data, row * seqlen, row, FAD_HEAD_DIM};
  };
  FwdParams params{};
  params.q = rows(q, seqlen_q, heads);
  params.k = rows(k, seqlen_k, heads_k);
  params.v = rows(v, seqlen_k, heads_k);
  params.out = out;
  params.out_batch_stride = params.q.batch_stride;
  params.out_row_stride = params.q.row_stride;
  params.out_head_stride = params.q.head_stride;
  params.softmax_lse = softmax_lse;
  params.lse_head_stride = seqlen_q;
  params.lse_batch_stride = static_cast<int64_t>(heads) * seqlen_q;
  params.batch = params.kv_batch = batch;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.total_q = static_cast<int64_t>(batch) * seqlen_q;
  params.total_k = static_cast<int64_t>(batch) * seqlen_k;
  params.heads = heads;
  params.heads_k = heads_k;
  params.head_dim = FAD_HEAD_DIM;
  params.window_left = window_left;
  params.window_right = window_right;
  // Rounded as set_softmax in cpp/ops/params.cpp rounds them.
  params.scale = static_cast<float>(1. / std::sqrt(static_cast<double>(FAD_HEAD_DIM)));
  params.scale_log2 = static_cast<float>(static_cast<double>(params.scale) * 1.4426950408889634074);
  params.split_tokens = split_tokens;
  const Variant& chosen = kVariants[variant];
  const int64_t tiles =
      static_cast<int64_t>(batch) * heads * ((seqlen_q + chosen.rows - 1) / chosen.rows);
  const int64_t slots = int64_t{sms} * chosen.ctas_per_sm;
  params.tile_counter = tiles > slots ? counter : nullptr;
  if (!supports(params) || split_tokens % 128 != 0) {
    return 1;
  }
  chosen.launch(params, static_cast<unsigned>(tiles < slots ? tiles : slots),
                static_cast<cudaStream_t>(stream));
  return 0;
}

}  // extern "C"
