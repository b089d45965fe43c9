#ifndef EXPERTMESH_SERVER_CONTROL_CONTROL_OBSERVER_H_
#define EXPERTMESH_SERVER_CONTROL_CONTROL_OBSERVER_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/planning/step_plan.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

// What control/ holds at one moment, and what it has done since it started.
struct ControlSnapshot {
  // Calls that were admitted and still hold their buffers: queued, running, or (cancelled, expired)
  // waiting for their step to end.
  int64_t calls_in_flight = 0;
  int64_t tokens_in_flight = 0;
  int64_t bytes_in_flight = 0;
  int64_t max_tokens_in_flight = 0;
  int64_t max_bytes_in_flight = 0;
  // Steps' outputs that answers, sent or not, keep in memory.
  int64_t held_output_bytes = 0;
  // Of these: not yet taken into a step, or not with all their tokens.
  int64_t queued_calls = 0;
  int64_t queued_tokens = 0;
  // Since it was submitted; zero: none waits, be it for its turn or to be repeated.
  absl::Duration oldest_queued_age;
  bool step_running = false;
  int32_t steps_in_flight = 0;  // as many as num_lanes at most
  int32_t num_lanes = 1;
  bool draining = false;

  uint64_t steps = 0;         // attempts
  uint64_t inline_steps = 0;  // of these, run by the thread that submitted the call
  uint64_t steps_lost = 0;    // attempts that lost a rank or their time
};

// One attempt to run a step. The views are valid during OnStep only.
struct StepRecord {
  uint64_t step = 0;
  uint64_t epoch = 0;
  std::string_view model;
  int32_t layer = 0;
  DispatchMode strategy = DispatchMode::kAuto;
  int32_t num_calls = 0;
  int64_t num_tokens = 0;
  int64_t num_pairs = 0;  // (token, k) with an expert
  int32_t attempt = 0;    // 0 first, then replays
  bool on_caller = false;
  bool is_inline = false;    // ran on the thread that submitted the call
  absl::Status status;       // of the attempt
  int64_t queue_micros = 0;  // the longest wait among its calls
  int64_t route_micros = 0;  // router rules and gates
  int64_t plan_micros = 0;
  int64_t run_micros = 0;                  // ExpertGroup::RunStep
  StepTimings timings;                     // GroupStepResult's; zero unless OK
  std::vector<int64_t> tokens_per_expert;  // [num_experts] pairs; empty where nothing was planned
};

// One admitted call's end, whatever its result.
struct CallRecord {
  std::string_view model;
  int32_t layer = 0;
  absl::StatusCode code = absl::StatusCode::kOk;
  int64_t num_tokens = 0;
  int64_t queue_micros = 0;
  int64_t total_micros = 0;
};

// Told by the threads that run steps, outside locks, maybe several at once. Must not block and must
// outlive the controller.
class ControlObserver {
 public:
  virtual ~ControlObserver() = default;
  virtual void OnStep(const StepRecord& record) = 0;
  virtual void OnCallDone(const CallRecord& record) = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_CONTROL_OBSERVER_H_
