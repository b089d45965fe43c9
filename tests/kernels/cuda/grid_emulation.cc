#include "tests/kernels/cuda/grid_emulation.h"

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/emulated_cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx = {};
uint3 blockIdx = {};
dim3 blockDim;
dim3 gridDim;

namespace expertmesh {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "grid emulation: %s\n", what);
  std::abort();
}

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

// One stack that runs one kernel thread after another.
struct Fiber {
  std::unique_ptr<char[]> stack;
  fcontext_t context = nullptr;
  State state = State::kDone;
  uint3 thread_idx = {};
  unsigned mask = 0;
  WarpOperation operation = WarpOperation::kBarrier;
  uint64_t handed_in = 0;
};

class Emulator {
 public:
  cudaError_t Run(const cudaLaunchConfig_t& config, const std::function<void()>& kernel_thread);
  int current_index() const { return current_; }
  Fiber& current() {
    if (current_ < 0) Fail("a kernel's function was called outside a launch");
    return *fibers_[static_cast<size_t>(current_)];
  }
  Fiber& lane_of_warp(int lane) {
    return *fibers_[static_cast<size_t>(current_ / kWarp * kWarp + lane)];
  }
  // Gives the turn back until the barrier is complete.
  void Block(State state) {
    current().state = state;
    LeaveFiber();
  }

  uint64_t order = 0;
  unsigned grid_limit = 0;
  EmulationCounts counts;

 private:
  void RunBlock(int num_threads);
  void RunWarp(int first, int num_threads);
  bool ReleaseWarpBarriers(int first, int num_threads);
  void EnterFiber(int index);
  void LeaveFiber();
  static void FiberMain(transfer_t from);
  std::vector<int> Shuffled(int count);

  const std::function<void()>* kernel_thread_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  int current_ = -1;
  fcontext_t scheduler_ = nullptr;
  std::mt19937_64 random_;
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
#endif
};

Emulator& TheEmulator() {
  static Emulator emulator;
  return emulator;
}

void Emulator::FiberMain(transfer_t from) {
  Emulator& emulator = TheEmulator();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &emulator.scheduler_stack_,
                                  &emulator.scheduler_stack_bytes_);
#endif
  emulator.scheduler_ = from.fctx;
  while (true) {
    (*emulator.kernel_thread_)();
    emulator.Block(State::kDone);
  }
}

void Emulator::EnterFiber(int index) {
  Fiber& fiber = *fibers_[static_cast<size_t>(index)];
  current_ = index;
  threadIdx = fiber.thread_idx;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.get(), kStackBytes);
#endif
  fiber.context = jump_fcontext(fiber.context, nullptr).fctx;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  current_ = -1;
}

void Emulator::LeaveFiber() {
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
  const transfer_t from = jump_fcontext(scheduler_, nullptr);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
  scheduler_ = from.fctx;
}

std::vector<int> Emulator::Shuffled(int count) {
  std::vector<int> indices(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) indices[static_cast<size_t>(i)] = order == 1 ? count - 1 - i : i;
  if (order > 1) std::shuffle(indices.begin(), indices.end(), random_);
  return indices;
}

bool Emulator::ReleaseWarpBarriers(int first, int num_threads) {
  bool released = false;
  for (int i = first; i < std::min(first + kWarp, num_threads); ++i) {
    const Fiber& fiber = *fibers_[static_cast<size_t>(i)];
    if (fiber.state != State::kAtWarpBarrier) continue;
    const unsigned mask = fiber.mask;
    bool complete = true;
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      if (first + lane >= num_threads) Fail("a mask names a lane that the block does not have");
      const Fiber& other = *fibers_[static_cast<size_t>(first + lane)];
      if (other.state == State::kDone) Fail("a mask names a lane that has returned");
      complete = complete && other.state == State::kAtWarpBarrier && other.mask == mask &&
                 other.operation == fiber.operation;
    }
    if (!complete) continue;
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) != 0)
        fibers_[static_cast<size_t>(first + lane)]->state = State::kReady;
    }
    released = true;
  }
  return released;
}

// Until every thread of the warp has returned or waits for other warps: a warp runs as far ahead of
// the others as its barriers let it.
void Emulator::RunWarp(int first, int num_threads) {
  const std::vector<int> lanes = Shuffled(std::min(kWarp, num_threads - first));
  do {
    for (const int lane : lanes) {
      if (fibers_[static_cast<size_t>(first + lane)]->state == State::kReady) {
        EnterFiber(first + lane);
      }
    }
  } while (ReleaseWarpBarriers(first, num_threads));
}

void Emulator::RunBlock(int num_threads) {
  const int num_warps = (num_threads + kWarp - 1) / kWarp;
  while (true) {
    for (const int warp : Shuffled(num_warps)) RunWarp(warp * kWarp, num_threads);
    int num_done = 0;
    int num_at_barrier = 0;
    for (int i = 0; i < num_threads; ++i) {
      num_done += fibers_[static_cast<size_t>(i)]->state == State::kDone ? 1 : 0;
      num_at_barrier += fibers_[static_cast<size_t>(i)]->state == State::kAtBlockBarrier ? 1 : 0;
    }
    if (num_done == num_threads) return;
    if (num_at_barrier != num_threads) {
      Fail("the threads of a block wait for each other at different barriers");
    }
    for (int i = 0; i < num_threads; ++i) fibers_[static_cast<size_t>(i)]->state = State::kReady;
  }
}

cudaError_t Emulator::Run(const cudaLaunchConfig_t& config,
                          const std::function<void()>& kernel_thread) {
  dim3 grid = config.gridDim;
  const dim3 block = config.blockDim;
  if (current_ >= 0) Fail("a kernel launched a kernel");
  if (grid.x < 1 || grid.x > 0x7fffffffu || grid.y < 1 || grid.y > 0xffffu || grid.z < 1 ||
      grid.z > 0xffffu || block.x < 1 || block.y < 1 || block.z < 1 || block.z > 64 ||
      uint64_t{block.x} * block.y * block.z > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  if (config.dynamicSmemBytes != 0) Fail("dynamic shared memory is not emulated");
  if (grid_limit != 0) {
    grid.x = std::min(grid.x, grid_limit);
    grid.y = std::min(grid.y, grid_limit);
  }
  random_.seed(order);
  kernel_thread_ = &kernel_thread;
  const int num_threads = static_cast<int>(block.x * block.y * block.z);
  while (static_cast<int>(fibers_.size()) < num_threads) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack.reset(new char[kStackBytes]);
    fiber->context = make_fcontext(fiber->stack.get() + kStackBytes, kStackBytes, FiberMain);
    fibers_.push_back(std::move(fiber));
  }
  const int64_t num_blocks = int64_t{grid.x} * grid.y * grid.z;
  if (num_blocks > 1 << 20) Fail("the grid is too large to emulate");
  ++counts.launches;
  blockDim = block;
  gridDim = grid;
  for (const int b : Shuffled(static_cast<int>(num_blocks))) {
    const unsigned index = static_cast<unsigned>(b);
    blockIdx = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
    for (int t = 0; t < num_threads; ++t) {
      const unsigned thread = static_cast<unsigned>(t);
      Fiber& fiber = *fibers_[static_cast<size_t>(t)];
      fiber.state = State::kReady;
      fiber.thread_idx = {thread % block.x, thread / block.x % block.y, thread / block.x / block.y};
    }
    ++counts.blocks;
    counts.threads += num_threads;
    RunBlock(num_threads);
  }
  kernel_thread_ = nullptr;
  return cudaSuccess;
}

}  // namespace

void SetEmulatedOrder(uint64_t order) { TheEmulator().order = order; }
void SetEmulatedGridLimit(unsigned limit) { TheEmulator().grid_limit = limit; }
EmulationCounts EmulatedCounts() { return TheEmulator().counts; }

cudaError_t LaunchEmulatedGrid(const cudaLaunchConfig_t& config,
                               std::function<void()> kernel_thread) {
  if (config.stream == nullptr) return RunEmulatedGrid(config, kernel_thread);
  return EnqueueEmulatedWork(config.stream, [config, kernel_thread = std::move(kernel_thread)] {
    return RunEmulatedGrid(config, kernel_thread);
  });
}

cudaError_t RunEmulatedGrid(const cudaLaunchConfig_t& config,
                            const std::function<void()>& kernel_thread) {
  return TheEmulator().Run(config, kernel_thread);
}

int EmulatedLane() { return TheEmulator().current_index() % kWarp; }

void EmulatedBlockBarrier() { TheEmulator().Block(State::kAtBlockBarrier); }

void EmulatedWarpBarrier(unsigned mask, WarpOperation operation) {
  Emulator& emulator = TheEmulator();
  if ((mask >> EmulatedLane() & 1) == 0) Fail("a lane is not in its own mask");
  emulator.current().mask = mask;
  emulator.current().operation = operation;
  emulator.Block(State::kAtWarpBarrier);
}

uint64_t EmulatedExchange(unsigned mask, WarpOperation operation, uint64_t bits, int lane) {
  Emulator& emulator = TheEmulator();
  emulator.current().handed_in = bits;
  EmulatedWarpBarrier(mask, operation);
  if (lane >= 0 && lane < kWarp) {
    if ((mask >> lane & 1) == 0) Fail("a shuffle reads a lane outside its mask");
    bits = emulator.lane_of_warp(lane).handed_in;
  }
  // Nobody hands in the next value before all have read this one.
  EmulatedWarpBarrier(mask, operation);
  return bits;
}

unsigned EmulatedVote(unsigned mask, bool vote) {
  Emulator& emulator = TheEmulator();
  emulator.current().handed_in = vote ? 1 : 0;
  EmulatedWarpBarrier(mask, WarpOperation::kVote);
  unsigned votes = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    votes |= emulator.lane_of_warp(lane).handed_in != 0 ? 1u << lane : 0u;
  }
  EmulatedWarpBarrier(mask, WarpOperation::kVote);
  return votes;
}

}  // namespace expertmesh
