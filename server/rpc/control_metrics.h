#ifndef EXPERTMESH_SERVER_RPC_CONTROL_METRICS_H_
#define EXPERTMESH_SERVER_RPC_CONTROL_METRICS_H_

#include "server/control/control_observer.h"
#include "server/ops/server_metrics.h"
#include "server/rpc/expert_load.h"

namespace expertmesh {

// Steps, as control/ reports them, counted for /metrics. Thread safe.
class ControlMetrics final : public ControlObserver {
 public:
  explicit ControlMetrics(const ServerMetrics* metrics) : metrics_(metrics) {}
  void OnStep(const StepRecord& record) override;
  void OnCallDone(const CallRecord&) override {}
  const ExpertLoad& expert_load() const { return expert_load_; }

 private:
  const ServerMetrics* metrics_;
  ExpertLoad expert_load_;
};

// Sets the gauges of what is queued and in flight.
void SetControlGauges(const ControlSnapshot& snapshot, const ServerMetrics& metrics);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_CONTROL_METRICS_H_
