#ifndef EXPERTMESH_SERVER_COMM_IN_PROCESS_EXCHANGE_H_
#define EXPERTMESH_SERVER_COMM_IN_PROCESS_EXCHANGE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "server/comm/collective_call.h"
#include "server/comm/comm_traffic.h"
#include "server/comm/operation_places.h"

namespace expertmesh {

// Where the ranks of one process meet: what in_process_communicator.cc shares among its endpoints.
// Thread safe.
class InProcessExchange {
 public:
  // Null: the ranks' memory is the host's.
  using CopyBytes =
      std::function<absl::Status(std::byte* to, const std::byte* from, int64_t size_bytes)>;

  InProcessExchange(int32_t ep_size, CopyBytes copy_bytes);

  int32_t ep_size() const { return ep_size_; }
  absl::Status broken() const;
  CommTraffic& traffic(int32_t ep_rank) { return *traffic_[ep_rank]; }

  // The call's rank reaches the operation at `place`. Copies what can be copied now. The first
  // error if the exchange is broken; then nothing was touched.
  absl::Status Arrive(OperationPlace place, const CollectiveCall& call);

  // Breaks the exchange, if it is whole, with `status`. Does not wait for copies that are running.
  void Break(const absl::Status& status);
  // After Break: returns when no copy is running any more.
  void WaitForCopies();

 private:
  struct Participant {
    bool arrived = false;
    bool signalled = false;
    CollectiveCall call;
    std::chrono::steady_clock::time_point arrived_at;
    int64_t num_missing = 0;  // exchanges, the one with itself included
    std::vector<int64_t> send_offsets;
    std::vector<int64_t> receive_offsets;
  };
  struct Operation {
    std::vector<Participant> participants;  // [ep_size]
    int32_t num_done = 0;
  };

  static absl::Status CheckPair(const CollectiveCall& a, const CollectiveCall& b);
  absl::Status CopyBlock(const Participant& from, const Participant& to) const;
  // Needs mutex_. Events of all ranks that still wait, once the exchange is broken and no copy is
  // running.
  void TakeBrokenEvents(std::vector<Event>* events);

  const int32_t ep_size_;
  const CopyBytes copy_bytes_;
  std::vector<std::unique_ptr<CommTraffic>> traffic_;  // [ep_size]
  mutable std::mutex mutex_;                           // of everything below
  std::condition_variable no_copy_;
  absl::Status broken_;
  int64_t num_copying_ = 0;
  std::map<OperationPlace, Operation> operations_;  // that not all ranks are done with
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_IN_PROCESS_EXCHANGE_H_
