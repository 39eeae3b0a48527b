// Patterns of threads that meet, all of them right: which does compute-sanitizer follow? What it
// reports here is a limit of the tool (CONTRIBUTING.md), and so is the same pattern in a kernel.
//
//     nvcc -arch=sm_90a -o controls tests/gpu/sanitizers/controls.cu
//     compute-sanitizer --tool synccheck controls named-barrier
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kThreads = 96;  // three warps with different work
constexpr int kTurns = 40;

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void wait(uint32_t barrier, int turn) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(
          barrier),
      "r"(turn & 1)
      : "memory");
}

// All warps of a CTA meet, each from a loop of its own.
enum class Meeting { kSyncthreads, kNamed, kUnaligned, kOneFunction, kMbarrier };

__device__ __noinline__ void meet_in_one_function() { __syncthreads(); }

template <Meeting kMeeting>
__device__ __forceinline__ void meet(uint32_t barrier, int turn) {
  if constexpr (kMeeting == Meeting::kSyncthreads) {
    __syncthreads();
  } else if constexpr (kMeeting == Meeting::kNamed) {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  } else if constexpr (kMeeting == Meeting::kUnaligned) {
    asm volatile("barrier.sync 1, %0;" ::"n"(kThreads) : "memory");
  } else if constexpr (kMeeting == Meeting::kOneFunction) {
    meet_in_one_function();
  } else {
    arrive(barrier);
    wait(barrier, turn);
  }
}

template <Meeting kMeeting>
__global__ void different_work(float* out) {
  __shared__ float numbers[2][32];
  __shared__ uint64_t room;
  const uint32_t barrier = shared_address(&room);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init(barrier, kThreads);
  }
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x < 32) {
    for (int turn = 0; turn < kTurns; ++turn) {
      numbers[turn & 1][lane] = static_cast<float>(turn + lane);
      meet<kMeeting>(barrier, turn);
    }
  } else if (threadIdx.x < 64) {
    for (int turn = 0; turn < kTurns; ++turn) {
      meet<kMeeting>(barrier, turn);
      sum += 2.f * numbers[turn & 1][lane];
    }
  } else {
    for (int turn = 0; turn < kTurns; ++turn) {
      meet<kMeeting>(barrier, turn);
      sum = 0.5f * sum + numbers[turn & 1][31 - lane];
    }
  }
  out[threadIdx.x] = sum;
}

// A warp reads what another writes, turn by turn. Who says that it is read: each lane, lane 0
// behind
// __syncwarp, or a thread between the two, that waits for lanes and is waited for.
enum class Word { kEachLane, kLaneZero, kEachLaneThroughAThread, kLaneZeroThroughAThread };

template <Word kWord>
__global__ void hand_over(float* out) {
  constexpr bool kThrough =
      kWord == Word::kEachLaneThroughAThread || kWord == Word::kLaneZeroThroughAThread;
  constexpr bool kLanes = kWord == Word::kEachLane || kWord == Word::kEachLaneThroughAThread;
  __shared__ float numbers[32];
  __shared__ uint64_t rooms[3];
  const uint32_t full = shared_address(rooms);
  const uint32_t empty = full + 8;
  const uint32_t passed_on = full + 16;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init(full, 32);
    init(empty, kLanes ? 32 : 1);
    init(passed_on, 1);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int turn = 0; turn < kTurns; ++turn) {
      wait(kThrough ? passed_on : empty, turn + 1);
      numbers[lane] = static_cast<float>(turn + lane);
      arrive(full);
    }
  } else if (threadIdx.x < 64) {
    float sum = 0.f;
    for (int turn = 0; turn < kTurns; ++turn) {
      wait(full, turn);
      sum += numbers[31 - lane];
      if constexpr (kLanes) {
        arrive(empty);
      } else {
        __syncwarp();
        if (lane == 0) {
          arrive(empty);
        }
      }
    }
    out[lane] = sum;
  } else if (kThrough && lane == 0) {
    for (int turn = 0; turn < kTurns; ++turn) {
      wait(empty, turn);
      arrive(passed_on);
    }
  }
}

struct Control {
  const char* name;
  void (*kernel)(float*);
};

const Control kControls[] = {
    {"syncthreads", different_work<Meeting::kSyncthreads>},
    {"named-barrier", different_work<Meeting::kNamed>},
    {"unaligned-barrier", different_work<Meeting::kUnaligned>},
    {"one-function", different_work<Meeting::kOneFunction>},
    {"mbarrier", different_work<Meeting::kMbarrier>},
    {"each-lane", hand_over<Word::kEachLane>},
    {"lane-zero", hand_over<Word::kLaneZero>},
    {"each-lane-through-a-thread", hand_over<Word::kEachLaneThroughAThread>},
    {"lane-zero-through-a-thread", hand_over<Word::kLaneZeroThroughAThread>},
};

}  // namespace

int main(int count, char** words) {
  float* out = nullptr;
  for (const Control& control : kControls) {
    if (count < 2) {
      std::printf("%s\n", control.name);
    } else if (std::strcmp(words[1], control.name) == 0) {
      if (cudaMalloc(&out, kThreads * sizeof(float)) != cudaSuccess) {
        return 2;
      }
      control.kernel<<<4, kThreads>>>(out);
      const cudaError_t error = cudaDeviceSynchronize();
      std::printf("%s: %s\n", control.name, cudaGetErrorString(error));
      return error == cudaSuccess ? 0 : 1;
    }
  }
  return count < 2 ? 0 : 2;
}
