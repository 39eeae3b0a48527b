// What Hopper's kernels need besides emulator.h: barriers in shared memory with phases and bytes,
// the copy engine, tensor cores that work by themselves, and a check that accesses of shared memory
// are ordered. run.py puts this into the kernels' headers in the place of functions that hold PTX.
//
// What it shows: waits that never end, phases, byte counts, boxes and their swizzle, descriptors of
// operands, blocks that are freed or accumulators that are touched too early (copies and products
// happen as early or as late as they may, warps are left behind), and, by vector clocks, accesses
// of shared memory that no barrier orders, or no proxy fence. What it does not show: the tensor
// cores' own arithmetic, races in global memory but for those that change bits, registers, speed,
// and what the GPU's memory model leaves open beyond this order.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <map>
#include <optional>
#include <string>

#include "emulator.h"
#include "stubs/cutlass/fast_math.h"

namespace emulator {

enum class When { kEarly, kLate, kMixed };
inline When boxes_happen = When::kEarly, products_happen = When::kEarly;

inline bool now(When when) {
  return when == When::kEarly || (when == When::kMixed && random_source() % 2 != 0);
}

// Who accesses shared memory: threads, the tensor cores as each warp uses them, and the copy engine
// as each barrier counts it.
constexpr int kMostThreads = 640, kMostBarriers = 64;
constexpr int kTensorCores = kMostThreads, kCopyEngine = kTensorCores + kMostThreads / 32;
constexpr int kAdds = kCopyEngine + kMostBarriers;  // of the copy engine, to global memory
constexpr int kAgents = kAdds + 1;

struct Clock {
  std::array<uint32_t, kAgents> at{};
  void join(const Clock& other) {
    for (int i = 0; i < kAgents; ++i) {
      at[i] = std::max(at[i], other.at[i]);
    }
  }
};

// What is known to have happened before; of ordinary accesses, before accesses of the copy engine
// and the tensor cores too (a fence lies between); and loads whose values a product has used, as
// far as its end tells: they have ended, with a fence or without one.
struct Known {
  Clock any, fenced, loaded;
  void join(const Known& other) {
    any.join(other.any);
    fenced.join(other.fenced);
    loaded.join(other.loaded);
  }
};

struct Access {
  int agent = -1;
  uint32_t time = 0;
  bool by_engine() const { return agent >= kMostThreads; }
};

struct Word {
  Access write;
  std::vector<Access> reads;  // since then
};

struct Map {  // what a CUtensorMap holds here
  const char* data;
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

struct Box {
  Map map;
  uint32_t to, barrier;
  int at[4];
  uint32_t phase;
};

struct Add {
  float* to;
  uint32_t from;
  int bytes;
  std::vector<float> read;
};

struct Barrier {
  int count = 0, pending = 0, number = 0;
  long bytes = 0;
  uint32_t phase = 0;
  bool fenced = false;
  Access made;
  Known arriving, complete;
};

struct Operand {
  uint64_t descriptor = 0;
  bool along_k = true;
};

struct Product {
  int columns;
  bool half, accumulate, a_in_registers;
  Operand a, b;
  float* acc[32];
  const uint32_t* registers[32];
  bool done = false;
};

struct TensorCore {                             // as a warp uses it
  std::vector<std::vector<Product>> groups{1};  // the last one is open
  uint32_t closed = 0;
  int registers = 0;
};

inline std::string (*name_of_barrier)(uint32_t offset, int shared_bytes, int threads) = nullptr;

constexpr uint32_t kSharedStart = 1024;  // the system's

struct Hopper : Extension {
  Cta& cta;
  std::vector<char> memory;
  std::vector<Word> words;
  std::vector<Known> known;  // by threads
  std::map<uint32_t, Barrier> barriers;
  std::array<Known, 16> named;
  std::vector<Box> boxes;  // under way
  std::vector<Add> adds;   // of one thread
  uint32_t adds_begun = 0;
  std::vector<bool> acquired;  // by a thread, without a proxy fence since
  std::vector<TensorCore> tensor_cores;
  std::vector<bool> products_fenced;
  std::vector<uint32_t> issued;  // when each thread issued its last product

  explicit Hopper(Cta& cta)
      : cta(cta),
        memory(cta.shared_bytes, static_cast<char>(0xff)),
        words(cta.shared_bytes / 4),
        known(cta.threads.size()),
        tensor_cores(cta.threads.size() / 32),
        products_fenced(cta.threads.size(), false),
        issued(cta.threads.size()),
        acquired(cta.threads.size()) {
    if (known.size() > kMostThreads) {
      fail("%zu threads", known.size());
    }
    for (std::size_t i = 0; i < known.size(); ++i) {
      known[i].any.at[i] = 1;
    }
  }

  std::string name(uint32_t address) const {
    const std::string known = name_of_barrier == nullptr
                                  ? ""
                                  : name_of_barrier(address - kSharedStart, cta.shared_bytes,
                                                    static_cast<int>(cta.threads.size()));
    return known + " at " + std::to_string(address - kSharedStart);
  }
  static std::string name(const Access& access) {
    return access.agent < kMostThreads ? "thread " + std::to_string(access.agent)
           : access.agent < kCopyEngine
               ? "a product of warp " + std::to_string(access.agent - kTensorCores)
           : access.agent == kAdds
               ? "an add to global memory"
               : "a copy for barrier " + std::to_string(access.agent - kCopyEngine);
  }
  [[noreturn]] void race(const char* what, std::size_t word, const std::string& by,
                         const Access& before) const {
    fail("CTA %u: %s word %zu by %s: not ordered after %s", cta.index.x, what, word, by.c_str(),
         before.agent < 0 ? "any write" : name(before).c_str());
  }

  char* at(uint32_t address, int bytes) {
    if (address < kSharedStart || address - kSharedStart + bytes > memory.size() ||
        address % (bytes < 16 ? bytes : 16) != 0) {
      fail("shared memory: %d bytes at %u", bytes, address);
    }
    return memory.data() + address - kSharedStart;
  }

  static bool knows(const Clock& clock, const Access& access) {
    return clock.at[access.agent] >= access.time;
  }
  static void add_read(Word& word, const Access& read, const Clock& clock) {
    std::erase_if(word.reads, [&](const Access& before) {
      return before.by_engine() == read.by_engine() && knows(clock, before);
    });
    word.reads.push_back(read);
  }
  Access mine(int thread) const { return {thread, known[thread].any.at[thread]}; }

  void thread_reads(uint32_t address, int bytes) {
    at(address, bytes);
    const int me = static_cast<int>(current->index.x);
    for (uint32_t i = (address - kSharedStart) / 4; i < (address - kSharedStart + bytes) / 4; ++i) {
      if (words[i].write.agent < 0 || !knows(known[me].any, words[i].write)) {
        race("read of", i, name(mine(me)), words[i].write);
      }
      add_read(words[i], mine(me), known[me].any);
    }
  }

  void thread_writes(uint32_t address, int bytes) {
    at(address, bytes);
    const int me = static_cast<int>(current->index.x);
    for (uint32_t i = (address - kSharedStart) / 4; i < (address - kSharedStart + bytes) / 4; ++i) {
      const auto check = [&](const Access& before) {
        if (!knows(known[me].any, before)) {
          race("write of", i, name(mine(me)), before);
        }
      };
      if (words[i].write.agent >= 0) {
        check(words[i].write);
      }
      for (const Access& read : words[i].reads) {
        check(read);
      }
      words[i].reads.clear();
      words[i].write = mine(me);
    }
  }

  // Barriers.
  Barrier& barrier(uint32_t address) {
    const auto found = barriers.find(address);
    const int me = static_cast<int>(current->index.x);
    if (found == barriers.end() || !knows(known[me].any, found->second.made)) {
      fail("thread %d: barrier %s is not initialised", me, name(address).c_str());
    }
    return found->second;
  }
  void release(Known& to) {
    const int me = static_cast<int>(current->index.x);
    to.join(known[me]);
    ++known[me].any.at[me];
  }
  void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) {
      ++b.phase;
      b.pending = b.count;
      b.arriving.any.at[kCopyEngine + b.number] = b.phase;
      b.complete = b.arriving;
      b.arriving = {};
    }
  }
  void init(uint32_t address, int count) {
    at(address, 8);
    const int me = static_cast<int>(current->index.x);
    Barrier b;
    b.count = b.pending = count;
    b.number = static_cast<int>(barriers.size());
    b.made = mine(me);
    if (b.number >= kMostBarriers || count <= 0 || barriers.contains(address)) {
      fail("barrier %s: initialised to %d", name(address).c_str(), count);
    }
    barriers[address] = b;
  }
  void arrive(uint32_t address, int bytes) {
    Barrier& b = barrier(address);
    b.bytes += bytes;
    if (--b.pending < 0) {
      fail("barrier %s: more than %d arrivals", name(address).c_str(), b.count);
    }
    release(b.arriving);
    settle(b);
    sometimes_yield();
  }
  void wait(uint32_t address, uint32_t parity) {
    sometimes_yield();
    Barrier& b = barrier(address);
    if (parity > 1) {
      fail("barrier %s: parity %u", name(address).c_str(), parity);
    }
    wait_until("barrier", address, parity, [&b, parity] { return (b.phase & 1) != parity; });
    known[current->index.x].join(b.complete);
    sometimes_yield();
  }

  // Copies.
  void start_box(uint32_t to, const CUtensorMap& map, uint32_t address, int column, int head,
                 int row, int batch) {
    Barrier& b = barrier(address);
    if (!b.fenced) {
      fail("barrier %s: the copy engine may not see that it is initialised", name(address).c_str());
    }
    Box box;
    std::memcpy(&box.map, &map, sizeof box.map);
    box.to = to, box.barrier = address, box.phase = b.phase;
    box.at[0] = column, box.at[1] = head, box.at[2] = row, box.at[3] = batch;
    if ((to - kSharedStart) % 1024 != 0) {
      fail("a box at %u", to);
    }
    const int bytes = bytes_of(box.map);
    at(to, 16), at(to + bytes - 16, 16);
    const int me = static_cast<int>(current->index.x);
    const Access write{kCopyEngine + b.number, b.phase + 1};
    const uint32_t first = (to - kSharedStart) / 4;
    for (uint32_t i = first; i < first + bytes / 4; ++i) {
      const auto check = [&](const Access& before, bool is_load) {
        if (!knows(before.by_engine() ? known[me].any : known[me].fenced, before) &&
            !(is_load && !before.by_engine() && knows(known[me].loaded, before))) {
          race("copy to", i, name(mine(me)), before);
        }
      };
      if (words[i].write.agent >= 0) {
        check(words[i].write, false);
      }
      for (const Access& read : words[i].reads) {
        check(read, true);
      }
      words[i].reads.clear();
      words[i].write = write;
    }
    if (now(boxes_happen)) {
      carry_out(box);
    } else {
      boxes.push_back(box);
    }
    sometimes_yield();
  }
  static int bytes_of(const Map& map) {
    return static_cast<int>(2 * map.box[0] * map.box[1] * map.box[2] * map.box[3]);
  }
  void carry_out(const Box& box) {
    const Map& map = box.map;
    uint32_t row = 0;
    for (uint32_t i2 = 0; i2 < map.box[2]; ++i2) {
      for (uint32_t i1 = 0; i1 < map.box[1]; ++i1, ++row) {
        for (uint32_t i0 = 0; i0 < map.box[0]; ++i0) {
          const int64_t at[4] = {box.at[0] + i0, int64_t{box.at[1]} + i1, int64_t{box.at[2]} + i2,
                                 box.at[3]};
          bool inside = true;
          int64_t from = 2 * at[0];
          for (int i = 0; i < 4; ++i) {
            inside = inside && at[i] >= 0 && at[i] < static_cast<int64_t>(map.sizes[i]);
            from += i == 0 ? 0 : at[i] * static_cast<int64_t>(map.strides[i - 1]);
          }
          const uint32_t to = swizzled(box.to - kSharedStart + row * 128 + 2 * i0);
          if (inside) {
            std::memcpy(memory.data() + to, map.data + from, 2);
          } else {
            std::memset(memory.data() + to, 0, 2);
          }
        }
      }
    }
    Barrier& b = barriers.at(box.barrier);
    if (b.phase != box.phase) {
      fail("barrier %s: its phase ended before a copy", name(box.barrier).c_str());
    }
    b.bytes -= bytes_of(map);
    if (b.pending == 0 && b.bytes < 0) {
      fail("barrier %s: %ld bytes more than expected", name(box.barrier).c_str(), -b.bytes);
    }
    settle(b);
  }
  // Sixteen bytes change places within eight rows of 128 bytes.
  static uint32_t swizzled(uint32_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

  bool advance() override {
    if (boxes.empty()) {
      return false;
    }
    const std::size_t which = random_source() % boxes.size();
    const Box box = boxes[which];
    boxes.erase(boxes.begin() + which);
    carry_out(box);
    return true;
  }

  // Adds to global memory.
  void start_add(float* to, uint32_t from, int bytes) {
    at(from, 16), at(from + bytes - 16, 16);
    const int me = static_cast<int>(current->index.x);
    if (acquired[me] || reinterpret_cast<uintptr_t>(to) % 16 != 0) {
      fail("an add to global memory without a fence, or not aligned");
    }
    const Access read{kAdds, ++adds_begun};
    for (uint32_t i = (from - kSharedStart) / 4; i < (from - kSharedStart + bytes) / 4; ++i) {
      const Access& write = words[i].write;
      if (write.agent < 0 || !knows(write.by_engine() ? known[me].any : known[me].fenced, write)) {
        race("add of", i, name(read), write);
      }
      add_read(words[i], read, known[me].any);
    }
    adds.push_back({to, from, bytes, {}});
    if (now(boxes_happen)) {
      end_adds(true);
    }
    sometimes_yield();
  }
  void end_adds(bool added) {
    for (Add& add : adds) {
      if (add.read.empty()) {
        add.read.resize(add.bytes / 4);
        std::memcpy(add.read.data(), at(add.from, 16), add.bytes);
      }
      for (std::size_t i = 0; added && i < add.read.size(); ++i) {
        add.to[i] += add.read[i];
      }
    }
    if (added) {
      adds.clear();
    }
  }
  void wait_adds(bool added) {
    end_adds(added || now(boxes_happen));
    known[current->index.x].any.at[kAdds] = adds_begun;
    sometimes_yield();
  }

  // Products.
  uint32_t place(const Operand& operand, int line, int k) const {  // line: a row or column
    const uint64_t d = operand.descriptor;
    const uint32_t start = static_cast<uint32_t>(d & 0x3fff) << 4;
    const uint32_t leading = static_cast<uint32_t>(d >> 16 & 0x3fff) << 4;
    const uint32_t stride = static_cast<uint32_t>(d >> 32 & 0x3fff) << 4;
    if (d >> 62 != 1 || (d >> 49 & 7) != 0) {
      fail("an operand without the swizzle of 128 bytes");
    }
    const uint32_t at = operand.along_k ? start + line / 8 * stride + line % 8 * 128 + 2 * k
                                        : start + line / 64 * leading + k / 8 * stride +
                                              k % 8 * 128 + line % 64 * 2;
    return kSharedStart + swizzled(at - kSharedStart);
  }
  float number(const Operand& operand, int line, int k, bool half) {
    uint16_t bits;
    std::memcpy(&bits, at(place(operand, line, k), 2), 2);
    return to_float(bits, half);
  }
  static float to_float(uint32_t bits, bool half) {
    return half ? static_cast<float>(cutlass::half_t::from_bits(static_cast<uint16_t>(bits)))
                : static_cast<float>(cutlass::bfloat16_t::from_bits(static_cast<uint16_t>(bits)));
  }
  // first: row 0 of the warp's own sixteen.
  void check_operand(const Operand& operand, int warp, int first, int lines) {
    TensorCore& core = tensor_cores[warp];
    const Access read{kTensorCores + warp, core.closed + 1};
    Access trusted;
    for (int line = first; line < first + lines; line += operand.along_k ? 1 : 2) {
      for (int k = 0; k < 16; k += operand.along_k ? 2 : 1) {
        const uint32_t i = (place(operand, line, k) - kSharedStart) / 4;
        if (i >= words.size()) {
          fail("an operand outside shared memory");
        }
        Word& word = words[i];
        if (word.write.agent < 0) {
          race("product with", i, name(read), word.write);
        }
        if (word.write.agent != trusted.agent || word.write.time != trusted.time) {
          for (int lane = 0; lane < 32; ++lane) {
            const Known& its = known[warp * 32 + lane];
            if (!knows(word.write.by_engine() ? its.any : its.fenced, word.write)) {
              race("product with", i, name(read), word.write);
            }
          }
          trusted = word.write;
        }
        add_read(word, read, known[warp * 32].any);
      }
    }
  }
  void issue(const Product& product, int warp) {
    check_operand(product.b, warp, 0, product.columns);
    if (!product.a_in_registers) {
      check_operand(product.a, warp, warp % 4 * 16, 16);
    }
    TensorCore& core = tensor_cores[warp];
    core.groups.back().push_back(product);
    for (int lane = 0; lane < 32; ++lane) {
      const int thread = warp * 32 + lane;
      issued[thread] = known[thread].any.at[thread]++;
    }
    if (now(products_happen)) {
      carry_out_products(warp, static_cast<int>(core.groups.size()));
    }
  }
  void carry_out_products(int warp, int groups) {
    TensorCore& core = tensor_cores[warp];
    for (int i = 0; i < groups; ++i) {
      for (Product& product : core.groups[i]) {
        if (!product.done) {
          carry_out(product, warp);
          product.done = true;
        }
      }
    }
  }
  void carry_out(const Product& product, int warp) {
    static float a[16][16], b[16][256], c[16][256];
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        if (product.a_in_registers) {
          const uint32_t pair = product.registers[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
          a[row][k] = to_float(pair >> 16 * (k % 2), product.half);
        } else {
          a[row][k] = number(product.a, warp % 4 * 16 + row, k, product.half);
        }
      }
    }
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < product.columns; ++column) {
        b[k][column] = number(product.b, column, k, product.half);
      }
    }
    const auto result = [&](int row, int column) -> float& {
      return product.acc[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
    };
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < product.columns; ++column) {
        c[row][column] = product.accumulate ? result(row, column) : 0.f;
      }
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < product.columns; ++column) {
          c[row][column] += a[row][k] * b[k][column];
        }
      }
      for (int column = 0; column < product.columns; ++column) {
        result(row, column) = c[row][column];
      }
    }
  }
  void commit(int warp) {
    tensor_cores[warp].groups.emplace_back();
    ++tensor_cores[warp].closed;
  }
  void wait_products(int warp, int allowed) {
    TensorCore& core = tensor_cores[warp];
    const int closed = static_cast<int>(core.groups.size()) - 1;
    if (closed > allowed) {
      carry_out_products(warp, closed - allowed);
      core.groups.erase(core.groups.begin(), core.groups.begin() + (closed - allowed));
    }
    const uint32_t complete = core.closed - std::min<uint32_t>(core.closed, allowed);
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t& seen = known[warp * 32 + lane].any.at[kTensorCores + warp];
      seen = std::max(seen, complete);
      known[warp * 32 + lane].loaded.at[warp * 32 + lane] = issued[warp * 32 + lane];
      products_fenced[warp * 32 + lane] = false;
    }
  }

  // Where threads meet.
  void warp_met(int warp, bool orders_memory) override {
    if (orders_memory) {
      Known all;
      for (int lane = 0; lane < 32; ++lane) {
        all.join(known[warp * 32 + lane]);
      }
      for (int lane = 0; lane < 32; ++lane) {
        known[warp * 32 + lane] = all;
        ++known[warp * 32 + lane].any.at[warp * 32 + lane];
      }
    }
    if (products_happen == When::kMixed && random_source() % 8 == 0) {
      carry_out_products(warp, static_cast<int>(tensor_cores[warp].groups.size()));
    }
    if (boxes_happen == When::kMixed && random_source() % 8 == 0) {
      advance();
    }
  }
  void cta_met() override {
    Known all;
    for (const Known& one : known) {
      all.join(one);
    }
    for (std::size_t i = 0; i < known.size(); ++i) {
      known[i] = all;
      ++known[i].any.at[i];
    }
  }
  void named_arrival(int number, int) override { release(named[number]); }
  void named_met(int number, const std::vector<int>& waiting) override {
    for (const int thread : waiting) {
      known[thread].join(named[number]);
    }
    named[number] = {};
  }
  void end() override {
    for (const auto& [address, b] : barriers) {
      if (b.bytes != 0) {
        fail("barrier %s: %ld bytes expected at the end", name(address).c_str(), b.bytes);
      }
    }
    int registers = 0;
    for (const TensorCore& core : tensor_cores) {
      registers += 32 * core.registers;
      if (core.groups.size() > 1 || !core.groups[0].empty()) {
        fail("products that no thread has waited for");
      }
    }
    const int ctas = 228 * 1024 / (cta.shared_bytes + 1024);
    if (!boxes.empty() || !adds.empty() || registers > 65536 / ctas) {
      fail("%zu boxes and %zu adds under way at the end; %d registers", boxes.size(), adds.size(),
           registers);
    }
  }
  void report(const Thread& thread) override {
    if (thread.waits_for == std::string("barrier")) {
      const auto address = static_cast<uint32_t>(thread.waits_at);
      const Barrier& b = barriers.at(address);
      std::fprintf(stderr, "    %s: phase %u, %d of %d arrivals and %ld bytes to come\n",
                   name(address).c_str(), b.phase, b.pending, b.count, b.bytes);
    }
  }
};

inline Hopper& hopper() {
  Cta& cta = *current->cta;
  if (!cta.extension) {
    cta.extension = std::make_unique<Hopper>(cta);
  }
  return static_cast<Hopper&>(*cta.extension);
}

inline CUresult encode(CUtensorMap* to, CUtensorMapDataType, cuuint32_t dimensions, void* data,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map map{static_cast<const char*>(data)};
  bool right = dimensions == 4 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
               reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] == 64;
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = sizes[i], map.box[i] = box[i];
    right = right && sizes[i] > 0 && sizes[i] <= 1ull << 32 && box[i] > 0 && box[i] <= 256 &&
            steps[i] == 1;
    if (i < 3) {
      map.strides[i] = strides[i];
      right = right && strides[i] % 16 == 0 && strides[i] > 0 && strides[i] < 1ull << 40;
    }
  }
  std::memcpy(to, &map, sizeof map);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <typename Value>
Value load(uint32_t address) {
  sometimes_yield();
  Hopper& at = hopper();
  at.thread_reads(address, sizeof(Value));
  Value value;
  std::memcpy(&value, at.at(address, sizeof value), sizeof value);
  return value;
}

template <typename Value>
void store(uint32_t address, Value value) {
  sometimes_yield();
  Hopper& at = hopper();
  at.thread_writes(address, sizeof(Value));
  std::memcpy(at.at(address, sizeof value), &value, sizeof value);
}

// One of a warp's 32 calls of a product.
inline void issue_product(Product product, float* acc, const uint32_t* registers) {
  Hopper& at = hopper();
  if (!at.products_fenced[current->index.x]) {
    fail("thread %u: a product without wgmma_fence after a wait", current->index.x);
  }
  current->exchange.address = acc;
  current->exchange.value = reinterpret_cast<long long>(registers);
  meet_warp([&](int warp) {
    for (int i = 0; i < 32; ++i) {
      product.acc[i] = static_cast<float*>(const_cast<void*>(lane(warp, i).address));
      product.registers[i] = reinterpret_cast<const uint32_t*>(lane(warp, i).value);
    }
    at.issue(product, warp);
  });
}

}  // namespace emulator

inline std::size_t __cvta_generic_to_shared(const void*) { return emulator::kSharedStart; }

namespace fad::sm90 {

// barrier.h
inline void barrier_init(uint32_t barrier, int arrivals) {
  emulator::hopper().init(barrier, arrivals);
}
inline void barrier_arrive(uint32_t barrier) { emulator::hopper().arrive(barrier, 0); }
inline void barrier_expect(uint32_t barrier, int bytes) {
  emulator::hopper().arrive(barrier, bytes);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::hopper().wait(barrier, parity);
}
inline void fence_barrier_init() {
  for (auto& [address, barrier] : emulator::hopper().barriers) {
    barrier.fenced = true;
  }
}
inline void fence_async_proxy() {
  auto& known = emulator::hopper().known[threadIdx.x];
  known.fenced = known.any;
}
inline float4 load_shared(uint32_t address) { return emulator::load<float4>(address); }
inline float2 load_shared_pair(uint32_t address) { return emulator::load<float2>(address); }
inline uint32_t load_shared_word(uint32_t address) { return emulator::load<uint32_t>(address); }
inline int4 load_shared_ints(uint32_t address) { return emulator::load<int4>(address); }
inline void store_shared(uint32_t address, float4 value) { emulator::store(address, value); }
inline void store_shared(uint32_t address, float2 value) { emulator::store(address, value); }
inline void store_shared(uint32_t address, float value) { emulator::store(address, value); }
inline void store_shared_word(uint32_t address, uint32_t value) { emulator::store(address, value); }
inline void store_shared_ints(uint32_t address, int4 value) { emulator::store(address, value); }
template <int kRegisters>
void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  emulator::hopper().tensor_cores[threadIdx.x / 32].registers = kRegisters;
}
template <int kRegisters>
void give_registers() {
  take_registers<kRegisters>();
}

// tma.h
inline auto encode_tensor_map() { return &emulator::encode; }
inline void prefetch_tensor_map(const CUtensorMap&) {}
inline void load_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column,
                     int head, int row, int batch) {
  emulator::hopper().start_box(shared, map, barrier, column, head, row, batch);
}

inline void add_bulk(float* global, uint32_t shared, int bytes) {
  emulator::hopper().start_add(global, shared, bytes);
}
inline void wait_bulk_read() { emulator::hopper().wait_adds(false); }
inline void wait_bulk_added() { emulator::hopper().wait_adds(true); }
inline void fence_global_async_proxy() { emulator::hopper().acquired[threadIdx.x] = false; }

// wgmma.h
inline void wgmma_fence() { emulator::hopper().products_fenced[threadIdx.x] = true; }
inline void wgmma_commit() {
  emulator::meet_warp([](int warp) { emulator::hopper().commit(warp); });
}
template <int kGroups>
void wgmma_wait() {
  emulator::meet_warp([](int warp) { emulator::hopper().wait_products(warp, kGroups); });
}
template <typename Value, int kCount>
void hold(Value (&)[kCount]) {}

// fragment.h
template <typename Element>
constexpr bool is_half = sizeof(Element) == 2 && std::is_same_v<Element, __half>;
template <typename Element>
uint32_t packed(float low, float high) {
  const auto bits = [](float value) {
    using Number = std::conditional_t<is_half<Element>, cutlass::half_t, cutlass::bfloat16_t>;
    const Number number(value);
    uint16_t two_bytes;
    std::memcpy(&two_bytes, &number, 2);
    return static_cast<uint32_t>(two_bytes);
  };
  return bits(low) | bits(high) << 16;
}
inline void store_transposed(uint32_t address, const uint32_t* pairs) {
  auto& mine = emulator::current->exchange;
  std::memcpy(mine.a, pairs, 16);
  emulator::hopper().thread_writes(address, 16);
  mine.value = address;
  emulator::meet_warp([](int warp) {
    for (int i = 0; i < 32; ++i) {
      const auto& from = emulator::lane(warp, i);
      for (int matrix = 0; matrix < 4; ++matrix) {
        for (int j = 0; j < 2; ++j) {  // element (i / 4, i % 4 * 2 + j) goes to row i % 4 * 2 + j
          const auto row =
              static_cast<uint32_t>(emulator::lane(warp, matrix * 8 + i % 4 * 2 + j).value);
          const auto bits = static_cast<uint16_t>(from.a[matrix] >> 16 * j);
          std::memcpy(emulator::hopper().at(row, 16) + i / 4 * 2, &bits, 2);
        }
      }
    }
  });
}

// fwd_consumer.cuh
inline float tanh_approx(float x) { return std::tanh(x); }

// fwd_waiting.cuh
inline float4 load_four(const char* from) {
  emulator::sometimes_yield();
  float4 four;
  std::memcpy(&four, from, sizeof four);
  return four;
}
inline float4 load_four_if(bool present, const char* from) {
  return present ? load_four(from) : make_float4(0.f, 0.f, 0.f, 0.f);
}
inline void store_four(char* to, float4 four) {
  emulator::sometimes_yield();
  std::memcpy(to, &four, sizeof four);
}
inline float2 load_pair_if(bool present, const float* from) {
  emulator::sometimes_yield();
  float2 pair{};
  if (present) {
    std::memcpy(&pair, from, sizeof pair);
  }
  return pair;
}
inline void store_pair_if(bool present, float* to, float2 pair) {
  emulator::sometimes_yield();
  if (present) {
    std::memcpy(to, &pair, sizeof pair);
  }
}

}  // namespace fad::sm90

inline void __stcg(float4* address, float4 value) { *address = value; }

namespace fad {

// turns.h
inline void store_release(unsigned* address, unsigned value) {
  emulator::sometimes_yield();
  *address = value;
  emulator::sometimes_yield();
}
inline unsigned load_acquire(const unsigned* address) { return *address; }
inline unsigned wait_for(const unsigned* counter, unsigned wanted) {
  emulator::wait_until("a counter", reinterpret_cast<long>(counter), wanted,
                       [=] { return *counter >= wanted; });
  emulator::hopper().acquired[threadIdx.x] = true;
  return *counter;
}

// row_block.h
inline int read_thread() { return static_cast<int>(threadIdx.x); }
inline int read_cta() { return static_cast<int>(blockIdx.x); }

}  // namespace fad
