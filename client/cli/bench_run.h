#ifndef EXPERTMESH_CLIENT_CLI_BENCH_RUN_H_
#define EXPERTMESH_CLIENT_CLI_BENCH_RUN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/bench_record.h"
#include "client/cli/forward_job.h"
#include "client/expert_client.h"

namespace expertmesh {

struct BenchRunOptions {
  // Closed loop: calls in flight; each answer starts the next call, and each error too, but after a
  // pause that doubles from error to error, so that a server that is gone is not flooded.
  int concurrency = 8;
  // Open loop when > 0: calls per second at random (Poisson) moments, whatever the server does.
  // Calls that would exceed `max_in_flight` are counted (num_not_sent), not held back.
  double rate = 0;
  int max_in_flight = 4096;
  absl::Duration warmup = absl::Seconds(2);
  absl::Duration duration = absl::Seconds(10);
  CallOptions call;
  int num_samples = 16;  // answers to keep for verification
  uint64_t seed = 1;
};

// An answer that was given under load, and the request it belongs to.
struct BenchSample {
  size_t request = 0;  // index into the load
  ForwardOutput answer;
};

struct BenchResult {
  BenchSummary summary;
  int64_t num_not_sent = 0;
  // Calls in flight when the time was over, which the summary leaves out, and how long the oldest
  // of them had waited by then: what a server that stopped answering shows in.
  int64_t num_unfinished = 0;
  int64_t oldest_unfinished_micros = 0;
  std::map<std::string, int64_t> unfinished_errors_by_code;  // those that then failed
  bool interrupted = false;  // calls are still in flight: `sleep` ended the wait for them
  std::vector<BenchSample> samples;
};

// Where a run stands.
struct BenchProgress {
  enum class Phase { kWarmup, kMeasuring, kWaitingForCalls };
  Phase phase;
  double seconds;  // of this phase so far; warming up: left
  // Dear: only for what is shown.
  absl::FunctionRef<BenchSummary()> summarize;
  absl::Status first_error;
  int64_t num_in_flight;
  absl::Duration longest_wait;  // of a call in flight
};

// Blocking: warms up, measures, waits for the calls in flight, which takes at most their timeout.
// `progress` runs on this thread about twice a second. `sleep` is how this thread passes time: true
// from it ends the measuring early, and after that the wait for the calls in flight, which then go
// on: `client` and `load` must outlive them.
BenchResult RunBench(ExpertClient& client, const std::vector<std::unique_ptr<ForwardJob>>& load,
                     const BenchRunOptions& options,
                     absl::FunctionRef<void(const BenchProgress&)> progress,
                     absl::FunctionRef<bool(absl::Duration)> sleep);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_BENCH_RUN_H_
