#ifndef EXPERTMESH_SERVER_COMM_TCP_EXCHANGE_H_
#define EXPERTMESH_SERVER_COMM_TCP_EXCHANGE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/stream.h"
#include "server/comm/comm_traffic.h"
#include "server/comm/operation_order.h"
#include "server/comm/operation_places.h"
#include "server/comm/socket_watch.h"
#include "server/comm/tcp_link.h"
#include "server/comm/tcp_notices.h"
#include "server/comm/tcp_operation.h"
#include "server/comm/tcp_peer_sockets.h"

namespace expertmesh {

// One rank's end of a TCP group: what tcp_communicator.cc shares with the work that it leaves on
// streams. Thread safe. Nothing but the own thread ever waits, and that only for sockets.
class TcpExchange {
 public:
  // Broken from the start, and the peers told, when the system has no means to wait for sockets
  // (RESOURCE_EXHAUSTED).
  TcpExchange(int32_t ep_rank, std::vector<TcpPeerSockets> peers, absl::Duration operation_timeout);
  ~TcpExchange() { Stop(); }

  int32_t ep_rank() const { return ep_rank_; }
  int32_t ep_size() const { return static_cast<int32_t>(links_.size()); }
  absl::Status broken() const;
  CommTraffic& traffic() { return traffic_; }

  // The stream has reached the operation at `place`. Operations run one after the other by place,
  // whatever order they are started in. Moves what can be moved at once; the rest is the own
  // thread's. The first error if the exchange is broken.
  absl::Status Start(OperationPlace place, std::shared_ptr<TcpOperation> operation);

  // The order has `num_operations` and no more: after them the next order's turn comes.
  void CloseOrder(int64_t order, int64_t num_operations);

  // Breaks the exchange, if it is whole, with `status`, and tells the peers, which break too. When
  // it has returned no buffer is touched any more.
  void Break(const absl::Status& status);

  // After Break; not from a callback of an event. Ends the thread and closes the connections.
  void Stop();

 private:
  using Time = std::chrono::steady_clock::time_point;
  using Signals = std::vector<std::pair<Event, absl::Status>>;

  struct Link {
    explicit Link(TcpPeerSockets sockets)
        : data(std::move(sockets.data)), notices(std::move(sockets.control)) {}

    TcpLink data;
    TcpNotices notices;
    bool readable = true;  // data: the socket may have bytes
    bool writable = true;
    bool failed = false;   // data: broke; the control connection will tell why
    bool left = false;     // control: the peer said farewell, or is gone
    bool checked = false;  // the current operation's message arrived whole and right
  };

  // All but Run and WatchSockets hold the mutex.
  void Run();
  absl::Status WatchSockets();
  void WakeBy(Time time);
  void HandleSocket(uint64_t key, uint32_t events);
  void ReadNotice(int32_t rank);
  void PeerLeft(Link& link, const absl::Status& status);
  void Lose(const absl::Status& status, std::chrono::nanoseconds patience);
  void BeginNext();
  // Moves on, on the caller's thread, if the next operation can begin.
  void Proceed();
  void Advance();
  bool CanMove() const;
  bool AdvanceLink(int32_t rank);
  void FinishIfComplete();
  void CheckTime();
  void BreakLocked(const absl::Status& status);
  Time NextDeadline() const;
  std::string Unfinished() const;
  static void Signal(Signals& signals);

  const int32_t ep_rank_;
  const std::chrono::nanoseconds operation_timeout_;
  CommTraffic traffic_;
  std::atomic<int> num_breaking_{0};  // whoever waits to break should not wait for a long transfer

  mutable std::mutex mutex_;  // guards what follows
  absl::Status broken_;
  std::vector<Link> links_;               // [ep_size]; the own rank's is unused
  OperationOrder<TcpOperation> started_;  // after current_
  std::shared_ptr<TcpOperation> current_;
  uint64_t imbalance_ = 0;       // sum of the headers that have come, and the own one
  Time begun_ = Time::min();     // current_
  Time deadline_ = Time::max();  // of current_
  absl::Status loss_;  // a peer is gone, but current_ may still end well, or a reason come
  Time loss_deadline_ = Time::max();
  Time wake_at_ = Time::max();  // when the thread will wake by itself
  Time alarm_ = Time::max();    // Run's own: when it last meant to wake
  bool stopping_ = false;
  Signals signals_;  // to be sent when the mutex is free

  SocketWatch watch_;  // only the thread waits
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_EXCHANGE_H_
