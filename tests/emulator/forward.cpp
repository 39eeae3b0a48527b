// Draws calls, runs them through the few-rows kernel of the sm80 family and through each kernel of
// the Hopper forward, and compares the bits: forward FIRST COUNT [MOST], until MOST of them differ.
// With FEW, calls have a few queries, and the kernels are those of both paths for these; every
// second call has keys and values that e4m3 holds, which the kernels for it then read as such. See
// emulator.h and hopper.h for what this shows.
#include "emulator.h"

#include "sm80/fwd.cuh"

#include "hopper.h"
#include "sm90/forward/fwd_entry.h"
#include "sm90/forward/fwd_launch.cuh"

#include "draws.h"
#include "elements.h"
#include "plan.h"
#if FEW
#include "sm80/decode/scores_first.cu"
#endif

namespace fad {

constexpr Features kMost =
    kCausal | kWindow | kAlibi | kSoftcap | kPadded | kResidual | kCacheIndex | kPaged;

constexpr bool kFew = FEW;

template <int kHeadDimV, int kBlockM>
void launch_sm90(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  sm90::fwd_sm90<Element90, HEAD_DIM, kHeadDimV, kBlockM>(sm90::params_of(params, params.tree),
                                                          ctas, stream);
}

// The kernel whose bits the others must have, for dense keys and for keys in pages.
const FwdKernel kReference[] = {
    fwd_entry<Element80, HEAD_DIM, Path::kFewRows, 64, 8, kMost & ~kPaged>(),
    fwd_entry<Element80, HEAD_DIM, Path::kFewRows, 64, 8, kMost & ~kCacheIndex>(),
};

struct Named {
  std::string name;
  bool fp8 = false;                // takes keys and values in e4m3
  std::vector<FwdKernel> kernels;  // the first that can takes a call
};

#if FEW
template <int kBlockM, int kWarps>
Named few_rows() {
  return {
      "few-rows " + std::to_string(kBlockM),
      false,
      {fwd_entry<Element80, HEAD_DIM, Path::kFewRows, kBlockM, kWarps, kMost & ~kPaged>(),
       fwd_entry<Element80, HEAD_DIM, Path::kFewRows, kBlockM, kWarps, kMost & ~kCacheIndex>()}};
}

template <int kBlockM, int kWarps>
Named few_rows_fp8() {
  return {"few-rows fp8 " + std::to_string(kBlockM),
          true,
          {fwd_entry<Element80, HEAD_DIM, Path::kFewRows, kBlockM, kWarps, kMost | kFp8>()}};
}

std::vector<Named> kernels() {
  constexpr int kWarps = HEAD_DIM == 256 ? 3 : 4;
  return {few_rows<16, HEAD_DIM % 64 == 0 ? 8 : 4>(),
          few_rows<32, 8>(),
          few_rows<64, 8>(),
          few_rows_fp8<16, HEAD_DIM % 64 == 0 ? 8 : 4>(),
          few_rows_fp8<64, 8>(),
          {"scores-first",
           false,
           {fwd_entry<Element80, HEAD_DIM, Path::kScoresFirst, 8, kWarps, kMost>()}}};
}
#else
std::vector<Named> kernels() {
  std::vector<Named> all;
#define ROW(path, head_dim_v, block_m, covers)                                        \
  all.push_back({#path " " #head_dim_v " " #block_m,                                  \
                 false,                                                               \
                 {sm90::fwd_entry<HEAD_DIM, head_dim_v, block_m, Path::path, covers>( \
                     &launch_sm90<head_dim_v, block_m>)}});
  SM90_ROWS(ROW)
  return all;
}
#endif

std::string name_of(uint32_t offset, int shared_bytes, int threads) {
  const int groups = threads / 128 - 1;
  int at = (static_cast<int>(offset) - (shared_bytes - 512)) / 8;
  const struct {
    const char* name;
    int count;
  } kinds[] = {{"full", 12},     {"empty", 12},     {"q full", groups}, {"q empty", groups},
               {"work full", 2}, {"work empty", 2}, {"tail loaded", 2}};
  for (const auto& kind : kinds) {
    if (at < kind.count) {
      return kind.name + (" " + std::to_string(at));
    }
    at -= kind.count;
  }
  return "?";
}

}  // namespace fad

namespace {

using fad::FwdParams;

using fad::kFew;
using Numbers = NumbersOf<fad::Element80>;

// What a byte is in e4m3.
float e4m3(int byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float size = exponent == 0           ? std::ldexp(mantissa, -9)
                     : (byte & 0x7f) == 0x7f ? NAN
                                             : std::ldexp(8 + mantissa, exponent - 10);
  return byte < 128 ? size : -size;
}

// Whether kernels read each byte as the number that it is.
bool bytes_are_right() {
  for (uint32_t byte = 0; kFew && byte < 256; ++byte) {
    const uint2 words = fad::widened<fad::Element80>(byte | (255 - byte) << 8 | byte << 16);
    const int expected[] = {static_cast<int>(byte), 255 - static_cast<int>(byte),
                            static_cast<int>(byte), 0};
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? words.x : words.y;
      const float number =
          static_cast<float>(fad::Element80::from_bits(static_cast<uint16_t>(word >> i % 2 * 16)));
      const float right = e4m3(expected[i]);
      if (std::memcmp(&number, &right, 4) != 0 && !(number != number && right != right)) {
        std::fprintf(stderr, "byte %d is read as %g\n", expected[i], number);
        return false;
      }
    }
  }
  return true;
}

struct Result {
  Numbers out;
  std::vector<float> lse, row_max;
  std::vector<cutlass::bfloat16_t> residual;
  bool operator==(const Result& other) const {
    return std::memcmp(out.data.data(), other.out.data.data(), 2 * out.data.size()) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), 4 * lse.size()) == 0 &&
           std::memcmp(row_max.data(), other.row_max.data(), 4 * row_max.size()) == 0 &&
           std::memcmp(residual.data(), other.residual.data(), 2 * residual.size()) == 0;
  }
};

struct Call {
  FwdParams params{};
  int split = 0;
  std::size_t rows = 0;  // of the output, of all heads
  std::vector<int> lengths_q, lengths_k, starts_q, starts_k, used_k, leftpad, index, table;
  // wide_v has zeros where v has no columns.
  std::optional<Numbers> q, k, v, wide_v;
  std::vector<uint64_t> k_bytes, v_bytes;  // in e4m3, if there are any
  int d_v;
  std::vector<float> sinks, slopes;
  bool keeps_residual = false, wants_row_max = false;

  explicit Call(unsigned seed) {
    draw_source.seed(seed);
    const int batch = draw(1, 3), heads_k = draw(1, 2);
    const int group =
        kFew ? pick({1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 32}) : pick({1, 1, 2, 3, 4, 6, 8});
    const int heads = heads_k * group;
    const int d = chance(25) ? HEAD_DIM - 8 * draw(1, 3) : HEAD_DIM;
    std::mt19937 own_source(seed);
    // The op pads values for the sm80 family.
    d_v = seed % 3 == 0 && !kFew ? 8 * (1 + static_cast<int>(own_source() % (d / 8))) : d;
    // dense, packed, packed with lengths in use, a cache with lengths, the same in pages
    int layout = draw(0, 4);
    // In some calls a single row of the last block lies behind the end, where NaN is. Not in the
    // first 25, in which planted faults are known to show.
    const bool one_behind = seed > 25 && seed % 4 == 0;
    layout = one_behind ? 2 + layout % 2 : layout;
    const bool packed = layout == 1 || layout == 2, cache = layout >= 3, paged = layout == 4;
    const bool packed_q = packed || (cache && chance(30));
    const int seqlen_q = kFew         ? (chance(40) ? 1 : draw(2, 16))
                         : chance(35) ? draw(1, 20)
                                      : std::min(260, about(pick({32, 64, 128, 192, 200})));
    split = kFew ? pick({0, 64, 128, 192, 256, 512}) : pick({0, 64, 128, 128, 192, 256});
    int seqlen_k = kFew         ? draw(1, chance(50) ? 700 : 200)
                   : chance(20) ? draw(1, 64)
                   : chance(20) ? draw(1, 520)
                                : about((split == 0 ? 64 : split) * draw(1, split <= 128 ? 4 : 2) +
                                        (chance(30) ? 64 * draw(-1, 1) : 0));
    seqlen_k = one_behind ? std::max(seqlen_k, 128) : seqlen_k;
    const int page = 16 * draw(1, 12), pages = (seqlen_k + page - 1) / page;
    const int rows_k = paged ? pages * page : seqlen_k;
    const bool indexed = cache && !paged && chance(40),
               padded = cache && !paged && chance(40) && !one_behind;

    params.b = batch, params.h = heads, params.h_k = heads_k, params.h_h_k_ratio = group;
    params.d = d, params.d_rounded = HEAD_DIM;
    params.seqlen_q = seqlen_q, params.seqlen_k = rows_k;
    params.p_dropout = 1.f, params.rp_dropout = 1.f;
    draw_scores(params, d, 100);
    params.is_causal = params.window_size_left < 0 && params.window_size_right == 0;

    starts_q.resize(batch + 1), starts_k.resize(batch + 1);
    const auto used = [&](int length, int most) {
      const int whole = std::min(length / 128 + 1, most / 128) * 128;
      return one_behind && whole > 0 ? whole - 1 : length;
    };
    for (int b = 0; b < batch; ++b) {
      lengths_q.push_back(!packed_q    ? seqlen_q
                          : chance(20) ? 0
                          : chance(40) ? seqlen_q
                                       : draw(0, seqlen_q));
      lengths_k.push_back(layout == 0  ? seqlen_k
                          : chance(15) ? 0
                          : chance(30) ? rows_k
                          : chance(30) ? std::min(rows_k, about(64 * draw(1, 6)))
                                       : draw(0, rows_k));
      if (one_behind) {
        lengths_k[b] = cache ? used(lengths_k[b], rows_k) : rows_k;
      }
      leftpad.push_back(draw(0, lengths_k[b]));
      starts_q[b + 1] = starts_q[b] + lengths_q[b];
      starts_k[b + 1] = starts_k[b] + lengths_k[b];
      used_k.push_back(layout == 2 ? used(draw(0, lengths_k[b]), lengths_k[b]) : lengths_k[b]);
      index.push_back((b + 1) % batch);
    }
    const int total_q = packed_q ? starts_q[batch] + 3 : batch * seqlen_q;
    const int total_k = packed ? std::max(1, starts_k[batch]) : batch * rows_k;
    params.total_q = total_q, params.total_k = total_k;
    rows = static_cast<std::size_t>(total_q) * heads;
    set_strides(params, paged ? page : rows_k);
    q.emplace(rows * d);
    q->fill(0, rows * d);
    params.kv_batch = paged ? batch * pages : batch;
    const std::size_t kv = static_cast<std::size_t>(total_k) * heads_k * d;
    k.emplace(kv), v.emplace(kv);
    std::vector<int> order(batch * pages);
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = static_cast<int>(i);
    }
    std::shuffle(order.begin(), order.end(), draw_source);
    for (int b = 0; b < batch; ++b) {
      const int sequence = indexed ? index[b] : b;
      for (int i = 0; i < pages; ++i) {
        table.push_back(i * page < lengths_k[b] ? order[b * pages + i] : 1 << 30);
      }
      for (int key = padded ? leftpad[b] : 0; key < used_k[b]; ++key) {
        const std::size_t row =
            paged    ? static_cast<std::size_t>(order[b * pages + key / page]) * page + key % page
            : packed ? static_cast<std::size_t>(starts_k[b]) + key
                     : static_cast<std::size_t>(sequence) * rows_k + key;
        k->fill(row * heads_k * d, heads_k * d);
        v->fill(row * heads_k * d, heads_k * d);
      }
    }
    wide_v.emplace(kv);
    std::copy(v->start(), v->start() + kv, wide_v->start());
    for (std::size_t i = 0; i < kv; ++i) {
      if (static_cast<int>(i % d) >= d_v) {
        v->start()[i] = fad::Element80(NAN);
        wide_v->start()[i] = fad::Element80(0.f);
      }
    }
    if (kFew && seed % 2 == 0) {
      std::mt19937 bytes_source(seed);
      const auto made = [&](Numbers& numbers) {
        std::vector<uint64_t> bytes(kv / 8);
        auto* const each = reinterpret_cast<unsigned char*>(bytes.data());
        for (std::size_t i = 0; i < kv; ++i) {
          each[i] = 0x7f;
          if (numbers.at(i) == numbers.at(i)) {  // up to 3.5, some of them subnormal
            each[i] = static_cast<unsigned char>(bytes_source() % 2 << 7 | bytes_source() % 0x47);
            numbers.start()[i] = fad::Element80(e4m3(each[i]));
          }
        }
        return bytes;
      };
      k_bytes = made(*k), v_bytes = made(*v);
      std::copy(v->start(), v->start() + kv, wide_v->start());
    }
    params.q_ptr = q->start(), params.k_ptr = k->start();
    if (packed_q) {
      params.cu_seqlens_q = starts_q.data();
      params.unpadded_lse = true;
    }
    params.is_seqlens_k_cumulative = !cache;
    if (packed) {
      params.cu_seqlens_k = starts_k.data();
    } else if (cache) {
      params.cu_seqlens_k = lengths_k.data();
    }
    if (layout == 2) {
      params.seqused_k = used_k.data();
    }
    if (paged) {
      params.block_table = table.data();
      params.block_table_batch_stride = pages;
      params.page_block_size = page;
    }
    params.cache_batch_idx = indexed ? index.data() : nullptr;
    params.leftpad_k = padded ? leftpad.data() : nullptr;
    keeps_residual = chance(40);
    wants_row_max = seed % 4 != 1;
    sinks = draw_sinks(seed, heads);
    params.sinks = sinks.empty() ? nullptr : sinks.data();
    for (int head = 0; kFew && seed % 5 == 0 && head < heads; ++head) {
      slopes.push_back(draw(1, 100) / 400.f);
    }
    params.alibi_slopes_ptr = slopes.empty() ? nullptr : slopes.data();
    // Some of the keys have just been appended: lengths are those before.
    const int least = *std::min_element(lengths_k.begin(), lengths_k.end());
    if (cache && least > 0 && chance(30)) {
      params.knew_ptr = k->start();
      params.seqlen_knew = draw(1, least);
      for (int& length : lengths_k) {
        length -= params.seqlen_knew;
      }
    }
  }

  void print() const {
    std::fprintf(
        stderr,
        "  b %d, h %d / %d, d %d and %d, q %d, k %d, split %d, window %d %d, softcap %g, packed %d "
        "%d, used %d, pages %d, index %d, leftpad %d, residual %d, sinks %d\n",
        params.b, params.h, params.h_k, params.d, d_v, params.seqlen_q, params.seqlen_k, split,
        params.window_size_left, params.window_size_right, params.softcap,
        params.cu_seqlens_q != nullptr,
        params.cu_seqlens_k != nullptr && params.is_seqlens_k_cumulative,
        params.seqused_k != nullptr, params.page_block_size, params.cache_batch_idx != nullptr,
        params.leftpad_k != nullptr, keeps_residual, params.sinks != nullptr);
  }

  template <typename Plan>
  Result run(const Plan& plan, bool fp8 = false) {
    Result result{Numbers(rows * params.d), std::vector<float>(rows, NAN),
                  std::vector<float>(rows, -INFINITY),
                  std::vector<cutlass::bfloat16_t>(rows * params.d + 8, cutlass::bfloat16_t(NAN))};
    FwdParams call = params;
    if (fp8) {
      call.kv_fp8 = true, call.k_ptr = k_bytes.data(), call.v_ptr = v_bytes.data();
    }
    call.o_ptr = result.out.start();
    call.softmax_lse_ptr = result.lse.data();
    call.row_max = wants_row_max ? result.row_max.data() : nullptr;
    call.residual = keeps_residual ? aligned(result.residual.data(), 16) : nullptr;
    std::vector<unsigned char> scratch(plan.scratch_bytes + 1024, 0xff);
    auto* room = aligned(scratch.data(), 512);
    // Where the counter lies: if no launch clears it, no tile is left.
    const unsigned before = 1 << 20;
    if (plan.scratch_bytes >= sizeof before) {
      std::memcpy(room + plan.scratch_bytes - sizeof before, &before, sizeof before);
    }
    fad::run_plan(plan, call, plan.scratch_bytes > 0 ? room : nullptr, nullptr);
    for (std::size_t i = room - scratch.data() + plan.scratch_bytes; i < scratch.size(); ++i) {
      if (scratch[i] != 0xff) {
        emulator::fail("scratch memory is written behind its end");
      }
    }
    return result;
  }

  // Of v with zeros; the call itself is then the one with columns of its own.
  Result reference() {
    params.d_v = params.d, params.v_ptr = wide_v->start();
    fad::FwdPlan plan{};
    fad::FwdKernel kernel = fad::kReference[params.block_table != nullptr];
    const fad::FwdInstance instance{&kernel, 1, &fad::launch_merge<fad::Element80, HEAD_DIM>};
    plan.instance = &instance;
    plan.kernel = &kernel;
    if (split > 0) {
      plan.tree.blocks_per_split = split / plan.tree.keys_per_block;
    }
    plan.num_splits = split > 0 ? std::max(1, (params.seqlen_k + split - 1) / split) : 1;
    plan.writes_parts = plan.num_splits > 1;
    plan.group = 1;
    plan.ctas = (params.seqlen_q + 63) / 64 * params.b * params.h;
    plan.ctas_per_launch = plan.ctas;
    plan.part_rows = std::min(64, params.seqlen_q);
    const auto limit = [&](auto& any) {
      if constexpr (requires { any.most_ctas; }) {
        any.most_ctas = any.ctas;
      }
    };
    limit(plan);
    if (plan.writes_parts) {
      plan.scratch_bytes = static_cast<std::size_t>(plan.ctas) * plan.num_splits * plan.part_rows *
                           (HEAD_DIM * sizeof(float) + sizeof(float2));
    }
    emulator::resident_ctas = 1;
    emulator::copies_late = false;
    Result result = run(plan);
    params.d_v = d_v, params.v_ptr = v->start();
    auto* residual = aligned(result.residual.data(), 16);
    for (std::size_t i = 0; i < rows * params.d; ++i) {
      if (static_cast<int>(i % params.d) >= d_v) {
        result.out.start()[i] = fad::Element80(NAN);
        residual[i] = cutlass::bfloat16_t(NAN);
      }
    }
    return result;
  }
};

const char* kWhen[] = {"early", "late", "mixed"};

// Whether the kernel takes the call, and its result is right.
bool run_kernel(Call& call, const Result& expected, const fad::Named& named, unsigned seed,
                int repeats, bool& right) {
  const fad::FwdInstance instance{named.kernels.data(), named.kernels.size(),
                                  &fad::launch_merge<fad::Element80, HEAD_DIM>};
  const fad::FwdKernel& kernel = named.kernels[0];
  FwdParams params = call.params;
  if (named.fp8 && call.k_bytes.empty()) {
    return false;
  }
  params.kv_fp8 = named.fp8;
  params.residual = call.keeps_residual ? &params : nullptr;
  params.o_ptr = call.q->start();  // aligned as the output will be
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const int sms = kFew ? pick({2, 132}) : draw(1, 4);
    fad::FwdPlan plan;
    try {
      plan = fad::plan_fwd(params, instance, call.split, true,
                           {sms, 227 * 1024, 90, kernel.path, kernel.family});
    } catch (const std::runtime_error&) {
      return false;
    }
    emulator::random_source.seed(seed * 64 + repeat);
    emulator::resident_ctas = kFew ? 1 : draw(1, 3);
    emulator::copies_late = kFew && repeat % 2 != 0;
    const int boxes = draw(0, 2), products = draw(0, 2);
    emulator::boxes_happen = static_cast<emulator::When>(boxes);
    emulator::products_happen = static_cast<emulator::When>(products);
    if (std::getenv("EMULATOR_VERBOSE") != nullptr) {
      std::fprintf(stderr, "seed %u, %s: boxes %s, products %s, %d SMs, %d CTAs side by side\n",
                   seed, named.name.c_str(), kWhen[boxes], kWhen[products], sms,
                   emulator::resident_ctas);
    }
    if (!(call.run(plan, named.fp8) == expected)) {
      std::fprintf(stderr, "seed %u, %s, boxes %s, products %s, %d SMs: different\n", seed,
                   named.name.c_str(), kWhen[boxes], kWhen[products], sms);
      call.print();
      right = false;
    }
  }
  return true;
}

}  // namespace

int main(int count_of_arguments, char** arguments) {
  const unsigned first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  const int most = count_of_arguments > 3 ? std::atoi(arguments[3]) : 1 << 30;
  emulator::name_of_barrier = &fad::name_of;
  if (!bytes_are_right()) {
    return 1;
  }
  std::vector<fad::Named> kernels = fad::kernels();
  std::map<std::string, int> runs;
  int different = 0;
  for (unsigned seed = first; seed < first + count && different < most; ++seed) {
    Call call(seed);
    emulator::random_source.seed(seed);
    const Result expected = call.reference();
    for (const fad::Named& named : kernels) {
      bool right = true;
      runs[named.name] += run_kernel(call, expected, named, seed, 2, right);
      different += !right;
    }
  }
  for (const auto& [name, calls] : runs) {
    std::printf("  %s: %d calls\n", name.c_str(), calls);
  }
  const bool ran =
      std::any_of(runs.begin(), runs.end(), [](const auto& run) { return run.second; });
  std::printf("%s\n", !ran        ? "no kernel takes any of the calls"
                      : different ? "different"
                                  : "all equal");
  return !ran || different != 0;
}
