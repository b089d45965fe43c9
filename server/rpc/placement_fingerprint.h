#ifndef EXPERTMESH_SERVER_RPC_PLACEMENT_FINGERPRINT_H_
#define EXPERTMESH_SERVER_RPC_PLACEMENT_FINGERPRINT_H_

#include <string>

#include "server/cluster/expert_group.h"
#include "server/model/model_spec.h"

namespace expertmesh {

// 16 hex digits of which rank owns which expert, over all layers of a model: equal for equal
// placements, in any process. Linear in the number of experts.
std::string PlacementFingerprint(const ModelSpec& model, const ExpertGroup& group);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_PLACEMENT_FINGERPRINT_H_
