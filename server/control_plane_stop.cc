// How the control plane ends: drain, the last answers, the ranks.

#include <unistd.h>

#include <algorithm>

#include "absl/time/clock.h"
#include "server/control_plane_impl.h"
#include "server/ops/call_error.h"
#include "server/ops/logging.h"

namespace expertmesh {
namespace {

// After drain_timeout, which the calls may have used up. With kTimeToSayGoodbye the longest that a
// stop exceeds it.
constexpr absl::Duration kTimeToSendAnswers = absl::Seconds(1);
constexpr absl::Duration kLeastTimeToEndRanks = absl::Milliseconds(300);
constexpr absl::Duration kMostTimeToEndRanks = absl::Seconds(5);
// For gRPC to let go of its connections.
constexpr absl::Duration kTimeToSayGoodbye = absl::Milliseconds(200);

}  // namespace

void ControlPlane::Impl::CloseRanks(absl::Time deadline) {
  if (remote_group == nullptr) return;
  remote_group->Close();
  if (rank_server != nullptr) rank_server->Shutdown(deadline);
}

void ControlPlane::Impl::StopServing() {
  state.StartDraining();
  const std::lock_guard<std::mutex> lock(start_mutex);
  is_stopping = true;
  server->SetServing(false);
  metrics.ready.Set(0);
}

int64_t ControlPlane::Impl::EndCalls(absl::Duration timeout) {
  const int64_t num_cut_off = controller->Drain(SteadyNow() + timeout);
  if (num_cut_off > 0) {
    LogWarning("calls were cut off: the drain's time was over", {{"calls", num_cut_off}});
  }
  return num_cut_off;
}

void ControlPlane::Impl::SendAnswersAndShutDown(absl::Time deadline) {
  streams.EndAll();
  const int64_t num_open = open_calls.AwaitNone(deadline);
  if (num_open > 0) {
    LogWarning("answers were cut off: their clients do not read them", {{"calls", num_open}});
  }
  server->AwaitSent(deadline);
  server->EndConnections();
  server->Shutdown(SteadyNow() + kTimeToSayGoodbye);
}

absl::StatusOr<v1::DrainResponse> ControlPlane::Impl::Drain(absl::Duration timeout) {
  if (state.backend() == nullptr) {
    return CallError(ErrorReason::kNoEpoch,
                     "the experts are being loaded: there is nothing to drain; SIGTERM ends this "
                     "process");
  }
  if (timeout == absl::ZeroDuration()) timeout = options.drain_timeout;
  LogInfo("draining, as AdminService was asked to", {{"timeout", absl::FormatDuration(timeout)}});
  was_asked_to_drain = true;
  StopServing();
  v1::DrainResponse response;
  response.set_num_requests_left(EndCalls(timeout));
  response.set_complete(response.num_requests_left() == 0);
  LogInfo("drained; SIGTERM ends this process");
  return response;
}

void ControlPlane::Stop() {
  impl_->state.StartDraining();
  {
    const std::lock_guard<std::mutex> lock(impl_->start_mutex);
    if (!impl_->is_serving) {
      if (impl_->server != nullptr) impl_->server->Shutdown(SteadyNow() + absl::Seconds(1));
      LogInfo("stopped while loading");
      _exit(0);
    }
  }
  impl_->stop.Notify();
}

void ControlPlane::WaitForStopAndDrain() {
  impl_->stop.WaitForNotification();
  impl_->StopServing();
  LogInfo("draining", {{"timeout", absl::FormatDuration(impl_->options.drain_timeout)},
                       {"delay", absl::FormatDuration(impl_->options.drain_delay)}});
  absl::SleepFor(impl_->options.drain_delay);
  const absl::Time end = SteadyNow() + impl_->options.drain_timeout + kTimeToSendAnswers;
  impl_->EndCalls(impl_->options.drain_timeout);
  impl_->SendAnswersAndShutDown(end);
  const absl::Time now = SteadyNow();
  impl_->CloseRanks(now + std::clamp(end - now, kLeastTimeToEndRanks, kMostTimeToEndRanks));
  LogInfo("stopped");
}

}  // namespace expertmesh
