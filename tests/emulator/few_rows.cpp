// Draws calls of a few queries, runs them through one path, and writes out and softmax_lse to a
// file: few_rows FIRST COUNT PATH LATE FILE. Programs made from two source trees, and all paths,
// must write the same bytes.
#include "emulator.h"

#include "sm80/fwd.cuh"
#ifndef OLD_TREE
#include "sm80/decode/scores_first.cu"
#endif

#include "draws.h"
#include "plan.h"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef ELEMENT
#define ELEMENT cutlass::bfloat16_t
#endif

namespace fad {

alignas(1024) char smem[emulator::kSharedBytes];

#ifdef OLD_TREE  // a newer plan.cpp has it
int kernel_head_dim(int head_dim) {
  for (const int rounded : {32, 64, 96, 128, 192, 256}) {
    if (rounded >= head_dim) {
      return rounded;
    }
  }
  return 0;
}
#endif

#ifdef OLD_TREE
constexpr Features kResidual = 0;
#endif
constexpr Features kMost = kCausal | kWindow | kAlibi | kSoftcap | kPadded | kResidual;
constexpr int kFewWarps = HEAD_DIM % 64 == 0 ? 8 : 4;
const FwdKernel kKernels[] = {
    fwd_entry<ELEMENT, HEAD_DIM, Path::kFewRows, 16, kFewWarps, kMost | kCacheIndex>(),
    fwd_entry<ELEMENT, HEAD_DIM, Path::kFewRows, 16, kFewWarps, kMost | kPaged>(),
#ifndef OLD_TREE
    fwd_entry<ELEMENT, HEAD_DIM, Path::kFewRows, 32, 8, kMost | kCacheIndex>(),
    fwd_entry<ELEMENT, HEAD_DIM, Path::kFewRows, 32, 8, kMost | kPaged>(),
    fwd_entry<ELEMENT, HEAD_DIM, Path::kFewRows, 64, 8, kMost | kCacheIndex>(),
    fwd_entry<ELEMENT, HEAD_DIM, Path::kFewRows, 64, 8, kMost | kPaged>(),
    fwd_entry<ELEMENT, HEAD_DIM, Path::kScoresFirst, 8, HEAD_DIM == 256 ? 3 : 4,
              kMost | kCacheIndex | kPaged>(),
#endif
};
const FwdInstance kInstance{kKernels, sizeof(kKernels) / sizeof(*kKernels),
                            &launch_merge<ELEMENT, HEAD_DIM>};

}  // namespace fad

namespace {

using fad::FwdParams;

// Numbers about as attention sees them; NaN where nothing may be read.
struct Numbers {
  std::vector<ELEMENT> data;
  explicit Numbers(std::size_t count) : data(count + 64, ELEMENT(NAN)) {}
  void fill(std::size_t first, int count, float scale) {
    for (int i = 0; i < count; ++i) {
      data[first + i] = ELEMENT(scale * (draw(-1000, 1000) / 500.f));
    }
  }
};

template <typename Value>
void write(std::FILE* file, const std::vector<Value>& values) {
  std::fwrite(values.data(), sizeof(Value), values.size(), file);
}

void run_case(unsigned seed, fad::Path path, std::FILE* file) {
  draw_source.seed(seed);
  FwdParams params{};
  const int batch = draw(1, 3), heads_k = draw(1, 2),
            group = pick({1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 32});
  const int seqlen_q = chance(40) ? 1 : draw(2, 16), heads = heads_k * group;
  const int d = chance(25) ? HEAD_DIM - 8 * draw(1, 3) : HEAD_DIM;
  const bool packed = chance(30), paged = chance(40), indexed = !paged && !packed && chance(30);
  const int capacity = draw(1, chance(50) ? 700 : 200);
  const int page = 16 * draw(1, 5), pages = (capacity + page - 1) / page;
  const int split = pick({0, 64, 128, 192, 256, 512});
  const int rows_k = paged ? pages * page : capacity;

  params.b = batch, params.h = heads, params.h_k = heads_k, params.h_h_k_ratio = group;
  params.d = params.d_v = d, params.d_rounded = HEAD_DIM;
  params.seqlen_q = seqlen_q, params.seqlen_k = rows_k;
  params.p_dropout = 1.f, params.rp_dropout = 1.f;
  params.is_bf16 = true;
  draw_scores(params, d, 20);
  params.is_causal = params.window_size_left < 0 && params.window_size_right == 0;

  // Lengths.
  std::vector<int> lengths_q(batch), lengths_k(batch), starts_q(batch + 1), table(batch * pages),
      index(batch), leftpad(batch);
  for (int b = 0; b < batch; ++b) {
    lengths_q[b] = packed ? draw(0, seqlen_q) : seqlen_q;
    lengths_k[b] = chance(25) ? draw(0, std::min(rows_k, 20)) : draw(0, rows_k);
    leftpad[b] = draw(0, lengths_k[b]);
    starts_q[b + 1] = starts_q[b] + lengths_q[b];
    index[b] = (b + 1) % batch;
  }
  const int total_q = packed ? starts_q[batch] + 3 : batch * seqlen_q;
  params.total_q = total_q;
  params.q_head_stride = d, params.q_row_stride = heads * d;
  params.q_batch_stride = static_cast<int64_t>(seqlen_q) * heads * d;
  params.o_head_stride = d, params.o_row_stride = heads * d,
  params.o_batch_stride = params.q_batch_stride;
  params.k_head_stride = params.v_head_stride = d;
  params.k_row_stride = params.v_row_stride = heads_k * d;
  params.k_batch_stride = params.v_batch_stride =
      static_cast<int64_t>(paged ? page : capacity) * heads_k * d;
  Numbers q(static_cast<std::size_t>(total_q) * heads * d);
  q.fill(0, total_q * heads * d, 1.f);
  const int blocks = batch * pages;
  const std::size_t kv =
      static_cast<std::size_t>(paged ? blocks * page : batch * capacity) * heads_k * d;
  Numbers k(kv), v(kv);
  std::vector<int> order(blocks);
  for (int i = 0; i < blocks; ++i) {
    order[i] = i;
  }
  std::shuffle(order.begin(), order.end(), draw_source);
  const bool padded = !paged && chance(20);
  for (int b = 0; b < batch; ++b) {
    const int sequence = indexed ? index[b] : b;
    for (int i = 0; i < pages; ++i) {
      table[b * pages + i] = i * page < lengths_k[b] ? order[b * pages + i] : 1 << 30;
    }
    for (int key = padded ? leftpad[b] : 0; key < lengths_k[b]; ++key) {
      const std::size_t row =
          paged ? static_cast<std::size_t>(order[b * pages + key / page]) * page + key % page
                : static_cast<std::size_t>(sequence) * capacity + key;
      k.fill(row * heads_k * d, heads_k * d, 1.f);
      v.fill(row * heads_k * d, heads_k * d, 1.f);
    }
  }
  std::vector<float> slopes(heads);
  for (float& slope : slopes) {
    slope = draw(1, 100) / 400.f;
  }
  if (chance(20)) {
    params.alibi_slopes_ptr = slopes.data();
  }
  params.q_ptr = q.data.data(), params.k_ptr = k.data.data(), params.v_ptr = v.data.data();
  params.cu_seqlens_k = lengths_k.data();  // lengths of a cache
  params.is_seqlens_k_cumulative = false;
  if (packed) {
    params.cu_seqlens_q = starts_q.data();
    params.unpadded_lse = true;
  }
  if (paged) {
    params.block_table = table.data();
    params.block_table_batch_stride = pages;
    params.page_block_size = page;
  }
  params.cache_batch_idx = indexed ? index.data() : nullptr;
  params.leftpad_k = padded ? leftpad.data() : nullptr;
  Numbers out(static_cast<std::size_t>(total_q) * heads * d);
  std::vector<float> lse(static_cast<std::size_t>(total_q) * heads, NAN);
  params.o_ptr = out.data.data();
  params.softmax_lse_ptr = lse.data();
#ifndef OLD_TREE
  std::vector<cutlass::bfloat16_t> residual(static_cast<std::size_t>(total_q) * heads * d,
                                            cutlass::bfloat16_t(NAN));
  params.residual = residual.data();
  const std::vector<float> sinks = draw_sinks(seed, heads);
  params.sinks = sinks.empty() ? nullptr : sinks.data();
#endif

  const fad::Device device{132, 227 * 1024, 90, path, std::nullopt};
  const fad::FwdPlan plan = fad::plan_fwd(params, fad::kInstance, split, true, device);
  if (plan.kernel->path != path) {
    std::fprintf(stderr, "seed %u: the path cannot run\n", seed);
    std::exit(1);
  }
  std::vector<unsigned char> scratch(plan.scratch_bytes + 1024, 0xff);
  void* aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 511) & ~511ull);
  fad::run_plan(plan, params, aligned, nullptr);
  write(file, out.data);
  write(file, lse);
#ifndef OLD_TREE
  write(file, residual);
#endif
}

}  // namespace

int main(int, char** arguments) {
  const unsigned first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  const std::string path = arguments[3];
  emulator::copies_late = std::atoi(arguments[4]) != 0;
  emulator::random_source.seed(first + 17);
  std::FILE* file = std::fopen(arguments[5], "wb");
  for (unsigned seed = first; seed < first + count; ++seed) {
#ifdef OLD_TREE
    run_case(seed, fad::Path::kFewRows, file);
#else
    run_case(seed, path == "few_rows" ? fad::Path::kFewRows : fad::Path::kScoresFirst, file);
#endif
  }
  std::fclose(file);
}
