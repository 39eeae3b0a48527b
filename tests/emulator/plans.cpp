// Draws calls and devices, and checks each plan: launches take all work exactly once, the kernel
// that merges finds each part where it was left, and scratch memory stays within its bounds. Of the
// backward, how many heads run at the same time.
// plans FIRST COUNT. No kernel runs.
#include "emulator.h"

#include "bwd.h"
#include "sm80/fwd.cuh"

#include "hopper.h"
#include "sm90/forward/fwd_entry.h"
#include "sm90/forward/fwd_launch.cuh"

#include "draws.h"
#include "elements.h"
#include "plan.h"

namespace fad {

// Of the plan at hand.
struct Seen {
  const FwdPlan* plan;
  const FwdParams* params;
  const Device* device;
  const char* scratch;
  long long row_tiles, units;
  std::vector<unsigned char> work;  // (splits, units, row tiles): how often
  std::vector<unsigned char> merged;
  long long next_cta = 0;
} seen;

template <typename... Words>
[[noreturn]] void wrong(const char* format, Words... words) {
  const FwdParams& p = *seen.params;
  const FwdPlan& plan = *seen.plan;
  std::fprintf(
      stderr,
      "b %d, h %d / %d, d %d, q %d, k %d, windows %d %d, %d SMs: family %d, path %d, block_m "
      "%d, group %d, splits %d, ctas %u, %u a launch, scratch %zu\n",
      p.b, p.h, p.h_k, p.d, p.seqlen_q, p.seqlen_k, p.window_size_left, p.window_size_right,
      seen.device->num_sms, static_cast<int>(plan.kernel->family),
      static_cast<int>(plan.kernel->path), plan.kernel->block_m, plan.group, plan.num_splits,
      plan.ctas, plan.ctas_per_launch, plan.scratch_bytes);
  emulator::fail(format, words...);
}

void check_scratch(const void* from, std::size_t bytes, std::size_t alignment) {
  const auto* begin = static_cast<const char*>(from);
  if (begin < seen.scratch || begin + bytes > seen.scratch + seen.plan->scratch_bytes ||
      reinterpret_cast<uintptr_t>(begin) % alignment != 0) {
    wrong("scratch memory: %zu bytes at %td", bytes, begin - seen.scratch);
  }
}

void count(std::vector<unsigned char>& of, long long split, long long unit, long long row_tile) {
  const long long at = (split * seen.units + unit) * seen.row_tiles + row_tile;
  if (split < 0 || unit < 0 || unit >= seen.units || row_tile < 0 || row_tile >= seen.row_tiles ||
      at >= static_cast<long long>(of.size()) || of[at]++ != 0) {
    wrong("split %lld, unit %lld, row tile %lld: outside, or a second time", split, unit, row_tile);
  }
}

void check_parts(const FwdParams& params) {
  const std::size_t rows =
      static_cast<std::size_t>(params.num_splits) * params.parts.ctas * params.parts.rows;
  check_scratch(params.parts.acc, rows * HEAD_DIM * sizeof(float), 16);
  check_scratch(params.parts.state, rows * sizeof(float2), 8);
  const auto* end = reinterpret_cast<const char*>(params.parts.acc + rows * HEAD_DIM);
  if (reinterpret_cast<const char*>(params.parts.state) < end) {
    wrong("parts overlap");
  }
  if (params.tile_counter != nullptr) {
    check_scratch(params.tile_counter, sizeof(unsigned), 4);
    if (reinterpret_cast<const char*>(params.tile_counter) <
        reinterpret_cast<const char*>(params.parts.state + rows)) {
      wrong("the counter lies in the parts");
    }
  }
}

// Launches come in order.
void check_range(const FwdParams& params) {
  if (params.parts.first_cta != seen.next_cta || params.parts.ctas == 0) {
    wrong("row blocks from %u, expected %lld", params.parts.first_cta, seen.next_cta);
  }
  seen.next_cta += params.parts.ctas;
}

void launch_sm80(const FwdParams& params, unsigned ctas, cudaStream_t) {
  const Path path = seen.plan->kernel->path;
  if (path == Path::kOneCta || (path == Path::kFewRows && !seen.plan->writes_parts)) {
    seen.next_cta += ctas;
    return;
  }
  check_range(params);
  if (ctas != params.parts.ctas) {
    wrong("%u CTAs for %u row blocks", ctas, params.parts.ctas);
  }
  if (seen.plan->writes_parts) {
    check_parts(params);
  } else {
    const std::size_t blocks = (params.seqlen_k + 63) / 64;
    check_scratch(params.scores.scores, 4 * std::size_t{ctas} * blocks * 64 * kScoreRows, 16);
    check_scratch(params.scores.maxima, 4 * std::size_t{ctas} * blocks * kScoreRows, 4);
    check_scratch(params.scores.arrivals, 4 * std::size_t{ctas} * (HEAD_DIM / 32), 4);
  }
}

template <int kHeadDimV, int kBlockM>
void launch_sm90(const FwdParams& params, unsigned ctas, cudaStream_t stream) {
  using T = sm90::FwdTile<sm90::bf16, HEAD_DIM, kHeadDimV, kBlockM, false>;
  if (ctas == 0 || static_cast<int>(ctas) > T::kCtasPerSm * seen.device->num_sms) {
    wrong("%u CTAs", ctas);
  }
  const bool parts = params.parts.acc != nullptr;
  if (parts) {
    check_range(params);
    check_parts(params);
  } else if (params.tile_counter != nullptr) {
    check_scratch(params.tile_counter, sizeof(unsigned), 4);
  }
  emulator::observe = [&](dim3 grid, std::vector<const void*> arguments) {
    const auto& call = *static_cast<const sm90::FwdCall*>(arguments[3]);
    if (grid.x != ctas) {
      wrong("a grid of %u", grid.x);
    }
    std::vector<unsigned char> dealt(call.tiles);
    if (call.tile_counter == nullptr) {  // dealt_tile
      for (unsigned cta = 0; cta < ctas; ++cta) {
        for (int turn = 0;; ++turn) {
          const int number = turn * ctas + (turn % 2 == 0 ? cta : ctas - 1 - cta);
          if (number >= call.tiles) {
            break;
          }
          ++dealt[number];
        }
      }
    }
    for (int number = 0; number < call.tiles; ++number) {
      if (call.tile_counter == nullptr && dealt[number] != 1) {
        wrong("tile %d is dealt out %d times", number, dealt[number]);
      }
      const sm90::Work work = sm90::work_of<T>(call, number);
      const long long unit =
          static_cast<long long>(work.bidb) * (params.h / params.group) + work.bidh / params.group;
      if (work.bidh % params.group != 0 || work.first_row % T::kRows != 0) {
        wrong("head %d, row %d", work.bidh, work.first_row);
      }
      count(seen.work, work.split, unit, work.first_row / T::kRows);
      if (parts) {  // as store_part and the kernel that merges see it
        const int tile = static_cast<int>(unit + 1) * call.row_tiles - 1 -
                         work.first_row / T::kRows - call.first_tile;
        const Place place =
            group_place(params, params.parts.block_m, params.parts.first_cta + tile);
        if (tile < 0 || tile >= call.split_tiles || place.bidb != work.bidb ||
            place.bidh != work.bidh || place.m_block != work.first_row / T::kRows) {
          wrong("the part of tile %d", number);
        }
      }
    }
  };
  sm90::fwd_sm90<sm90::bf16, HEAD_DIM, kHeadDimV, kBlockM>(sm90::params_of(params, params.tree),
                                                           ctas, stream);
  emulator::observe = nullptr;
}

void merge(const FwdParams& params, cudaStream_t) {
  check_parts(params);
  for (unsigned cta = 0; cta < params.parts.ctas; ++cta) {
    const Place place = group_place(params, params.parts.block_m, params.parts.first_cta + cta);
    count(
        seen.merged, 0,
        static_cast<long long>(place.bidb) * (params.h / params.group) + place.bidh / params.group,
        place.m_block);
  }
}

#define ROW80(path, block_m, covers) \
  {Family::kSm80, Path::path, covers, block_m, 90 * 1024, 95 * 1024, &launch_sm80},
#define ROW90(path, head_dim_v, block_m, covers)                      \
  sm90::fwd_entry<HEAD_DIM, head_dim_v, block_m, Path::path, covers>( \
      &launch_sm90<head_dim_v, block_m>),
const FwdKernel kKernels[] = {SM90_ROWS(ROW90) SM80_ROWS(ROW80)};
const FwdInstance kInstance{kKernels, sizeof(kKernels) / sizeof(*kKernels), &merge};

const BwdKernel kBwdKernel{Family::kSm80, ~Features{0}, 64, 64, 0, nullptr, nullptr};
const BwdInstance kBwdInstance{&kBwdKernel, 1, nullptr, nullptr};

// Parts hold each leaf once and fit the scratch memory; as many run at the same time as have sums
// of dq that fit into a share of L2. That must not depend on rounded lengths in params: the op sets
// them after the plan, and explain never does.
void check_bwd_plan(const FwdParams& drawn, const Device& device) {
  BwdParams params{};
  static_cast<FLASH_NAMESPACE::Flash_fwd_params&>(params) = drawn;
  const bool full = params.window_size_left < 0 && params.window_size_right < 0;
  for (const int rounded : {0, 1 << 20}) {
    params.seqlen_q_rounded = params.d_rounded = rounded;
    const BwdPlan plan = plan_bwd(params, kBwdInstance, true, device);
    const KeyParts& parts = plan.parts;
    const long long rows =
        std::min<long long>((params.seqlen_q + 127) / 128 * 128, 1ll * kChunkRows * parts.chunks);
    const long long fit = device.l2_bytes / (full ? 6 : 3) / (4 * rows * HEAD_DIM);
    const long long expected =
        std::min<long long>(std::max<long long>(fit, full ? 2 : 4), device.num_sms);
    const int chunks = (params.seqlen_q + kChunkRows - 1) / kChunkRows;
    const int runs = (chunks + parts.chunks - 1) / parts.chunks;
    const long long bytes = 8ll * params.b * params.seqlen_k * params.h_k * params.d * parts.count;
    if (!plan.in_turns || plan.shares_in_flight != expected ||
        (parts.chunks & (parts.chunks - 1)) != 0 ||
        parts.count != runs * (params.h_h_k_ratio / parts.heads) ||
        (parts.heads < params.h_h_k_ratio && parts.chunks > 1 && parts.chained == 0) ||
        (parts.chained > 0 && (runs > 1 || parts.chained != chunks)) ||
        (parts.fold() && bytes > static_cast<long long>(kScratchBytes))) {
      emulator::fail(
          "backward of %d queries, %d SMs: %d in flight, expected %lld; %d parts of %d "
          "chunks and %d heads, %d chained",
          params.seqlen_q, device.num_sms, plan.shares_in_flight, expected, parts.count,
          parts.chunks, parts.heads, parts.chained);
    }
  }
}

}  // namespace fad

int main(int, char** arguments) {
  using namespace fad;
  const unsigned first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  std::map<std::string, long> plans;
  long checked = 0;
  std::vector<char> data(64);
  char* const start = aligned(data.data(), 16);
  std::vector<char> scratch_memory(64);
  for (unsigned seed = first; seed < first + count; ++seed) {
    draw_source.seed(seed);
    FwdParams params{};
    params.b = draw(0, 1) ? draw(1, 4) : draw(1, 40);
    params.h_k = pick({1, 1, 2, 4, 8, 3});
    params.h_h_k_ratio = pick({1, 1, 2, 4, 8, 3, 5, 6, 12, 16, 64, 128});
    params.h = params.h_k * params.h_h_k_ratio;
    params.d = draw(0, 3) ? HEAD_DIM : HEAD_DIM - 8 * draw(1, 3);
    params.d_rounded = HEAD_DIM;
    params.d_v = seed % 4 ? params.d : 8 * (1 + static_cast<int>(seed / 4) % (params.d / 8));
    params.seqlen_q = draw(0, 1) ? draw(1, 20) : draw(0, 1) ? draw(1, 700) : draw(1, 6000);
    params.seqlen_k = draw(0, 1) ? draw(1, 3000) : draw(1, 140000);
    params.p_dropout = draw(0, 19) ? 1.f : 0.9f, params.rp_dropout = 1.f;
    params.scale_softmax = params.scale_softmax_log2 = 1.f;
    params.softcap = draw(0, 9) ? 0.f : 1.f;
    params.window_size_left = draw(0, 3) ? -1 : draw(0, 4000);
    params.window_size_right = draw(0, 3) ? 0 : draw(0, 1) ? -1 : draw(0, 100);
    params.is_causal = params.window_size_left < 0 && params.window_size_right == 0;
    params.is_seqlens_k_cumulative = true;
    params.q_ptr = params.k_ptr = params.v_ptr = params.o_ptr = start;
    params.residual = draw(0, 3) ? nullptr : start;
    params.kv_fp8 = seed % 6 == 0;
    set_strides(params, params.seqlen_k);
    params.kv_batch = params.b;
    params.total_q = params.b * params.seqlen_q;
    params.total_k = params.b * params.seqlen_k;
    const int split = pick({0, 64, 128, 256, 512, 1024, 2048, 192, 4096});
    Device device{pick({1, 14, 108, 132, 148}),
                  pick({99, 163, 227}) * 1024,
                  pick({80, 90, 90}),
                  std::nullopt,
                  std::nullopt,
                  50 << 20};
    if (draw(0, 2) == 0) {
      device.path = static_cast<Path>(draw(0, 3));
    }
    if (draw(0, 2) == 0) {
      device.family = static_cast<Family>(draw(0, 1));
    }
    check_bwd_plan(params, device);
    FwdPlan plan;
    try {
      plan = plan_fwd(params, kInstance, split, draw(0, 4) != 0, device);
    } catch (const std::runtime_error&) {
      ++plans["none"];
      continue;
    }
    seen = {&plan, &params, &device};
    const FwdKernel& kernel = *plan.kernel;
    seen.units = static_cast<long long>(params.b) * params.h / plan.group;
    int room = 1;  // as the copy engine loads boxes of heads
    while (room < plan.group) {
      room *= 2;
    }
    const long long block_rows =
        kernel.family == Family::kSm90 ? kernel.block_m / room * plan.group : kernel.block_m;
    seen.row_tiles =
        (static_cast<long long>(params.seqlen_q) * plan.group + block_rows - 1) / block_rows;
    const long long parts = plan.writes_parts ? plan.num_splits : 1;
    if (seen.units * seen.row_tiles * parts > 300000) {
      continue;
    }
    if (seen.units * seen.row_tiles != plan.ctas || params.h_h_k_ratio % plan.group != 0) {
      wrong("%lld units of %lld row tiles", seen.units, seen.row_tiles);
    }
    const bool takes_turns = kernel.ctas_per_sm > 0;
    if (takes_turns) {
      seen.work.assign(seen.units * seen.row_tiles * parts, 0);
    }
    if (plan.writes_parts) {
      seen.merged.assign(seen.units * seen.row_tiles, 0);
    }
    if (plan.scratch_bytes > kScratchBytes && plan.ctas_per_launch > 1 &&
        kernel.path != Path::kScoresFirst) {
      wrong("scratch memory");
    }
    if (plan.scratch_bytes > kScratchBytes && !device.path.has_value()) {
      ++plans["one row block beyond the scratch memory's bound"];
    }
    scratch_memory.resize(std::max(scratch_memory.size(), plan.scratch_bytes + 512));
    char* const scratch = aligned(scratch_memory.data(), 512);
    seen.scratch = scratch;
    run_plan(plan, params, plan.scratch_bytes > 0 ? scratch : nullptr, nullptr);
    const bool all =
        std::all_of(seen.work.begin(), seen.work.end(), [](int n) { return n == 1; }) &&
        std::all_of(seen.merged.begin(), seen.merged.end(), [](int n) { return n == 1; });
    if (!all || ((!takes_turns || plan.writes_parts) && seen.next_cta != plan.ctas)) {
      wrong("not all work is done");
    }
    ++checked;
    ++plans[std::string(kernel.family == Family::kSm80 ? "sm80" : "sm90") + " path " +
            std::to_string(static_cast<int>(kernel.path)) +
            (plan.launches() > 1 ? ", launches" : "")];
  }
  for (const auto& [name, number] : plans) {
    std::printf("  %s: %ld\n", name.c_str(), number);
  }
  if (checked == 0) {
    emulator::fail("no plan was checked");
  }
  std::printf("%ld plans are right\n", checked);
}
