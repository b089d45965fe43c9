#include "server/comm/socket_watch.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

constexpr uint64_t kWakeKey = std::numeric_limits<uint64_t>::max();
constexpr size_t kMaxEvents = 64;

absl::Status Exhausted(const char* call) {
  return absl::ResourceExhaustedError(absl::StrCat(call, ": ", strerror(errno)));
}

}  // namespace

absl::Status SocketWatch::Open() {
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return Exhausted("epoll_create1");
  wake_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_.valid()) return Exhausted("eventfd");
  events_.resize(kMaxEvents);
  return Add(wake_.get(), EPOLLIN, kWakeKey);
}

absl::Status SocketWatch::Add(int fd, uint32_t events, uint64_t key) {
  epoll_event event = {};
  event.events = events | EPOLLET;
  event.data.u64 = key;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return Exhausted("epoll_ctl");
  return absl::OkStatus();
}

void SocketWatch::Wake() {
  const uint64_t one = 1;
  // Fails only when it is set to its limit, and then the thread will wake too.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

absl::Span<const epoll_event> SocketWatch::Wait(int timeout_millis) {
  const int num_events =
      epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_millis);
  if (num_events <= 0) return {};
  const auto end = events_.begin() + num_events;
  const auto woken = std::find_if(
      events_.begin(), end, [](const epoll_event& event) { return event.data.u64 == kWakeKey; });
  if (woken == end) return {events_.data(), static_cast<size_t>(num_events)};
  uint64_t count;
  [[maybe_unused]] const ssize_t bytes = read(wake_.get(), &count, sizeof(count));
  *woken = *(end - 1);
  return {events_.data(), static_cast<size_t>(num_events - 1)};
}

void SocketWatch::Close() {
  epoll_.reset();
  wake_.reset();
}

}  // namespace expertmesh
