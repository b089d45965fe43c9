#include "server/rpc/open_calls.h"

#include "server/ops/clock.h"

namespace expertmesh {

void OpenCalls::Begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_open_;
}

void OpenCalls::End() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--num_open_ == 0) none_.notify_all();
}

int64_t OpenCalls::AwaitNone(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  Clock* const clock = SteadyClock();
  while (num_open_ > 0 && clock->Now() < deadline) clock->WaitUntil(none_, lock, deadline);
  return num_open_;
}

int64_t OpenCalls::num_open() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_open_;
}

}  // namespace expertmesh
