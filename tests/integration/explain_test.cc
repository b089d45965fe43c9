// Explain against the Forward call that it explains.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/integration/bad_requests.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

RequestTarget Target() { return {"qwen3_moe_bfloat16", 1, 0, 48, 12}; }

std::unique_ptr<ServerUnderTest> StartServer(std::vector<std::string> args) {
  return ServerUnderTest::Start(
      {.checkpoint = "tests/golden/qwen3_moe_bfloat16", .args = std::move(args)});
}

TEST(ExplainTest, GivenTopK) {
  const auto server = StartServer({"--local_ranks=3", "--max_step_tokens=8"});
  ASSERT_NE(server, nullptr);
  v1::ExplainRequest request;
  *request.mutable_request() = GoodRequest(Target(), 20, 3);
  v1::TopK* topk = request.mutable_request()->mutable_topk();
  topk->set_ids(4, -1);
  for (int k = 0; k < 3; ++k) topk->set_ids(6 + k, -1);  // token 2 has none
  topk->set_ids(9, 11);                                  // token 3: 11 twice, and 0
  topk->set_ids(10, 11);
  topk->set_ids(11, 0);
  request.set_max_tokens(10);
  const auto explained = server->Explain(request);
  ASSERT_TRUE(explained.ok()) << explained.status();
  EXPECT_EQ(explained->model(), "qwen3_moe_bfloat16");
  EXPECT_EQ(explained->layer(), 1);
  EXPECT_EQ(explained->num_tokens(), 20);
  EXPECT_EQ(explained->topk(), 3);
  EXPECT_EQ(explained->ep_size(), 3);
  EXPECT_EQ(explained->num_steps(), 3);
  EXPECT_EQ(explained->strategy(), v1::DISPATCH_MODE_ALL_TO_ALL);
  EXPECT_NE(explained->strategy_reason(), "");

  ASSERT_EQ(explained->tokens_size(), 10);
  for (int t = 0; t < 10; ++t) {
    const v1::ExplainedToken& token = explained->tokens(t);
    EXPECT_EQ(token.token(), t);
    EXPECT_EQ(token.step(), t / 8);
    ASSERT_EQ(token.experts_size(), 3);
    std::vector<int32_t> owners;
    for (int k = 0; k < 3; ++k) {
      const int32_t id = topk->ids(3 * t + k);
      EXPECT_EQ(token.experts(k).expert_id(), id);
      if (id < 0) continue;
      EXPECT_EQ(token.experts(k).weight(), topk->weights(3 * t + k));
      EXPECT_EQ(token.experts(k).owner_rank(), id / 4);  // 12 experts on 3 ranks
      EXPECT_EQ(token.experts(k).local_expert_id(), id % 4);
      owners.push_back(id / 4);
    }
    std::sort(owners.begin(), owners.end());
    owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
    EXPECT_THAT(token.owner_ranks(), testing::ElementsAreArray(owners));
  }
  EXPECT_THAT(explained->tokens(3).owner_ranks(), testing::ElementsAre(0, 2));

  v1::ForwardRequest stats_only = request.request();
  stats_only.mutable_options()->set_stats_only(true);
  const CallOutcome forward = server->Forward(stats_only);
  ASSERT_TRUE(forward.ok()) << forward;
  EXPECT_EQ(forward.response.served_by().num_steps(), explained->num_steps());
  EXPECT_THAT(explained->tokens_per_expert(),
              testing::ElementsAreArray(forward.response.stats().tokens_per_expert()));

  int64_t source_tokens = 0;
  int64_t sent_away = 0;
  int64_t rows = 0;
  ASSERT_EQ(explained->ranks_size(), 3);
  for (const v1::ExplainedRank& rank : explained->ranks()) {
    source_tokens += rank.num_source_tokens();
    rows += rank.num_expert_rows();
    ASSERT_EQ(rank.send_counts_size(), 3);
    for (int peer = 0; peer < 3; ++peer) {
      if (peer != rank.ep_rank()) sent_away += rank.send_counts(peer);
    }
    EXPECT_LE(rank.num_active_experts(), 4);
  }
  EXPECT_EQ(source_tokens, 20);
  EXPECT_EQ(explained->dispatch_bytes(), forward.response.stats().dispatch_bytes());
  EXPECT_EQ(explained->combine_bytes(), forward.response.stats().combine_bytes());
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(explained->ranks(rank).num_expert_rows(),
              forward.response.stats().rows_per_rank(rank));
  }
  // A pair less for the duplicate, which is computed once.
  EXPECT_EQ(rows, forward.response.stats().num_pairs() - 1);
  EXPECT_EQ(explained->dispatch_bytes(), sent_away * 48 * 2);
  EXPECT_EQ(explained->combine_bytes(), sent_away * 48 * 2);
  EXPECT_GE(explained->load_imbalance(), 1.0);
  EXPECT_THAT(explained->warnings(), testing::Contains(testing::HasSubstr("3 steps")));
}

TEST(ExplainTest, RoutedByTheServerAsForwardRoutes) {
  const auto server = StartServer({"--local_ranks=2"});
  ASSERT_NE(server, nullptr);
  v1::ExplainRequest request;
  *request.mutable_request() = GoodRequest(Target(), 30, 1);
  request.mutable_request()->mutable_server_gate();
  const auto explained = server->Explain(request);
  ASSERT_TRUE(explained.ok()) << explained.status();
  EXPECT_EQ(explained->topk(), 5);
  EXPECT_EQ(explained->tokens_size(), 16);
  const CallOutcome forward = server->Forward(request.request());
  ASSERT_TRUE(forward.ok()) << forward;
  EXPECT_EQ(std::accumulate(explained->tokens_per_expert().begin(),
                            explained->tokens_per_expert().end(), int64_t{0}),
            forward.response.stats().num_pairs());

  // What it shows, given back as top-k, gives the same bytes.
  request.set_max_tokens(30);
  v1::ForwardRequest given = request.request();
  const auto all = server->Explain(request);
  ASSERT_TRUE(all.ok()) << all.status();
  given.mutable_topk()->set_topk(5);
  for (const v1::ExplainedToken& token : all->tokens()) {
    for (const v1::ExplainedExpert& expert : token.experts()) {
      given.mutable_topk()->add_ids(expert.expert_id());
      given.mutable_topk()->add_weights(expert.weight());
    }
  }
  const CallOutcome again = server->Forward(given);
  ASSERT_TRUE(again.ok()) << again;
  EXPECT_EQ(again.response.output().data(), forward.response.output().data());
}

TEST(ExplainTest, OneRankNeedsNoDispatch) {
  const auto server = StartServer({});
  ASSERT_NE(server, nullptr);
  v1::ExplainRequest request;
  *request.mutable_request() = GoodRequest(Target(), 2, 2);
  const auto explained = server->Explain(request);
  ASSERT_TRUE(explained.ok()) << explained.status();
  EXPECT_EQ(explained->strategy(), v1::DISPATCH_MODE_PASSTHROUGH);
  EXPECT_EQ(explained->dispatch_bytes(), 0);
  EXPECT_EQ(explained->estimated_flops(), explained->ranks(0).num_expert_rows() * 6 * 48 *
                                              server->GetModel("")->layers(0).intermediate_size());
}

TEST(ExplainTest, BadRequestsAreRefusedAsForwardRefusesThem) {
  const auto server = StartServer({});
  ASSERT_NE(server, nullptr);
  EXPECT_EQ(server->Explain(v1::ExplainRequest()).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (const BadRequest& bad : BadRequests(Target())) {
    SCOPED_TRACE(bad.name);
    v1::ExplainRequest request;
    *request.mutable_request() = GoodRequest(Target(), 4, 2);
    bad.spoil(request.mutable_request());
    EXPECT_EQ(server->Explain(request).status().code(), bad.code);
  }
}

TEST(ExplainTest, NoTokens) {
  const auto server = StartServer({"--local_ranks=2"});
  ASSERT_NE(server, nullptr);
  v1::ExplainRequest request;
  *request.mutable_request() = GoodRequest(Target(), 0, 2);
  const auto explained = server->Explain(request);
  ASSERT_TRUE(explained.ok()) << explained.status();
  EXPECT_EQ(explained->num_steps(), 0);
  EXPECT_EQ(explained->tokens_size(), 0);
  EXPECT_EQ(explained->load_imbalance(), 0);
}

}  // namespace
}  // namespace expertmesh
