// Runs CUDA kernels on the CPU, as far as the kernels for a few rows need it: a CTA at a time, a
// thread at a time, switching where threads of a warp or a CTA meet, and at random elsewhere.
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
};

// What a thread hands to its warp, and gets back.
struct Exchange {
  const void* address;
  uint32_t a[4], b[2], out[4];
  float c[4], d[4];
  long long value, result;
  int source;
};

struct Thread {
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  uint3 index{};
  bool done = false, blocked = false;
  bool waits_for_grid = false;  // blocked until the grid before has run
  bool waited_for_grid = false;
  int vote = 0;
  std::vector<Copy> open;                 // copies of the group that is not closed yet
  std::vector<std::vector<Copy>> groups;  // closed
  Exchange exchange{};
};

struct Cta {
  std::vector<Thread> threads;
  std::vector<int> warp_arrivals;
  int arrivals = 0, alive = 0;
};

inline Cta cta;
inline Thread* current = nullptr;
inline void* scheduler_stack_pointer = nullptr;
inline std::function<void()> body;

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
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

inline Exchange& lane(int warp, int index) { return cta.threads[warp * 32 + index].exchange; }

// All threads of a warp meet; the last one does the work for all.
template <typename Work>
void meet_warp(Work&& work) {
  Thread& me = *current;
  const int warp = warp_of(me);
  if (++cta.warp_arrivals[warp] == 32) {
    cta.warp_arrivals[warp] = 0;
    work(warp);
    for (int i = 0; i < 32; ++i) {
      cta.threads[warp * 32 + i].blocked = false;
    }
    sometimes_yield();
  } else {
    me.blocked = true;
    while (me.blocked) {
      yield();
    }
  }
}

inline void meet_cta() {
  Thread& me = *current;
  if (++cta.arrivals == cta.alive) {
    cta.arrivals = 0;
    for (Thread& thread : cta.threads) {
      thread.blocked = false;
    }
    sometimes_yield();
  } else {
    me.blocked = true;
    while (me.blocked) {
      yield();
    }
  }
}

// The grid launched last, which runs when the next is launched: or, where that one may start before
// it has ended, when threads wait for it.
inline std::function<void()> grid_before;

inline void finish_grids() {
  if (grid_before) {
    const auto run = std::move(grid_before);
    grid_before = nullptr;
    run();
  }
}

inline void wait_for_grid_before() {
  current->waited_for_grid = true;
  if (grid_before) {
    current->blocked = current->waits_for_grid = true;
    while (current->blocked) {
      yield();
    }
  }
}

inline void carry_out(const Copy& copy) {
  if (copy.inside) {
    std::memcpy(copy.to, copy.from, 16);
  } else {
    std::memset(copy.to, 0, 16);
  }
}

inline void start_copy(const void* from, void* to, bool inside) {
  const Copy copy{from, to, inside};
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

inline uint3 blockIdx;
inline dim3 gridDim, blockDim;
#define threadIdx (emulator::current->index)

namespace emulator {

constexpr int kSharedBytes = 256 * 1024;  // that there are

// Runs the grid before, between two moments of the CTA at hand, and lets that one's threads go on.
inline void run_grid_before(char* shared) {
  const std::vector<char> memory(shared, shared + kSharedBytes);
  Cta waiting;
  std::swap(cta, waiting);
  const auto its_body = body;
  const uint3 index = blockIdx;
  const dim3 grid = gridDim, threads = blockDim;
  finish_grids();
  std::memcpy(shared, memory.data(), kSharedBytes);
  std::swap(cta, waiting);
  body = its_body;
  blockIdx = index;
  gridDim = grid;
  blockDim = threads;
  for (Thread& thread : cta.threads) {
    thread.blocked = thread.blocked && !thread.waits_for_grid;
    thread.waits_for_grid = false;
  }
}

// Runs a grid, its CTAs in random order. early: it may start before the grid launched before it has
// ended; then no thread may end without having waited for that one.
template <typename Kernel, typename... Arguments>
void run_grid(dim3 grid, int threads, char* shared, int shared_bytes, bool early, Kernel kernel,
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
  cta.threads.resize(threads);
  for (const uint3& index : order) {
    blockIdx = index;
    std::memset(shared, 0xff, shared_bytes);
    cta.warp_arrivals.assign((threads + 31) / 32, 0);
    cta.arrivals = 0;
    cta.alive = threads;
    for (int i = 0; i < threads; ++i) {
      Thread& thread = cta.threads[i];
      thread.stack.resize(1 << 17);
      thread.index = uint3{static_cast<unsigned>(i), 0, 0};
      thread.done = thread.blocked = false;
      thread.waits_for_grid = thread.waited_for_grid = false;
      thread.vote = 0;
      thread.open.clear();
      thread.groups.clear();
      // A return address that leaves the stack as a call would, below six saved registers.
      auto top = (reinterpret_cast<uintptr_t>(thread.stack.data()) + thread.stack.size()) & ~15ull;
      auto* words = reinterpret_cast<uintptr_t*>(top) - 2;
      words[0] = reinterpret_cast<uintptr_t>(&run_thread);
      words[1] = 0;
      words -= 6;
      std::memset(words, 0, 6 * sizeof(uintptr_t));
      thread.stack_pointer = words;
    }
    int alive = threads;
    const int warps = (threads + 31) / 32;
    // Now and then a warp is left behind for a while, or until all others wait for it.
    std::vector<int> held(warps, 0);
    while (alive > 0) {
      bool progress = false, any_held = false;
      const int first = static_cast<int>(random_source() % warps);
      const bool backwards = random_source() % 2 != 0;
      for (int w = 0; w < warps; ++w) {
        const int warp = (first + w) % warps;
        if (held[warp] == 0 && random_source() % 64 == 0) {
          held[warp] = static_cast<int>(random_source() % 4000);
        }
        if (held[warp] > 0) {
          --held[warp];
          any_held = true;
          continue;
        }
        for (int l = 0; l < 32; ++l) {
          Thread& thread = cta.threads[warp * 32 + (backwards ? 31 - l : l)];
          if (thread.done || thread.blocked) {
            continue;
          }
          progress = true;
          current = &thread;
          emulator_switch(&scheduler_stack_pointer, thread.stack_pointer);
          if (thread.done) {
            --alive;
            --cta.alive;
            if (early && !thread.waited_for_grid) {
              std::fprintf(stderr, "a thread ended that did not wait for the grid before\n");
              std::abort();
            }
          }
        }
      }
      if (!progress && any_held) {
        std::fill(held.begin(), held.end(), 0);
      } else if (!progress && grid_before) {
        run_grid_before(shared);
      } else if (!progress) {
        std::fprintf(stderr, "threads wait for each other\n");
        std::abort();
      }
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
  emulator::meet_warp([](int) {});
}
inline void __syncthreads() { emulator::meet_cta(); }
inline int __syncthreads_or(int predicate) {
  emulator::current->vote = predicate;
  emulator::meet_cta();
  int any = 0;
  for (const emulator::Thread& thread : emulator::cta.threads) {
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
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
using std::max;
using std::min;
