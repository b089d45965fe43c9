#ifndef EXPERTMESH_SERVER_RPC_RANK_ANNOUNCER_H_
#define EXPERTMESH_SERVER_RPC_RANK_ANNOUNCER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "server/rpc/rank_channel.h"

namespace grpc {
class ClientContext;
}

namespace expertmesh {

struct RankAnnouncerOptions {
  RankLink link;
  int32_t ep_rank = 0;
  int32_t ep_size = 1;
  std::string comm_address;
  std::string instruction_set;
  std::function<double()> load_progress;  // 0 to 1; any thread
};

// Tells the control plane, from a thread and over a connection of its own, that a rank is loading
// and how far it is: heartbeats before there is a membership. Nobody needs to answer.
class RankAnnouncer {
 public:
  explicit RankAnnouncer(RankAnnouncerOptions options);
  // Blocks until the thread has ended; it gives up a call in progress.
  ~RankAnnouncer();

 private:
  void Run();

  const RankAnnouncerOptions options_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool stopped_ = false;
  grpc::ClientContext* call_ = nullptr;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_ANNOUNCER_H_
