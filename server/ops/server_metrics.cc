#include "server/ops/server_metrics.h"

#include <string>
#include <vector>

namespace expertmesh {
namespace {

constexpr char kCallsName[] = "expertmesh_calls_total";
constexpr char kCallsHelp[] = "Calls answered, by method and status code";
constexpr const char* kStageNames[kNumStepStages] = {"queue",    "route",   "plan",
                                                     "dispatch", "compute", "combine"};

Counter CallsSeries(MetricsRegistry* registry, CallMethod method, absl::StatusCode code) {
  return registry->AddCounter(
      kCallsName, kCallsHelp,
      {{"method", CallMethodName(method)}, {"code", absl::StatusCodeToString(code)}});
}

}  // namespace

const char* CallMethodName(CallMethod method) {
  static constexpr const char* kNames[kNumCallMethods] = {
      "Forward", "ForwardStream", "GetModel", "ListModels", "Explain", "GetStatus", "Drain"};
  return kNames[static_cast<int>(method)];
}

ServerMetrics::ServerMetrics(MetricsRegistry* registry) : registry_(registry) {
  // 50 µs to 26 s for calls, 5 µs to 10 s for stages: a factor of 2 apart.
  const std::vector<double> call_bounds = ExponentialBounds(50e-6, 2, 20);
  const std::vector<double> stage_bounds = ExponentialBounds(5e-6, 2, 22);
  const std::vector<double> count_bounds = ExponentialBounds(1, 2, 18);

  for (int m = 0; m < kNumCallMethods; ++m) {
    const CallMethod method = static_cast<CallMethod>(m);
    const MetricLabels labels = {{"method", CallMethodName(method)}};
    CallsSeries(registry, method, absl::StatusCode::kOk);
    calls_in_flight[m] = registry->AddGauge(
        "expertmesh_calls_in_flight", "Calls that arrived whole and are not answered yet", labels);
    call_seconds[m] = registry->AddHistogram(
        "expertmesh_call_seconds", "Time from a call's arrival to handing its answer to gRPC",
        labels, call_bounds);
  }
  request_bytes = registry->AddCounter("expertmesh_request_bytes_total",
                                       "Bytes of Forward requests, as they arrived", {});
  response_bytes = registry->AddCounter("expertmesh_response_bytes_total",
                                        "Bytes of Forward responses handed to gRPC", {});
  request_tokens = registry->AddCounter("expertmesh_request_tokens_total",
                                        "Tokens of Forward requests that passed validation", {});
  copied_bytes = registry->AddCounter(
      "expertmesh_payload_bytes_copied_total",
      "Bytes of request payload gathered from gRPC's slices: its only copy before the ranks", {});
  ready = registry->AddGauge("expertmesh_ready", "1 while calls are served", {});

  tokens_in_flight = registry->AddGauge("expertmesh_tokens_in_flight",
                                        "Tokens of admitted calls that still hold buffers", {});
  bytes_in_flight = registry->AddGauge(
      "expertmesh_bytes_in_flight", "Payload bytes of admitted calls that still hold buffers", {});
  const char* const kUnsent =
      "Memory of answers, from a call's admission until its client has taken the answer";
  unsent_answer_bytes =
      registry->AddGauge("expertmesh_unsent_answer_bytes", kUnsent, {{"method", "Forward"}});
  unsent_stream_answer_bytes =
      registry->AddGauge("expertmesh_unsent_answer_bytes", kUnsent, {{"method", "ForwardStream"}});
  held_output_bytes = registry->AddGauge(
      "expertmesh_held_output_bytes", "Outputs of steps that are kept by answers, sent or not", {});
  queued_requests = registry->AddGauge(
      "expertmesh_queued_requests", "Admitted calls of which not every token is in a step yet", {});
  queued_tokens =
      registry->AddGauge("expertmesh_queued_tokens", "Admitted tokens that wait for a step", {});
  steps = registry->AddCounter("expertmesh_steps_total", "Steps that ended well", {});
  inline_steps = registry->AddCounter("expertmesh_inline_steps_total",
                                      "Of these, steps run by the thread that read the call", {});
  failed_steps = registry->AddCounter("expertmesh_failed_steps_total",
                                      "Attempts to run a step that ended with an error", {});
  replayed_steps = registry->AddCounter("expertmesh_replayed_steps_total",
                                        "Attempts after a step's first one", {});
  step_tokens =
      registry->AddHistogram("expertmesh_step_tokens", "Tokens in a step", {}, count_bounds);
  step_requests = registry->AddHistogram(
      "expertmesh_step_requests", "Requests, or pieces of them, in a step", {}, count_bounds);
  for (int s = 0; s < kNumStepStages; ++s) {
    stage_seconds[s] = registry->AddHistogram("expertmesh_step_stage_seconds",
                                              "Time of a step's stages; queue is the oldest "
                                              "request's wait, dispatch to combine are those "
                                              "of the rank that computed longest",
                                              {{"stage", kStageNames[s]}}, stage_bounds);
  }
}

void ServerMetrics::CountCall(CallMethod method, absl::StatusCode code, double seconds) const {
  if (registry_ == nullptr) return;
  CallsSeries(registry_, method, code).Increment();
  auto& totals = code == absl::StatusCode::kOk ? num_ok_ : num_failed_;
  totals[static_cast<int>(method)].fetch_add(1, std::memory_order_relaxed);
  call_seconds[static_cast<int>(method)].Observe(seconds);
}

}  // namespace expertmesh
