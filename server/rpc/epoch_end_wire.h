#ifndef EXPERTMESH_SERVER_RPC_EPOCH_END_WIRE_H_
#define EXPERTMESH_SERVER_RPC_EPOCH_END_WIRE_H_

#include <cstdint>

#include "expertmesh/v1/rank.pb.h"
#include "server/cluster/epoch_end.h"

namespace expertmesh {

v1::EpochEnd EpochEndToWire(uint64_t epoch, const EpochEnd& end);
// The reason has the wire's text and the code UNAVAILABLE. A kind that is not known is a loss.
EpochEnd EpochEndFromWire(const v1::EpochEnd& message);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EPOCH_END_WIRE_H_
