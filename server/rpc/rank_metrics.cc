#include "server/rpc/rank_metrics.h"

#include <numeric>
#include <string>

#include "absl/time/time.h"

namespace expertmesh {
namespace {

constexpr MetricFamily::Kind kCounter = MetricFamily::Kind::kCounter;
constexpr MetricFamily::Kind kGauge = MetricFamily::Kind::kGauge;

// `value` gives a rank's.
template <typename Value>
MetricFamily PerRank(const char* name, const char* help, MetricFamily::Kind kind, size_t num_ranks,
                     const Value& value) {
  MetricFamily family = {name, help, kind, {}};
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    family.samples.push_back({{{"rank", std::to_string(rank)}}, static_cast<double>(value(rank))});
  }
  return family;
}

// `counts` gives what a rank counted of each other.
template <typename Counts>
MetricFamily PerPair(const char* name, const char* help, size_t num_ranks, double unit,
                     const char* own_label, const char* peer_label, const Counts& counts) {
  MetricFamily family = {name, help, kCounter, {}};
  for (size_t own = 0; own < num_ranks; ++own) {
    const std::vector<int64_t>& counted = counts(own);
    const auto add = [&](std::string peer, int64_t value) {
      family.samples.push_back({{{own_label, std::to_string(own)}, {peer_label, std::move(peer)}},
                                static_cast<double>(value) * unit});
    };
    if (num_ranks > kMaxRanksByPeer) {
      add("all", std::accumulate(counted.begin(), counted.end(), int64_t{0}));
      continue;
    }
    for (size_t peer = 0; peer < num_ranks; ++peer) {
      if (peer != own) add(std::to_string(peer), counted.empty() ? 0 : counted[peer]);
    }
  }
  return family;
}

}  // namespace

std::vector<MetricFamily> RankMetrics(uint64_t epoch, absl::Span<const RankUsage> usage,
                                      absl::Span<const MemberView> members) {
  const size_t num_ranks = usage.size();
  const auto total = [&usage](size_t rank) -> const RankWork& { return usage[rank].total; };
  std::vector<MetricFamily> families;
  families.push_back({"expertmesh_epoch",
                      "Number of the standing epoch; 0: none",
                      kGauge,
                      {{{}, static_cast<double>(epoch)}}});
  families.push_back(
      {"expertmesh_load_imbalance",
       "Most rows on one rank divided by the mean, over this epoch; 1 is even, 0 without rows",
       kGauge,
       {{{}, LoadImbalance(usage)}}});
  families.push_back(PerRank("expertmesh_rank_steps_total",
                             "Steps that ended well, by rank, its part computed", kCounter,
                             num_ranks, [&](size_t rank) { return total(rank).num_steps; }));
  families.push_back(PerRank("expertmesh_rank_expert_rows_total",
                             "Rows that the rank's experts computed in these steps", kCounter,
                             num_ranks, [&](size_t rank) { return total(rank).num_expert_rows; }));
  families.push_back(
      PerRank("expertmesh_rank_compute_seconds_total",
              "Time for which the rank computed in these steps", kCounter, num_ranks,
              [&](size_t rank) { return 1e-6 * static_cast<double>(total(rank).compute_micros); }));
  families.push_back(PerPair(
      "expertmesh_rank_sent_bytes_total",
      "Payload that a rank sent to another over the communicator, until the last of these steps",
      num_ranks, 1, "source", "destination",
      [&](size_t rank) -> const std::vector<int64_t>& { return total(rank).bytes_sent; }));
  families.push_back(PerPair(
      "expertmesh_rank_wait_seconds_total",
      "Time from a rank (destination) reaching an exchange until the bytes of another (source) had "
      "come; a rank that others wait for is slow, or its link is",
      num_ranks, 1e-9, "destination", "source",
      [&](size_t rank) -> const std::vector<int64_t>& { return total(rank).wait_nanos; }));
  if (members.empty()) return families;
  families.push_back(
      PerRank("expertmesh_rank_active", "1 where the rank is a member of the standing epoch",
              kGauge, members.size(),
              [&](size_t rank) { return members[rank].state == MemberState::kActive ? 1 : 0; }));
  families.push_back(PerRank(
      "expertmesh_rank_memory_bytes", "Resident bytes of the rank's process, as its heartbeat says",
      kGauge, members.size(), [&](size_t rank) { return members[rank].memory_used_bytes; }));
  families.push_back(PerRank(
      "expertmesh_rank_heartbeat_age_seconds",
      "Time since the rank was last heard of; 0 where it is missing", kGauge, members.size(),
      [&](size_t rank) { return absl::ToDoubleSeconds(members[rank].heartbeat_age); }));
  return families;
}

MetricFamily BuildInfo(const std::string& version, const std::string& instruction_set,
                       int32_t num_ranks) {
  MetricFamily family;
  family.name = "expertmesh_build_info";
  family.help =
      "1; the labels say what runs: version, the ranks' instruction set (empty until they have "
      "come), number of ranks";
  family.samples.push_back(
      {{{"isa", instruction_set}, {"ranks", std::to_string(num_ranks)}, {"version", version}}, 1});
  return family;
}

}  // namespace expertmesh
