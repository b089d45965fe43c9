#ifndef EXPERTMESH_SERVER_OPS_SERVER_METRICS_H_
#define EXPERTMESH_SERVER_OPS_SERVER_METRICS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "server/ops/metrics.h"

namespace expertmesh {

enum class CallMethod : uint8_t {
  kForward,
  kForwardStream,
  kGetModel,
  kListModels,
  kExplain,
  kGetStatus,
  kDrain,
};
inline constexpr int kNumCallMethods = static_cast<int>(CallMethod::kDrain) + 1;
const char* CallMethodName(CallMethod method);

enum class StepStage : uint8_t { kQueue, kRoute, kPlan, kDispatch, kCompute, kCombine };
inline constexpr int kNumStepStages = static_cast<int>(StepStage::kCombine) + 1;

// Every series of the control plane; the help texts in server_metrics.cc are their documentation.
// Thread safe. A default-made one counts nothing.
struct ServerMetrics {
  ServerMetrics() = default;
  explicit ServerMetrics(MetricsRegistry* registry);  // outlives this object

  // rpc/: one answered call.
  void CountCall(CallMethod method, absl::StatusCode code, double seconds) const;
  // Of the calls counted: those with OK, and those with any other code.
  uint64_t num_ok(CallMethod method) const {
    return num_ok_[static_cast<int>(method)].load(std::memory_order_relaxed);
  }
  uint64_t num_failed(CallMethod method) const {
    return num_failed_[static_cast<int>(method)].load(std::memory_order_relaxed);
  }
  void ObserveStage(StepStage stage, int64_t micros) const {
    stage_seconds[static_cast<int>(stage)].Observe(static_cast<double>(micros) * 1e-6);
  }

  // rpc/
  std::array<Gauge, kNumCallMethods> calls_in_flight;
  std::array<Histogram, kNumCallMethods> call_seconds;
  Counter request_bytes;
  Counter response_bytes;
  Counter request_tokens;
  Counter copied_bytes;
  Gauge ready;

  // control/
  Gauge tokens_in_flight;
  Gauge bytes_in_flight;
  Gauge unsent_answer_bytes;
  Gauge unsent_stream_answer_bytes;
  Gauge held_output_bytes;
  Gauge queued_requests;
  Gauge queued_tokens;
  Counter steps;
  Counter inline_steps;
  Counter failed_steps;
  Counter replayed_steps;
  Histogram step_tokens;
  Histogram step_requests;
  std::array<Histogram, kNumStepStages> stage_seconds;

 private:
  MetricsRegistry* registry_ = nullptr;
  mutable std::array<std::atomic<uint64_t>, kNumCallMethods> num_ok_{};
  mutable std::array<std::atomic<uint64_t>, kNumCallMethods> num_failed_{};
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_SERVER_METRICS_H_
