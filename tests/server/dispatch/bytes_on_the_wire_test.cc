#include <dirent.h>
#include <linux/tcp.h>  // the C library's tcp_info is older
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/planning/monolithic_plan.h"
#include "server/routing/router.h"
#include "tests/server/comm/tcp_group.h"
#include "tests/server/dispatch/dispatch_ranks.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {
namespace {

constexpr int64_t kHidden = 5;
constexpr int64_t kTokens = 30;
constexpr int32_t kTopk = 6;
constexpr int32_t kExperts = 12;
constexpr int64_t kRowBytes = kHidden * 4;      // float32
constexpr int64_t kPartialBytes = kHidden * 2;  // float16
constexpr int64_t kLogitsBytes = kExperts * 4;  // float32

// Of all TCP connections of this process, as the kernel counts them.
int64_t BytesReceivedOverTcp() {
  int64_t total = 0;
  DIR* const entries = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(entries)) {
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (getsockopt(std::atoi(entry->d_name), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    total += static_cast<int64_t>(info.tcpi_bytes_received);
  }
  closedir(entries);
  return total;
}

// [from][to], of one step.
using PairBytes = std::vector<std::vector<int64_t>>;

struct Case {
  RandomRouting routing;
  Placement placement;
  std::vector<int64_t> shard_sizes;
  std::vector<float> hidden;
  std::unique_ptr<Router> router;
  std::vector<float> logits;  // of the router, where it is what made the routing

  Case(uint64_t seed, int32_t ep_size, DispatchMode strategy)
      : Case(std::mt19937_64(seed), ep_size, strategy) {}
  Case(std::mt19937_64 random, int32_t ep_size, DispatchMode strategy)
      : routing(MakeRandomRouting(random, kTokens, kTopk, kExperts)),
        placement(MakeRandomPlacement(random, kExperts, ep_size)),
        shard_sizes(MakeRandomShardSizes(random, kTokens, ep_size)) {
    for (int64_t i = 0; i < kTokens * kHidden; ++i) {
      hidden.push_back(static_cast<float>(random() % 64));
    }
    if (strategy == DispatchMode::kAllGatherReduceScatterMonolithic) RouteByLogits(random);
  }

  void RouteByLogits(std::mt19937_64& random) {
    ModelSpec model;
    model.hidden_size = kHidden;
    LayerSpec& layer = model.layers.emplace_back();
    layer.num_experts = kExperts;
    layer.topk = kTopk;
    router = *NewRouter(model, layer, nullptr);
    std::normal_distribution<float> normal;
    logits.resize(kTokens * kExperts);
    for (float& logit : logits) logit = normal(random);
    EXPECT_TRUE(router
                    ->RouteLogits(reinterpret_cast<const std::byte*>(logits.data()),
                                  DType::kFloat32, kTokens, absl::MakeSpan(routing.topk_ids),
                                  absl::MakeSpan(routing.topk_weights))
                    .ok());
  }

  StepPlan Plan(DispatchMode strategy, CombineMode combine, int64_t max_num_tokens) const {
    const RoutingSegment segment = routing.Segment(0, kTokens);
    StepPlanParams params;
    params.header.activation_dtype = DType::kFloat32;
    params.header.combine_dtype = DType::kFloat16;
    params.header.output_dtype = DType::kFloat32;
    params.header.strategy = strategy;
    params.header.combine = combine;
    params.segments = absl::MakeConstSpan(&segment, 1);
    params.placement = &placement;
    params.shard_sizes = shard_sizes;
    params.max_num_tokens = max_num_tokens;
    StepPlan plan = *PlanStep(params);
    if (strategy == DispatchMode::kAllGatherReduceScatterMonolithic) {
      MakePlanMonolithic(logits, plan);
    }
    return plan;
  }

  // Counted from the routing alone.
  PairBytes Expected(DispatchMode strategy, CombineMode combine, int64_t max_num_tokens) const {
    const int32_t ep_size = placement.ep_size();
    PairBytes out(ep_size, std::vector<int64_t>(ep_size));
    PairBytes back = out;
    const int64_t most_tokens = *std::max_element(shard_sizes.begin(), shard_sizes.end());
    const int64_t num_slots = std::min(
        max_num_tokens, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(most_tokens))));
    int64_t token = 0;
    for (int32_t source = 0; source < ep_size; ++source) {
      for (const int64_t end = token + shard_sizes[source]; token < end; ++token) {
        std::vector<std::set<int32_t>> experts(ep_size);
        for (int32_t k = 0; k < kTopk; ++k) {
          const int32_t id = routing.topk_ids[token * kTopk + k];
          if (id >= 0) experts[placement.owner_rank(id)].insert(id);
        }
        const bool has_expert = std::any_of(experts.begin(), experts.end(),
                                            [](const auto& ids) { return !ids.empty(); });
        for (int32_t owner = 0; owner < ep_size; ++owner) {
          if (owner == source) continue;
          const bool with_logits = strategy == DispatchMode::kAllGatherReduceScatterMonolithic;
          const bool is_gathered =
              with_logits || (strategy == DispatchMode::kAllGatherReduceScatter && has_expert);
          if (is_gathered || !experts[owner].empty()) out[source][owner] += kRowBytes;
          if (with_logits) out[source][owner] += kLogitsBytes;
          const auto num_experts = static_cast<int64_t>(experts[owner].size());
          back[owner][source] += kPartialBytes * (combine == CombineMode::kPerExpert
                                                      ? num_experts
                                                      : std::min<int64_t>(1, num_experts));
        }
      }
    }
    for (int32_t from = 0; from < ep_size; ++from) {
      for (int32_t to = 0; to < ep_size; ++to) {
        if (from == to) continue;
        if (strategy == DispatchMode::kAllToAllFixedCapacity) {
          out[from][to] = num_slots * kRowBytes;
          back[from][to] =
              num_slots * kPartialBytes * (combine == CombineMode::kPerExpert ? kTopk : 1);
        }
        out[from][to] += back[from][to];
      }
    }
    return out;
  }
};

// A row crosses once per (token, owner) that is not its source, however many of the owner's experts
// it needs, and what comes back is one partial each, or one row per expert. Gathered, each row with
// an expert goes once to everyone, or every row with its logits; what comes back is the same. With
// a fixed capacity nothing depends on the routing, but the largest shard chooses the slots.
class BytesOnTheWireTest : public ::testing::TestWithParam<std::tuple<DispatchMode, CombineMode>> {
 protected:
  const DispatchMode strategy_ = std::get<0>(GetParam());
  const CombineMode combine_ = std::get<1>(GetParam());
};

TEST_P(BytesOnTheWireTest, NothingCrossesTwice) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto ep_size = static_cast<int32_t>(1 + seed % 7);
    const Case c(seed, ep_size, strategy_);
    const StepPlan exact = c.Plan(DispatchMode::kAllToAll, combine_, 0);
    const StepPlan plan = c.Plan(strategy_, combine_, kTokens);
    DispatchRanks ranks(plan, c.placement, kHidden, c.hidden);
    ranks.set_router(c.router.get());
    EXPECT_EQ(ranks.Run(), DispatchRanks(exact, c.placement, kHidden, c.hidden).Run());
    const PairBytes expected = c.Expected(strategy_, combine_, kTokens);
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      EXPECT_THAT(ranks.communicator(rank).bytes_sent(),
                  ::testing::ElementsAreArray(expected[rank]));
    }
  }
}

// What the kernel moved, headers and checksums included: at most 1% and 64 bytes for each pair of
// ranks and each of the two ways more.
TEST_P(BytesOnTheWireTest, TcpAddsNextToNothing) {
  for (const int32_t ep_size : {2, 3, 4}) {
    SCOPED_TRACE(std::to_string(ep_size) + " ranks");
    const Case c(static_cast<uint64_t>(ep_size), ep_size, strategy_);
    const StepPlan plan = c.Plan(strategy_, combine_, kTokens);
    DispatchRanks ranks(plan, c.placement, kHidden, c.hidden, NewTcpGroup(ep_size));
    ranks.set_router(c.router.get());
    const int64_t received_before = BytesReceivedOverTcp();
    const std::vector<float> outputs = ranks.Run();
    const int64_t received = BytesReceivedOverTcp() - received_before;
    const StepPlan exact = c.Plan(DispatchMode::kAllToAll, combine_, 0);
    EXPECT_EQ(outputs, DispatchRanks(exact, c.placement, kHidden, c.hidden).Run());
    int64_t rows = 0;
    for (const std::vector<int64_t>& from : c.Expected(strategy_, combine_, kTokens)) {
      for (const int64_t bytes : from) rows += bytes;
    }
    EXPECT_GT(rows, 0);
    EXPECT_GE(received, rows);
    EXPECT_LE(received, rows + rows / 100 + 2 * 64 * ep_size * (ep_size - 1));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, BytesOnTheWireTest,
    ::testing::Combine(::testing::Values(DispatchMode::kAllToAll,
                                         DispatchMode::kAllToAllFixedCapacity,
                                         DispatchMode::kAllGatherReduceScatter,
                                         DispatchMode::kAllGatherReduceScatterMonolithic),
                       ::testing::Values(CombineMode::kSum, CombineMode::kPerExpert)),
    [](const auto& test) {
      return std::string(DispatchModeName(std::get<0>(test.param))) + "_" +
             CombineModeName(std::get<1>(test.param));
    });

}  // namespace
}  // namespace expertmesh
