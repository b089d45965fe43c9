#ifndef EXPERTMESH_CLIENT_CLI_BENCH_RECORD_H_
#define EXPERTMESH_CLIENT_CLI_BENCH_RECORD_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/latency_histogram.h"
#include "client/forward_input.h"
#include "kernels/base/steady_now.h"

namespace expertmesh {

// What a bench saw between two moments.
struct BenchSummary {
  double seconds = 0;
  int64_t num_ok = 0;
  int64_t num_tokens = 0;  // of the calls that were answered
  std::map<std::string, int64_t> errors_by_code;
  std::map<std::string, std::string> first_message_by_code;
  absl::Status first_error;  // with the server's details
  // Latencies of answered calls, microseconds; 0 when there are none. Percentiles are a
  // LatencyHistogram's, within 0.4 %; the maximum is exact.
  int64_t p50_micros = 0;
  int64_t p95_micros = 0;
  int64_t p99_micros = 0;
  int64_t max_micros = 0;
  double mean_server_micros = 0;  // Timings.total_micros as the server gave it

  int64_t num_errors() const;
};

// Collects calls from any thread.
class BenchRecord {
 public:
  // `latency` counts from the moment at which the call was due, so that a server that stalls is
  // seen as slow even when it held up the sending.
  void Add(absl::Duration latency, const absl::StatusOr<ForwardOutput>& answer);
  // Forgets what came before: the warm-up.
  void Restart();
  absl::Status first_error() const;
  // Since construction or Restart.
  BenchSummary Summarize() const;

 private:
  // std, for ThreadSanitizer does not see into Debian's build of absl::Mutex. Guards all below.
  mutable std::mutex mutex_;
  absl::Time start_ = SteadyNow();
  LatencyHistogram latencies_micros_;
  int64_t num_tokens_ = 0;
  int64_t server_micros_ = 0;
  std::map<std::string, int64_t> errors_by_code_;
  std::map<std::string, std::string> first_message_by_code_;
  absl::Status first_error_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_BENCH_RECORD_H_
