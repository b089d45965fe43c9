#include "server/cluster/group_usage.h"

#include <algorithm>

namespace expertmesh {
namespace {

void AddCounts(const std::vector<int64_t>& counts, int32_t ep_size, std::vector<int64_t>* sums) {
  if (counts.size() != static_cast<size_t>(ep_size)) return;
  sums->resize(counts.size());
  for (size_t peer = 0; peer < counts.size(); ++peer) {
    // A rank's word: never let a counter fall.
    (*sums)[peer] += std::max<int64_t>(counts[peer], 0);
  }
}

void AddStep(const RankStepResult& result, int32_t ep_size, RankWork* work) {
  ++work->num_steps;
  work->num_expert_rows += static_cast<uint64_t>(std::max<int64_t>(result.num_expert_rows, 0));
  work->compute_micros +=
      static_cast<uint64_t>(std::max<int64_t>(result.timings.compute_micros, 0));
  AddCounts(result.traffic.bytes_sent, ep_size, &work->bytes_sent);
  AddCounts(result.traffic.wait_nanos, ep_size, &work->wait_nanos);
}

}  // namespace

double LoadImbalance(absl::Span<const RankUsage> usage) {
  uint64_t most = 0;
  uint64_t all = 0;
  for (const RankUsage& rank : usage) {
    most = std::max(most, rank.epoch.num_expert_rows);
    all += rank.epoch.num_expert_rows;
  }
  if (all == 0) return 0;
  return static_cast<double>(most) * static_cast<double>(usage.size()) / static_cast<double>(all);
}

GroupUsage::GroupUsage(int32_t ep_size) : ep_size_(ep_size), ranks_(ep_size) {}

void GroupUsage::BeginEpoch(absl::Time now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  epoch_formed_ = now;
  for (RankUsage& rank : ranks_) rank.epoch = RankWork();
}

void GroupUsage::CountStep(int32_t ep_rank, const RankStepResult& result) {
  const std::lock_guard<std::mutex> lock(mutex_);
  AddStep(result, ep_size_, &ranks_[ep_rank].epoch);
  AddStep(result, ep_size_, &ranks_[ep_rank].total);
}

std::vector<RankUsage> GroupUsage::Snapshot() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranks_;
}

absl::Time GroupUsage::epoch_formed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return epoch_formed_;
}

}  // namespace expertmesh
