#ifndef EXPERTMESH_SERVER_SERVED_EXPERTS_H_
#define EXPERTMESH_SERVER_SERVED_EXPERTS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "expertmesh/v1/admin.pb.h"
#include "server/checkpoints.h"
#include "server/cluster/expert_group.h"
#include "server/cluster/local_expert_group.h"
#include "server/routing/router_table.h"

// From a control plane's open checkpoints to what its group holds, and what people are told of it.

namespace expertmesh {

// One router for each MoE layer, with the gate where the checkpoint has one. Blocking.
absl::Status LoadRouters(absl::Span<const ServedModel> models, RouterTable* routers);

// All ranks' experts, with the progress told; not begun where memory is short. Blocking.
absl::Status LoadExperts(absl::Span<const ServedModel> models, bool progress_on_terminal,
                         LocalExpertGroup* group);

// Logs it when some ranks hold no expert of a layer.
void WarnOfEmptyRanks(absl::Span<const ServedModel> models, const ExpertGroup& group);

// The ranks of this process, for AdminService; not what they have done.
void FillLocalRankStatus(absl::Span<const ServedModel> models, const LocalExpertGroup& group,
                         bool loaded, v1::GetStatusResponse* response);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_SERVED_EXPERTS_H_
