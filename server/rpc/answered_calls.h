#ifndef EXPERTMESH_SERVER_RPC_ANSWERED_CALLS_H_
#define EXPERTMESH_SERVER_RPC_ANSWERED_CALLS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/ops/clock.h"
#include "server/ops/logging.h"
#include "server/ops/server_metrics.h"

namespace expertmesh {

// One call, or message of a stream, and its answer.
struct AnsweredCall {
  CallMethod method = CallMethod::kForward;
  absl::string_view request_id;
  std::optional<uint64_t> stream_seq;
  int64_t num_tokens = 0;
  absl::Duration elapsed;
  absl::Status status;                            // what became of it
  absl::StatusCode code = absl::StatusCode::kOk;  // what the client is told
};

// Counts what is answered and tells the log. Of calls that fail through the server's own doing
// (INTERNAL; UNAVAILABLE but for DRAINING) an operator is to see that they do, and not a line for
// each: a line at once, then at most one every kInterval, which says how many there were. Those of
// after a line are told of when a call is answered, or by the end of this object. Thread safe;
// blocks as long as stderr does.
class AnsweredCalls {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(5);

  // Both outlive this object.
  explicit AnsweredCalls(const ServerMetrics* metrics, const Clock* clock = SteadyClock())
      : metrics_(*metrics), clock_(*clock) {}
  ~AnsweredCalls();
  AnsweredCalls(const AnsweredCalls&) = delete;
  AnsweredCalls& operator=(const AnsweredCalls&) = delete;

  // Also takes the call from those in flight.
  void Count(const AnsweredCall& call);

 private:
  // Since the last line.
  struct Failures {
    int64_t num_calls = 0;
    std::string request_id;  // of the last one, as the rest
    absl::StatusCode code = absl::StatusCode::kOk;
    std::string error;
    absl::Time told_at = absl::InfinitePast();
  };

  void Tell(LogLevel level, absl::Duration interval);

  const ServerMetrics& metrics_;
  const Clock& clock_;
  std::atomic<bool> has_untold_{false};
  std::mutex mutex_;
  Failures unavailable_;
  Failures internal_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_ANSWERED_CALLS_H_
