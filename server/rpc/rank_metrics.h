#ifndef EXPERTMESH_SERVER_RPC_RANK_METRICS_H_
#define EXPERTMESH_SERVER_RPC_RANK_METRICS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/cluster/group_usage.h"
#include "server/cluster/membership.h"
#include "server/ops/metrics.h"

namespace expertmesh {

// A group of more ranks shows what each sent and waited for in sum, not by peer: that would be
// ep_size squared series.
inline constexpr size_t kMaxRanksByPeer = 64;

// What /metrics tells of a group's ranks, looked up when it is read. `members` is [ep_size] or, for
// ranks of this process, empty.
std::vector<MetricFamily> RankMetrics(uint64_t epoch, absl::Span<const RankUsage> usage,
                                      absl::Span<const MemberView> members);

// 1; the labels say what runs. `instruction_set` is empty until the first ranks have said theirs.
MetricFamily BuildInfo(const std::string& version, const std::string& instruction_set,
                       int32_t num_ranks);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_METRICS_H_
