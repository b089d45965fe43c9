#include "server/rpc/epoch_end_wire.h"

#include "server/rpc/status_mapping.h"

namespace expertmesh {

v1::EpochEnd EpochEndToWire(uint64_t epoch, const EpochEnd& end) {
  v1::EpochEnd message;
  message.set_epoch(epoch);
  message.set_reason(ToRpcStatus(end.reason).message());
  switch (end.kind) {
    case EpochEndKind::kLoss:
      message.set_kind(v1::EPOCH_END_KIND_LOSS);
      break;
    case EpochEndKind::kRankLeft:
      message.set_kind(v1::EPOCH_END_KIND_RANK_LEFT);
      break;
    case EpochEndKind::kControlPlaneStops:
      message.set_kind(v1::EPOCH_END_KIND_CONTROL_PLANE_STOPS);
      break;
  }
  return message;
}

EpochEnd EpochEndFromWire(const v1::EpochEnd& message) {
  EpochEnd end;
  end.reason = absl::UnavailableError(message.reason());
  switch (message.kind()) {
    case v1::EPOCH_END_KIND_RANK_LEFT:
      end.kind = EpochEndKind::kRankLeft;
      break;
    case v1::EPOCH_END_KIND_CONTROL_PLANE_STOPS:
      end.kind = EpochEndKind::kControlPlaneStops;
      break;
    default:
      end.kind = EpochEndKind::kLoss;
  }
  return end;
}

}  // namespace expertmesh
