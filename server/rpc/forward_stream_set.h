#ifndef EXPERTMESH_SERVER_RPC_FORWARD_STREAM_SET_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_STREAM_SET_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "server/rpc/forward_stream_state.h"

namespace expertmesh {

class ForwardStreamReactor;

// Bytes in flight; see ForwardStreamState.
struct ForwardStreamLimits {
  int64_t max_stream_bytes = int64_t{64} << 20;
  int64_t max_all_bytes = int64_t{1} << 30;
};

// The streams of a process. Thread safe; outlives them.
class ForwardStreamSet {
 public:
  explicit ForwardStreamSet(const ForwardStreamLimits& limits)
      : limits_(limits), total_(limits.max_all_bytes) {}

  const ForwardStreamLimits& limits() const { return limits_; }
  ForwardStreamTotal* total() { return &total_; }

  // The last part of draining: every stream, also one that is yet to come, takes no more messages
  // and ends with UNAVAILABLE (DRAINING) once those in flight are answered. Does not block.
  void EndAll();

  void Add(const std::shared_ptr<ForwardStreamReactor>& stream);
  void Remove(ForwardStreamReactor* stream);

 private:
  const ForwardStreamLimits limits_;
  ForwardStreamTotal total_;
  std::mutex mutex_;
  bool ending_ = false;
  std::map<ForwardStreamReactor*, std::weak_ptr<ForwardStreamReactor>> streams_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_STREAM_SET_H_
