#ifndef EXPERTMESH_SERVER_COMM_COMM_TRAFFIC_H_
#define EXPERTMESH_SERVER_COMM_COMM_TRAFFIC_H_

#include <atomic>
#include <cstdint>
#include <vector>

namespace expertmesh {

// Counters of one rank's communicator, by peer. Any thread, no locks.
class CommTraffic {
 public:
  explicit CommTraffic(int32_t ep_size) : bytes_sent_(ep_size), wait_nanos_(ep_size) {}

  void CountSent(int32_t peer, int64_t bytes) { Add(bytes_sent_[peer], bytes); }
  void CountWait(int32_t peer, int64_t nanos) { Add(wait_nanos_[peer], nanos); }

  // [ep_size], since construction.
  std::vector<int64_t> bytes_sent() const { return Values(bytes_sent_); }
  std::vector<int64_t> wait_nanos() const { return Values(wait_nanos_); }

 private:
  using Counters = std::vector<std::atomic<int64_t>>;
  static void Add(std::atomic<int64_t>& counter, int64_t by) {
    counter.fetch_add(by, std::memory_order_relaxed);
  }
  static std::vector<int64_t> Values(const Counters& counters) {
    return std::vector<int64_t>(counters.begin(), counters.end());
  }

  Counters bytes_sent_;
  Counters wait_nanos_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_COMM_TRAFFIC_H_
