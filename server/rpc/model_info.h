#ifndef EXPERTMESH_SERVER_RPC_MODEL_INFO_H_
#define EXPERTMESH_SERVER_RPC_MODEL_INFO_H_

#include <string>

#include "expertmesh/v1/expert_service.pb.h"
#include "server/model/model_spec.h"
#include "server/rpc/forward_validation.h"

namespace expertmesh {

// A router rule in words, e.g. "softmax, top 8, renormalized".
std::string RouterRuleText(const LayerSpec& layer);

// What of GetModelResponse does not change while the process runs: all but ready, incarnation,
// epoch, placement_fingerprint.
v1::GetModelResponse DescribeModel(const ModelSpec& model, const ForwardLimits& limits);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_MODEL_INFO_H_
