// Draws calls of the backward's loop in turns, runs them through the Hopper kernels, and compares
// the bits with those of plain loops in the order of docs/adr/0019: backward FIRST COUNT. The
// kernel before the loop does not run: numbers of the rows are drawn. See hopper.h for what this
// shows.
#include "emulator.h"

#include "fold_parts.cu"
#include "hopper.h"
#include "sm90/backward/bwd_launch.cuh"

#include "draws.h"
#include "elements.h"

namespace fad {

template <int kHeadDimV>
using TileOf = sm90::BwdTile<Element90, HEAD_DIM, kHeadDimV, HEAD_DIM <= 64 ? 128 : 64,
                             HEAD_DIM <= 128 ? 128 : 64>;
using Tile = TileOf<HEAD_DIM>;
using NarrowTile = TileOf<HEAD_DIM == 192 ? 128 : HEAD_DIM>;

template <typename Tile>
std::string name_of(uint32_t offset, int, int) {
  const struct {
    const char* name;
    uint32_t first;
  } kinds[] = {{"dq empty", Tile::kDqEmpty},
               {"dq full", Tile::kDqFull},
               {"numbers full", Tile::kNumbersFull},
               {"dO empty", Tile::kDoEmpty},
               {"dO full", Tile::kDoFull},
               {"Q empty", Tile::kQEmpty},
               {"Q full", Tile::kQFull},
               {"V full", Tile::kVFull},
               {"K full", Tile::kKFull}};
  for (const auto& kind : kinds) {
    if (offset >= kind.first) {
      return kind.name + (" " + std::to_string((offset - kind.first) / 8));
    }
  }
  return "?";
}

}  // namespace fad

namespace {

using Number = fad::Element80;
using fad::Tile;

using Numbers = NumbersOf<Number>;

float rounded(float value) { return static_cast<float>(Number(value)); }

bool same(const void* a, const void* b, std::size_t bytes) { return std::memcmp(a, b, bytes) == 0; }

// Returns whether the bits are right in both of two runs.
bool run_case(unsigned seed) {
  draw_source.seed(seed);
  fad::BwdParams p{};
  p.is_bf16 = !HALF, p.p_dropout = p.rp_dropout = 1.f;
  const int b = draw(1, 2), h_k = draw(1, 2), group = pick({1, 1, 2, 3}), h = h_k * group;
  const int d = chance(25) ? HEAD_DIM - 8 * draw(1, 3) : HEAD_DIM;
  std::mt19937 own_source(seed);
  const int d_v = seed % 2 == 0 ? 8 * (1 + static_cast<int>(own_source() % (d / 8))) : d;
  const bool narrow = d_v <= fad::NarrowTile::kHeadDimV && own_source() % 4 != 0;
  const bool packed = chance(50);
  const int sq = about(pick({32, 64, 128, 192, 256, 300, 520})),
            sk = about(pick({40, 64, 128, 256, 384}));
  std::vector<int> starts_q(b + 1), starts_k(b + 1);
  for (int i = 0; i < b; ++i) {
    const auto length = [&](int most) {
      return !packed ? most : chance(15) ? 0 : chance(30) ? most : draw(0, most);
    };
    starts_q[i + 1] = starts_q[i] + length(sq);
    starts_k[i + 1] = starts_k[i] + length(sk);
  }
  const int total_q = packed ? starts_q[b] + 5 : b * sq,
            total_k = packed ? starts_k[b] + 5 : b * sk;
  p.b = b, p.h = h, p.h_k = h_k, p.h_h_k_ratio = group, p.d = d, p.d_rounded = HEAD_DIM;
  p.d_v = d_v;
  p.seqlen_q = sq, p.seqlen_k = sk, p.seqlen_q_rounded = (sq + 127) / 128 * 128;
  p.total_q = total_q, p.total_k = total_k;
  p.scale_softmax = 1.f / std::sqrt(static_cast<float>(d));
  p.scale_softmax_log2 = p.scale_softmax * 1.44269504f;
  p.scale_softmax_rp_dropout = p.scale_softmax;
  p.window_size_left = chance(25) ? draw(0, 200) : -1;
  p.window_size_right = chance(25) ? draw(0, 100) : chance(50) ? 0 : -1;
  const int left = p.window_size_left < 0 ? 1 << 29 : p.window_size_left;
  const int right = p.window_size_right < 0 ? 1 << 29 : p.window_size_right;
  set_strides(p, sk);
  p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = d;
  p.do_row_stride = p.dq_row_stride = p.q_row_stride;
  p.do_batch_stride = p.dq_batch_stride = p.q_batch_stride;
  p.dk_row_stride = p.dv_row_stride = p.k_row_stride;
  p.dk_batch_stride = p.dv_batch_stride = p.k_batch_stride;
  if (packed) {
    p.cu_seqlens_q = starts_q.data(), p.cu_seqlens_k = starts_k.data();
    p.unpadded_lse = true;
  }
  const std::size_t q_count = std::size_t(total_q) * h * d,
                    k_count = std::size_t(total_k) * h_k * d;
  Numbers q(q_count), dout(q_count), k(k_count), v(k_count);
  const std::size_t used_q = packed ? std::size_t(starts_q[b]) * h * d : q_count;
  const std::size_t used_k = packed ? std::size_t(starts_k[b]) * h_k * d : k_count;
  q.fill(0, used_q), dout.fill(0, used_q), k.fill(0, used_k), v.fill(0, used_k);
  for (Numbers* const numbers : {&dout, &v}) {  // columns that they do not have
    for (std::size_t i = 0; i < (numbers == &v ? k_count : q_count); ++i) {
      if (static_cast<int>(i % d) >= d_v) {
        numbers->start()[i] = Number(NAN);
      }
    }
  }
  p.q_ptr = q.start(), p.do_ptr = dout.start(), p.k_ptr = k.start(), p.v_ptr = v.start();
  const int64_t sum_rows =
      packed ? int64_t{h} * (total_q + 128 * b) : int64_t{b} * h * p.seqlen_q_rounded;
  std::vector<float> row_sums(sum_rows), lse(std::size_t(total_q) * h);
  for (float& value : row_sums) {
    value = draw(-1000, 1000) / 1000.f;
  }
  for (float& value : lse) {
    value = chance(3) ? INFINITY : draw(0, 8000) / 1000.f;
  }
  p.dsoftmax_sum = row_sums.data(), p.softmax_lse_ptr = lse.data();
  // Plain loops.
  Numbers dq(q_count), dk(k_count), dv(k_count);
  for (int bidb = 0; bidb < b; ++bidb) {
    const int first_q = packed ? starts_q[bidb] : bidb * sq,
              first_k = packed ? starts_k[bidb] : bidb * sk;
    const int n_q = packed ? starts_q[bidb + 1] - first_q : sq;
    const int n_k = packed ? starts_k[bidb + 1] - first_k : sk;
    std::vector<std::vector<std::array<float, 2>>> sums;  // dk and dv of each key, by chunks
    for (int bidh = 0; bidh < h; ++bidh) {
      const int head_k = bidh / group;
      const auto q_at = [&](int row, int c) {
        return (std::size_t(first_q + row) * h + bidh) * d + c;
      };
      const auto k_at = [&](int key, int c) {
        return (std::size_t(first_k + key) * h_k + head_k) * d + c;
      };
      std::vector<float> weights(std::size_t(n_q) * n_k), gradients(weights);
      const int64_t sum_at = packed ? int64_t{bidh} * (total_q + 128 * b) + first_q + 128 * bidb
                                    : (int64_t{bidb} * h + bidh) * p.seqlen_q_rounded;
      for (int row = 0; row < n_q; ++row) {
        const float its_lse = packed ? lse[std::size_t(bidh) * total_q + first_q + row]
                                     : lse[(std::size_t(bidb) * h + bidh) * sq + row];
        for (int key = 0; key < n_k; ++key) {
          const int position = row + n_k - n_q;
          if (key > position + right || key < position - left) {
            continue;
          }
          float score = 0.f, dp = 0.f;
          for (int c = 0; c < d; ++c) {
            score += k.at(k_at(key, c)) * q.at(q_at(row, c));
            dp += c < d_v ? v.at(k_at(key, c)) * dout.at(q_at(row, c)) : 0.f;
          }
          const float weight = std::exp2(
              std::fma(score, p.scale_softmax_log2, -(its_lse * static_cast<float>(M_LOG2E))));
          weights[std::size_t(row) * n_k + key] = rounded(weight);
          gradients[std::size_t(row) * n_k + key] = rounded(weight * (dp - row_sums[sum_at + row]));
        }
      }
      for (int row = 0; row < n_q; ++row) {
        for (int c = 0; c < d; ++c) {
          float sum = 0.f;
          for (int first = 0; first < n_k; first += Tile::kKeys) {
            float part = 0.f;
            for (int key = first; key < std::min(n_k, first + Tile::kKeys); ++key) {
              part += gradients[std::size_t(row) * n_k + key] * k.at(k_at(key, c));
            }
            sum += part;
          }
          dq.start()[q_at(row, c)] = Number(sum * p.scale_softmax);
        }
      }
      // Of each chunk of rows: the heads of a group, first to last.
      const std::size_t chunks = std::max((n_q + fad::kChunkRows - 1) / fad::kChunkRows, 1);
      sums.resize(chunks, std::vector<std::array<float, 2>>(std::size_t(n_k) * d));
      for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        const int begin = static_cast<int>(chunk) * fad::kChunkRows;
        const int end = std::min(n_q, begin + fad::kChunkRows);
        for (int key = 0; key < n_k; ++key) {
          for (int c = 0; c < d; ++c) {
            float sum_k = 0.f, sum_v = 0.f;
            for (int first = (end - 1) / Tile::kRows * Tile::kRows; first >= begin;
                 first -= Tile::kRows) {
              for (int row = first; row < std::min(end, first + Tile::kRows); ++row) {
                sum_k += gradients[std::size_t(row) * n_k + key] * q.at(q_at(row, c));
                sum_v += weights[std::size_t(row) * n_k + key] * dout.at(q_at(row, c));
              }
            }
            auto& total = sums[chunk][std::size_t(key) * d + c];
            total = bidh % group == 0 ? std::array{sum_k, sum_v}
                                      : std::array{total[0] + sum_k, total[1] + sum_v};
          }
        }
      }
      if (bidh % group < group - 1) {
        continue;
      }
      for (; sums.size() > 1;
           sums.resize((sums.size() + 1) / 2)) {  // pairs of chunks, of pairs ...
        for (std::size_t pair = 0; 2 * pair < sums.size(); ++pair) {
          for (std::size_t i = 0; i < sums[0].size(); ++i) {
            const auto& left = sums[2 * pair][i];
            const bool two = 2 * pair + 1 < sums.size();
            const auto right = two ? sums[2 * pair + 1][i] : std::array{0.f, 0.f};
            sums[pair][i] = {left[0] + right[0], left[1] + right[1]};
          }
        }
      }
      for (int key = 0; key < n_k; ++key) {
        for (int c = 0; c < d; ++c) {
          const auto& total = sums[0][std::size_t(key) * d + c];
          dk.start()[k_at(key, c)] = Number((0.f + total[0]) * p.scale_softmax);
          if (c < d_v) {
            dv.start()[k_at(key, c)] = Number(0.f + total[1]);
          }
        }
      }
      sums.clear();
    }
  }

  bool right_bits = true;
  for (int repeat = 0; repeat < 2; ++repeat) {
    emulator::random_source.seed(seed * 64 + repeat);
    emulator::resident_ctas = draw(1, 4);
    emulator::boxes_happen = static_cast<emulator::When>(draw(0, 2));
    emulator::products_happen = static_cast<emulator::When>(draw(0, 2));
    Numbers its_dq(q_count), its_dk(k_count), its_dv(k_count);
    const int chunks = (sq + fad::kChunkRows - 1) / fad::kChunkRows;
    p.parts = {1, group, 1};
    while (p.parts.chunks < chunks && (p.parts.count == 1 || chance(50))) {
      p.parts.chunks *= 2;
    }
    if (chance(33)) {
      p.parts.heads = 1, p.parts.count = group, p.parts.chained = chunks;
    } else if (chance(50)) {  // as few chunks to a part
      p.parts.chunks = 1 << draw(0, 2);
      p.parts.heads = p.parts.chunks == 1 && chance(50) ? 1 : group;
      p.parts.count = (chunks + p.parts.chunks - 1) / p.parts.chunks * (group / p.parts.heads);
    }
    std::vector<float> dq_sums(sum_rows * HEAD_DIM + 128 * HEAD_DIM + 4);
    const std::size_t ctas =
        (total_k / Tile::kKeys + b * (sk / Tile::kKeys + 2)) * h_k * p.parts.count;
    std::vector<unsigned> progress(fad::kTurnCounters * ctas), freed_slots(ctas * chunks + 1);
    unsigned tickets = 0;
    p.slot_sums = p.parts.chained + fad::kept_sums(p.parts.chunks, p.parts.heads);
    p.num_slots = draw(1, 5);
    std::vector<float> slots((p.parts.chained > 0 ? ctas : std::size_t(p.num_slots)) * p.slot_sums *
                                 2 * Tile::kKeys * HEAD_DIM,
                             NAN);
    std::vector<float> part_sums(2 * k_count * p.parts.count, NAN);
    p.slots = p.slot_sums > 0 ? slots.data() : nullptr;
    p.freed_slots = freed_slots.data();
    p.dq_ptr = its_dq.start(), p.dk_ptr = its_dk.start(), p.dv_ptr = its_dv.start();
    p.dq_accum_ptr = aligned(dq_sums.data(), 16);
    p.dk_sums = p.parts.fold() ? part_sums.data() : nullptr;
    p.dv_sums = p.parts.fold() ? part_sums.data() + k_count * p.parts.count : nullptr;
    p.tickets = &tickets, p.progress = progress.data();
    p.in_turns = true, p.shares_in_flight = draw(1, 4);
    if (narrow) {
      emulator::name_of_barrier = &fad::name_of<fad::NarrowTile>;
      fad::sm90::launch_bwd_sm90<fad::NarrowTile>(p, nullptr);
    } else {
      emulator::name_of_barrier = &fad::name_of<fad::Tile>;
      fad::sm90::launch_bwd_sm90<fad::Tile>(p, nullptr);
    }
    fad::sm90::launch_bwd_dq<fad::Tile>(p, nullptr);
    if (p.parts.fold()) {
      fad::fold_parts(p, nullptr);
    }
    const bool equal[] = {same(its_dq.data.data(), dq.data.data(), 2 * q_count),
                          same(its_dk.data.data(), dk.data.data(), 2 * k_count),
                          same(its_dv.data.data(), dv.data.data(), 2 * k_count)};
    if (!equal[0] || !equal[1] || !equal[2]) {
      std::fprintf(stderr,
                   "seed %u: dq %d, dk %d, dv %d equal; b %d, h %d / %d, d %d and %d, q %d, k %d, "
                   "windows %d %d, packed %d, parts of %d chunks, %d heads, chained %d\n",
                   seed, equal[0], equal[1], equal[2], b, h, h_k, d, d_v, sq, sk,
                   p.window_size_left, p.window_size_right, packed, p.parts.chunks, p.parts.heads,
                   p.parts.chained);
      right_bits = false;
    }
  }
  return right_bits;
}

}  // namespace

int main(int, char** arguments) {
  const unsigned first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  int different = 0;
  for (unsigned seed = first; seed < first + count; ++seed) {
    different += !run_case(seed);
  }
  std::printf("  backward: %u calls\n%s\n", count, different == 0 ? "all equal" : "different");
  return different != 0;
}
