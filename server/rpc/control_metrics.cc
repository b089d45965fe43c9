#include "server/rpc/control_metrics.h"

namespace expertmesh {

void ControlMetrics::OnStep(const StepRecord& record) {
  if (record.attempt > 0) metrics_->replayed_steps.Increment();
  if (!record.status.ok()) {
    metrics_->failed_steps.Increment();
    return;
  }
  metrics_->steps.Increment();
  expert_load_.Count(record.model, record.layer, record.tokens_per_expert);
  if (record.is_inline) metrics_->inline_steps.Increment();
  metrics_->step_tokens.Observe(static_cast<double>(record.num_tokens));
  metrics_->step_requests.Observe(record.num_calls);
  metrics_->ObserveStage(StepStage::kQueue, record.queue_micros);
  metrics_->ObserveStage(StepStage::kRoute, record.route_micros);
  metrics_->ObserveStage(StepStage::kPlan, record.plan_micros);
  metrics_->ObserveStage(StepStage::kDispatch, record.timings.dispatch_micros);
  metrics_->ObserveStage(StepStage::kCompute, record.timings.compute_micros);
  metrics_->ObserveStage(StepStage::kCombine, record.timings.combine_micros);
}

void SetControlGauges(const ControlSnapshot& snapshot, const ServerMetrics& metrics) {
  metrics.tokens_in_flight.Set(static_cast<double>(snapshot.tokens_in_flight));
  metrics.bytes_in_flight.Set(static_cast<double>(snapshot.bytes_in_flight));
  metrics.held_output_bytes.Set(static_cast<double>(snapshot.held_output_bytes));
  metrics.queued_requests.Set(static_cast<double>(snapshot.queued_calls));
  metrics.queued_tokens.Set(static_cast<double>(snapshot.queued_tokens));
}

}  // namespace expertmesh
