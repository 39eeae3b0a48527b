// Runs CUDA kernels on the CPU, as far as the kernels here need it: a thread at a time, switching
// where threads of a warp or a CTA meet, and at random elsewhere. hopper.h adds what only Hopper
// has.
//
// What it shows: index arithmetic, masks, barriers (data that no barrier or wait orders differs
// between the two kinds of asynchronous copy, or between orders of threads), and that two kernels
// chain the same operations in the same order. What it does not show: the tensor core's own
// arithmetic (sums of 16 products are taken one by one here), speed, and the GPU's memory model.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace emulator {

inline std::mt19937 random_source{0};

// When asynchronous copies happen: at once, or at the last moment that a wait allows.
inline bool copies_late = false;

struct Copy {
  const void* from;
  void* to;
  bool inside;  // else zeros
  std::size_t bytes;
};

// What a thread hands to its warp, and gets back.
struct Exchange {
  const void* address;
  uint32_t a[4], b[2], out[4];
  float c[4], d[4];
  long long value, result;
  int source;
};

struct Cta;

struct Thread {
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  uint3 index{};
  Cta* cta = nullptr;
  std::function<bool()> ready;  // blocked until it is true
  const char* waits_for = "";   // and the rest of what a report of a deadlock says
  long waits_at = 0, waits_value = 0;
  bool done = false, blocked = false;
  int vote = 0;
  std::vector<Copy> open;                 // copies of the group that is not closed yet
  std::vector<std::vector<Copy>> groups;  // closed
  Exchange exchange{};
};

// What a family's emulation adds to a CTA.
struct Extension {
  virtual ~Extension() = default;
  virtual bool advance() = 0;  // where no thread can go on: what may happen by itself, later
  virtual void end() = 0;      // all threads have ended
  virtual void warp_met(int warp, bool orders_memory) = 0;
  virtual void cta_met() = 0;
  virtual void named_arrival(int barrier, int thread) = 0;
  virtual void named_met(int barrier, const std::vector<int>& waiting) = 0;
  virtual void report(const Thread& thread) = 0;  // of a deadlock
};

struct NamedBarrier {
  int arrived = 0, count = 0;
  std::vector<int> waiting;
};

struct Cta {
  std::vector<Thread> threads;
  std::vector<int> warp_arrivals;
  std::vector<int> held;  // for how many rounds a warp is left behind
  NamedBarrier named[16];
  int arrivals = 0, alive = 0, shared_bytes = 0;
  uint3 index{};
  std::unique_ptr<Extension> extension;
};

inline Thread* current = nullptr;
inline int resident_ctas = 1;  // that run side by side: kernels with static shared memory need 1
inline void* scheduler_stack_pointer = nullptr;
inline std::function<void()> body;

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.weak emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void yield() { emulator_switch(&current->stack_pointer, scheduler_stack_pointer); }

inline void sometimes_yield() {
  if (random_source() % 8 == 0) {
    yield();
  }
}

inline void run_thread() {
  body();
  current->done = true;
  yield();
  std::abort();
}

inline int warp_of(const Thread& thread) { return static_cast<int>(thread.index.x) / 32; }

inline Thread& thread_of(int warp, int lane) { return current->cta->threads[warp * 32 + lane]; }
inline Exchange& lane(int warp, int index) { return thread_of(warp, index).exchange; }

template <typename... Words>
[[noreturn]] void fail(const char* format, Words... words) {
  std::fprintf(stderr, format, words...);
  std::fputc('\n', stderr);
  std::exit(3);
}

// Blocks the thread until a condition holds when its turn comes.
inline void wait_until(const char* what, long at, long value, std::function<bool()> ready) {
  Thread& me = *current;
  me.waits_for = what, me.waits_at = at, me.waits_value = value;
  me.ready = std::move(ready);
  if (!me.ready()) {
    me.blocked = true;
    while (me.blocked) {
      yield();
    }
  }
  me.ready = nullptr;
}

// All threads of a warp meet; the last one does the work for all.
template <typename Work>
void meet_warp(Work&& work, bool orders_memory = false) {
  Thread& me = *current;
  Cta& cta = *me.cta;
  const int warp = warp_of(me);
  if (++cta.warp_arrivals[warp] == 32) {
    cta.warp_arrivals[warp] = 0;
    work(warp);
    for (int i = 0; i < 32; ++i) {
      cta.threads[warp * 32 + i].blocked = false;
    }
    if (cta.extension) {
      cta.extension->warp_met(warp, orders_memory);
    }
    sometimes_yield();
  } else {
    me.blocked = true;
    me.waits_for = "the other lanes of its warp";
    while (me.blocked) {
      yield();
    }
  }
}

inline void meet_cta() {
  Thread& me = *current;
  Cta& cta = *me.cta;
  if (++cta.arrivals == cta.alive) {
    cta.arrivals = 0;
    for (Thread& thread : cta.threads) {
      thread.blocked = false;
    }
    if (cta.extension) {
      cta.extension->cta_met();
    }
    sometimes_yield();
  } else {
    me.blocked = true;
    me.waits_for = "__syncthreads";
    while (me.blocked) {
      yield();
    }
  }
}

inline void arrive_at_named(int number, int threads, bool waits) {
  Thread& me = *current;
  Cta& cta = *me.cta;
  NamedBarrier& barrier = cta.named[number];
  if (threads % 32 != 0 || (barrier.arrived > 0 && barrier.count != threads)) {
    fail("named barrier %d: %d threads, %d before", number, threads, barrier.count);
  }
  barrier.count = threads;
  const int thread = static_cast<int>(me.index.x);
  if (waits) {
    barrier.waiting.push_back(thread);
  }
  if (cta.extension) {
    cta.extension->named_arrival(number, thread);
  }
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    const auto waiting = std::move(barrier.waiting);
    barrier.waiting.clear();
    for (const int other : waiting) {
      cta.threads[other].blocked = false;
    }
    if (cta.extension) {
      cta.extension->named_met(number, waiting);
    }
  } else if (waits) {
    me.blocked = true;
    me.waits_for = "a named barrier", me.waits_at = number, me.waits_value = threads;
    while (me.blocked) {
      yield();
    }
  }
  sometimes_yield();
}

inline void carry_out(const Copy& copy) {
  if (copy.inside) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  } else {
    std::memset(copy.to, 0, copy.bytes);
  }
}

inline void start_copy(const void* from, void* to, bool inside, std::size_t bytes) {
  const Copy copy{from, to, inside, bytes};
  if (copies_late) {
    current->open.push_back(copy);
  } else {
    carry_out(copy);
  }
  sometimes_yield();
}

inline void close_group() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

inline void wait_groups(int allowed) {
  auto& groups = current->groups;
  while (static_cast<int>(groups.size()) > allowed) {
    for (const Copy& copy : groups.front()) {
      carry_out(copy);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace emulator

// Words of CUDA C++ that a host compiler does not know.
#undef __launch_bounds__
#define __launch_bounds__(...)
#ifndef __grid_constant__
#define __grid_constant__
#endif

inline dim3 gridDim, blockDim;
#define blockIdx (emulator::current->cta->index)
#define threadIdx (emulator::current->index)

namespace emulator {

constexpr int kSharedBytes = 256 * 1024;  // that there are

inline std::vector<std::unique_ptr<Cta>> unused_ctas;  // their stacks are used again

inline std::unique_ptr<Cta> start_cta(const uint3& index, int threads, int shared_bytes) {
  std::unique_ptr<Cta> cta;
  if (unused_ctas.empty()) {
    cta = std::make_unique<Cta>();
  } else {
    cta = std::move(unused_ctas.back());
    unused_ctas.pop_back();
  }
  cta->index = index;
  cta->shared_bytes = shared_bytes;
  cta->threads.resize(threads);
  cta->warp_arrivals.assign((threads + 31) / 32, 0);
  cta->held.assign((threads + 31) / 32, 0);
  cta->arrivals = 0;
  cta->alive = threads;
  for (NamedBarrier& barrier : cta->named) {
    barrier = {};
  }
  for (int i = 0; i < threads; ++i) {
    Thread& thread = cta->threads[i];
    thread.stack.resize(1 << 17);
    thread.index = uint3{static_cast<unsigned>(i), 0, 0};
    thread.cta = cta.get();
    thread.ready = nullptr;
    thread.done = thread.blocked = false;
    thread.vote = 0;
    thread.open.clear();
    thread.groups.clear();
    // A return address that leaves the stack as a call would, below six saved registers.
    auto top = (reinterpret_cast<uintptr_t>(thread.stack.data()) + thread.stack.size()) & ~63ull;
    auto* words = reinterpret_cast<uintptr_t*>(top) - 2;
    words[0] = reinterpret_cast<uintptr_t>(&run_thread);
    words[1] = 0;
    words -= 6;
    std::memset(words, 0, 6 * sizeof(uintptr_t));
    thread.stack_pointer = words;
  }
  return cta;
}

// Each thread that can run does so until it yields. Returns whether any could.
inline bool run_round(Cta& cta, bool& any_held) {
  const int warps = static_cast<int>(cta.held.size());
  const int first = static_cast<int>(random_source() % warps);
  const bool backwards = random_source() % 2 != 0;
  bool progress = false;
  for (int w = 0; w < warps; ++w) {
    const int warp = (first + w) % warps;
    // Now and then a warp is left behind for a while, or until all others wait for it.
    if (cta.held[warp] == 0 && random_source() % 64 == 0) {
      cta.held[warp] = static_cast<int>(random_source() % 4000);
    }
    if (cta.held[warp] > 0) {
      --cta.held[warp];
      any_held = true;
      continue;
    }
    for (int l = 0; l < 32; ++l) {
      Thread& thread = cta.threads[warp * 32 + (backwards ? 31 - l : l)];
      if (thread.blocked && thread.ready && thread.ready()) {
        thread.blocked = false;
      }
      if (thread.done || thread.blocked) {
        continue;
      }
      progress = true;
      current = &thread;
      emulator_switch(&scheduler_stack_pointer, thread.stack_pointer);
      if (thread.done) {
        --cta.alive;
      }
    }
  }
  return progress;
}

[[noreturn]] inline void report_deadlock(const std::vector<std::unique_ptr<Cta>>& ctas) {
  std::fprintf(stderr, "threads wait for each other\n");
  for (const auto& cta : ctas) {
    const Thread* before = nullptr;
    for (const Thread& thread : cta->threads) {
      if (!thread.done && (before == nullptr || before->waits_for != thread.waits_for ||
                           before->waits_at != thread.waits_at)) {
        std::fprintf(stderr, "  CTA %u, thread %u and on: %s %ld, %ld\n", cta->index.x,
                     thread.index.x, thread.waits_for, thread.waits_at, thread.waits_value);
        if (cta->extension) {
          cta->extension->report(thread);
        }
        before = &thread;
      }
    }
  }
  std::exit(3);
}

// Runs a grid, its CTAs in random order.
template <typename Kernel, typename... Arguments>
void run_grid(dim3 grid, int threads, char* shared, int shared_bytes, Kernel kernel,
              const Arguments&... arguments) {
  std::vector<uint3> order;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        order.push_back(uint3{x, y, z});
      }
    }
  }
  std::shuffle(order.begin(), order.end(), random_source);
  gridDim = grid;
  blockDim = dim3(threads);
  body = [&] { kernel(arguments...); };
  std::vector<std::unique_ptr<Cta>> ctas;
  while (!order.empty() || !ctas.empty()) {
    while (!order.empty() && static_cast<int>(ctas.size()) < resident_ctas) {
      std::memset(shared, 0xff, shared_bytes);
      ctas.push_back(start_cta(order.back(), threads, shared_bytes));
      order.pop_back();
    }
    bool progress = false, any_held = false;
    for (const auto& cta : ctas) {
      progress = run_round(*cta, any_held) || progress;
    }
    for (auto cta = ctas.begin(); cta != ctas.end();) {
      if ((*cta)->alive == 0) {
        if ((*cta)->extension) {
          (*cta)->extension->end();
          (*cta)->extension.reset();
        }
        unused_ctas.push_back(std::move(*cta));
        cta = ctas.erase(cta);
      } else {
        ++cta;
      }
    }
    if (progress || ctas.empty()) {
      continue;
    }
    if (any_held && random_source() % 2 != 0) {
      for (const auto& cta : ctas) {
        std::fill(cta->held.begin(), cta->held.end(), 0);
      }
      continue;
    }
    bool advanced = false;
    for (const auto& cta : ctas) {
      advanced = (cta->extension && cta->extension->advance()) || advanced;
    }
    if (!advanced && any_held) {
      for (const auto& cta : ctas) {
        std::fill(cta->held.begin(), cta->held.end(), 0);
      }
    } else if (!advanced) {
      report_deadlock(ctas);
    }
  }
}

template <typename Value>
Value shuffle(Value value, int source) {
  Exchange& mine = current->exchange;
  std::memset(&mine.value, 0, sizeof mine.value);
  std::memcpy(&mine.value, &value, sizeof value);
  mine.source = source;
  meet_warp([](int warp) {
    for (int i = 0; i < 32; ++i) {
      lane(warp, i).result = lane(warp, lane(warp, i).source).value;
    }
  });
  Value result;
  std::memcpy(&result, &current->exchange.result, sizeof result);
  return result;
}

inline int thread_lane() { return static_cast<int>(current->index.x) % 32; }

}  // namespace emulator

// CUDA's built-in functions.
inline void __syncwarp(unsigned = ~0u) {
  emulator::meet_warp([](int) {}, /*orders_memory=*/true);
}
inline void __syncthreads() { emulator::meet_cta(); }
inline int __syncthreads_or(int predicate) {
  emulator::current->vote = predicate;
  emulator::meet_cta();
  int any = 0;
  for (const emulator::Thread& thread : emulator::current->cta->threads) {
    any |= thread.vote;
  }
  emulator::meet_cta();
  return any;
}
inline void __threadfence() {}
template <typename Value>
Value __shfl_sync(unsigned, Value value, int source, int width = 32) {
  const int lane = emulator::thread_lane();
  return emulator::shuffle(value, lane / width * width + source % width);
}
template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return emulator::shuffle(value, emulator::thread_lane() ^ mask);
}
inline int __reduce_min_sync(unsigned, int value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    value = std::min(value, __shfl_xor_sync(~0u, value, mask));
  }
  return value;
}
inline int __reduce_max_sync(unsigned, int value) { return -__reduce_min_sync(~0u, -value); }
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  auto& mine = emulator::current->exchange;
  mine.value = value;
  emulator::meet_warp([](int warp) {
    long long all = 0;
    for (int i = 0; i < 32; ++i) {
      all |= emulator::lane(warp, i).value;
    }
    for (int i = 0; i < 32; ++i) {
      emulator::lane(warp, i).result = all;
    }
  });
  return static_cast<unsigned>(mine.result);
}
inline int __any_sync(unsigned, int predicate) {
  return static_cast<int>(__reduce_or_sync(~0u, predicate != 0));
}
inline int __all_sync(unsigned, int predicate) { return !__any_sync(~0u, predicate == 0); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
  return before;
}
template <typename Value>
Value __ldcg(const Value* address) {
  return *address;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
using std::max;
using std::min;
