#include "kernels/base/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace expertmesh {
namespace {

// How long the caller looks for the last tasks of others before it parks: about one task, since a
// parked thread needs up to 150 us to wake.
constexpr int64_t kFinishSpinMicros = 200;
constexpr int kChecksPerYield = 256;

void RelaxCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Calls `done` until it is true or `micros` have passed. Yields now and then, so that on a busy
// machine the thread that is waited for gets the core.
template <typename Done>
bool SpinUntil(int64_t micros, Done done) {
  if (micros <= 0) return done();
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(micros);
  while (true) {
    for (int check = 0; check < kChecksPerYield; ++check) {
      if (done()) return true;
      RelaxCpu();
    }
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::yield();
  }
}

}  // namespace

struct ParallelFor::State {
  using Task = absl::FunctionRef<void(int64_t task, int worker)>;

  ParallelForOptions options;
  std::mutex team;  // held by the caller that the team works for
  std::mutex mutex;
  std::condition_variable job_opened;
  std::condition_variable job_finished;
  // Guarded by `mutex`. A worker that wakes after the job was closed finds it null: the caller
  // never waits for a thread that has nothing to do, and nobody calls a task that is gone.
  const Task* task = nullptr;
  int64_t num_tasks = 0;
  bool stopping = false;
  // Written under `mutex`, read outside it by spinners.
  std::atomic<uint64_t> generation{0};
  std::atomic<int> num_active_workers{0};

  std::atomic<int64_t> next_task{0};
  std::vector<std::thread> threads;

  // Also when a thread could not be started and the others were.
  ~State() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
      generation.fetch_add(1, std::memory_order_release);
      job_opened.notify_all();
    }
    for (std::thread& thread : threads) thread.join();
  }

  void RunTasks(const Task& run_task, int64_t count, int worker) {
    while (true) {
      const int64_t index = next_task.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) return;
      run_task(index, worker);
    }
  }

  void RunWorker(int worker) {
    uint64_t seen_generation = 0;
    while (true) {
      const auto opened = [this, &seen_generation] {
        return generation.load(std::memory_order_acquire) != seen_generation;
      };
      if (options.spin_micros > 0) SpinUntil(options.spin_micros, opened);
      std::unique_lock<std::mutex> lock(mutex);
      job_opened.wait(lock, [this, &opened] { return stopping || opened(); });
      if (stopping) return;
      seen_generation = generation.load(std::memory_order_relaxed);
      if (task == nullptr) continue;
      const Task& run_task = *task;
      const int64_t count = num_tasks;
      num_active_workers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      RunTasks(run_task, count, worker);
      lock.lock();
      if (num_active_workers.fetch_sub(1, std::memory_order_acq_rel) == 1)
        job_finished.notify_one();
    }
  }
};

ParallelFor::ParallelFor(const ParallelForOptions& options) : state_(std::make_unique<State>()) {
  state_->options = options;
  state_->options.num_threads = std::max(1, options.num_threads);
  for (int worker = 1; worker < state_->options.num_threads; ++worker) {
    state_->threads.emplace_back([state = state_.get(), worker] { state->RunWorker(worker); });
  }
}

ParallelFor::~ParallelFor() = default;

int ParallelFor::num_threads() const { return state_->options.num_threads; }

bool ParallelFor::IsForOne(int64_t num_tasks, double estimated_micros) const {
  return num_tasks <= 1 || state_->threads.empty() || estimated_micros < kMinParallelMicros;
}

void ParallelFor::Run(int64_t num_tasks, double estimated_micros, State::Task task) {
  if (IsForOne(num_tasks, estimated_micros)) return RunAlone(num_tasks, task);
  const std::lock_guard<std::mutex> team(state_->team);
  RunByTeam(num_tasks, task);
}

void ParallelFor::RunNow(int64_t num_tasks, double estimated_micros, State::Task task) {
  if (IsForOne(num_tasks, estimated_micros)) return RunAlone(num_tasks, task);
  const std::unique_lock<std::mutex> team(state_->team, std::try_to_lock);
  if (!team.owns_lock()) return RunAlone(num_tasks, task);
  RunByTeam(num_tasks, task);
}

void ParallelFor::RunAlone(int64_t num_tasks, State::Task task) {
  for (int64_t index = 0; index < num_tasks; ++index) task(index, 0);
}

void ParallelFor::RunByTeam(int64_t num_tasks, State::Task task) {
  State& state = *state_;
  const int64_t num_helpers =
      std::min<int64_t>(num_tasks - 1, static_cast<int64_t>(state.threads.size()));
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.task = &task;
    state.num_tasks = num_tasks;
    state.next_task.store(0, std::memory_order_relaxed);
    state.generation.fetch_add(1, std::memory_order_release);
  }
  for (int64_t helper = 0; helper < num_helpers; ++helper) state.job_opened.notify_one();
  state.RunTasks(task, num_tasks, /*worker=*/0);
  std::unique_lock<std::mutex> lock(state.mutex);
  state.task = nullptr;
  const auto finished = [&state] {
    return state.num_active_workers.load(std::memory_order_acquire) == 0;
  };
  if (finished()) return;
  lock.unlock();
  if (SpinUntil(kFinishSpinMicros, finished)) return;
  lock.lock();
  state.job_finished.wait(lock, finished);
}

}  // namespace expertmesh
