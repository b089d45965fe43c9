#include "server/ops/stop_signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "server/ops/start_thread.h"

namespace expertmesh {
namespace {

sigset_t StopSet() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  // Wakes the watcher when the object goes.
  sigaddset(&set, SIGUSR2);
  return set;
}

void EndBySignal(int signal_number) {
  signal(signal_number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal_number);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(signal_number);
  _exit(128 + signal_number);
}

}  // namespace

struct StopSignals::Impl {
  std::function<void(int)> on_first;
  std::function<void(int)> on_second;
  std::atomic<bool> ending = false;
  std::thread watcher;
  std::thread first;

  void Watch() {
    const sigset_t set = StopSet();
    std::optional<std::chrono::steady_clock::time_point> first_time;
    for (;;) {
      int signal_number = 0;
      if (sigwait(&set, &signal_number) != 0) continue;
      if (ending) return;
      if (signal_number == SIGUSR2) continue;  // anybody may send one
      const auto now = std::chrono::steady_clock::now();
      if (first_time.has_value()) {
        if (now - *first_time < kRepeatTime) continue;
        if (on_second) on_second(signal_number);
        EndBySignal(signal_number);
      }
      first_time = now;
      absl::StatusOr<std::thread> started =
          StartThread([this, signal_number] { on_first(signal_number); });
      if (started.ok()) {
        first = *std::move(started);
      } else {
        on_first(signal_number);  // no second signal is heard meanwhile
      }
    }
  }
};

void StopSignals::Block() {
  signal(SIGPIPE, SIG_IGN);
  const sigset_t set = StopSet();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

StopSignals::StopSignals(std::function<void(int)> on_first, std::function<void(int)> on_second)
    : impl_(std::make_unique<Impl>()) {
  impl_->on_first = std::move(on_first);
  impl_->on_second = std::move(on_second);
  impl_->watcher = std::thread([impl = impl_.get()] { impl->Watch(); });
}

StopSignals::~StopSignals() {
  impl_->ending = true;
  pthread_kill(impl_->watcher.native_handle(), SIGUSR2);
  impl_->watcher.join();
  if (impl_->first.joinable()) impl_->first.join();
}

}  // namespace expertmesh
