#ifndef EXPERTMESH_SERVER_CLUSTER_GROUP_USAGE_H_
#define EXPERTMESH_SERVER_CLUSTER_GROUP_USAGE_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/rank/rank_engine.h"

namespace expertmesh {

// What one rank did in steps that ended well.
struct RankWork {
  uint64_t num_steps = 0;
  uint64_t num_expert_rows = 0;  // that its experts computed
  uint64_t compute_micros = 0;
  std::vector<int64_t>
      bytes_sent;  // [ep_size] payload to each rank, over the communicator; empty: none
  std::vector<int64_t> wait_nanos;  // the same: time for which its payload was waited for
};

struct RankUsage {
  RankWork epoch;  // since the standing, or last, epoch formed
  RankWork total;  // since the group was made
};

// Most rows on one rank divided by the mean, over the epoch; 1 is even, 0 without rows.
double LoadImbalance(absl::Span<const RankUsage> usage);

// The books of a group. Thread safe; a lock per rank and step.
class GroupUsage {
 public:
  explicit GroupUsage(int32_t ep_size);

  void BeginEpoch(absl::Time now);
  // Counts of traffic that are not [ep_size] are left out: a rank may be another process.
  void CountStep(int32_t ep_rank, const RankStepResult& result);

  std::vector<RankUsage> Snapshot() const;  // [ep_size]
  absl::Time epoch_formed() const;          // InfinitePast before the first

 private:
  const int32_t ep_size_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<RankUsage> ranks_;
  absl::Time epoch_formed_ = absl::InfinitePast();
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_GROUP_USAGE_H_
