// How many bytes streams may hold in the server, whatever their clients do.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "grpcpp/client_context.h"
#include "tests/server/rpc/forward_stream_client.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {
namespace {

TEST(ForwardStreamBudgetTest, ReadsAreWithheldWhileTheBudgetIsSpent) {
  constexpr int64_t kTokens = 512;  // 64 KiB of hidden states, and as much for the answer
  StreamServer server({.limits = {.max_stream_bytes = int64_t{1} << 20}});
  ForwardStreamClient client(server);
  constexpr int kMessages = 200;
  std::thread writer([&] {
    for (int seq = 0; seq < kMessages; ++seq) {
      EXPECT_TRUE(client.Send(static_cast<uint64_t>(seq), kTokens));
    }
  });
  server.controller().AwaitHeld(7);
  std::set<uint64_t> answered;
  for (int i = 0; i < kMessages; ++i) {
    server.controller().AwaitHeld(1);
    ASSERT_TRUE(server.controller().AnswerOldest());
    answered.insert(client.ReadAnswer(kTokens));
  }
  EXPECT_EQ(answered.size(), static_cast<size_t>(kMessages));
  writer.join();
  // Seven of 140 KiB make 1 MiB; one more may be read, and one while an answer's size is unknown.
  EXPECT_LE(server.controller().max_held(), 9u);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamBudgetTest, ClientsThatNeverReadHoldLittleAndStopNobody) {
  constexpr int64_t kTokens = 512;
  // Together the idle ones use up the process's bound as well.
  StreamServer server(
      {.limits = {.max_stream_bytes = int64_t{2} << 20, .max_all_bytes = int64_t{4} << 20}});
  server.controller().AnswerAtOnce();
  constexpr int kIdle = 4;
  constexpr int kMessages = 300;  // 20 MiB each
  std::vector<std::unique_ptr<ForwardStreamClient>> idle;
  std::vector<std::thread> writers;
  std::atomic<int> num_written{0};
  for (int i = 0; i < kIdle; ++i) {
    idle.push_back(std::make_unique<ForwardStreamClient>(server));
    writers.emplace_back([&, client = idle.back().get()] {
      for (int seq = 0; seq < kMessages; ++seq) {
        EXPECT_TRUE(client->Send(static_cast<uint64_t>(seq), kTokens));
        ++num_written;
      }
    });
  }
  ForwardStreamClient busy(server);
  int64_t most_allocated = 0;
  for (uint64_t seq = 0; seq < 500; ++seq) {
    ASSERT_TRUE(busy.Send(seq));
    busy.ExpectAnswer(seq);
    grpc::ClientContext context;
    v1::ForwardResponse response;
    ASSERT_TRUE(busy.stub().Forward(&context, server.Message(seq).request(), &response).ok());
    most_allocated = std::max(most_allocated, server.pool().allocated_bytes());
  }
  EXPECT_LT(num_written, kIdle * kMessages) << "the test did not fill the budget";
  EXPECT_LE(most_allocated, (int64_t{4} << 20) + (kIdle + 1) * (int64_t{256} << 10));
  EXPECT_TRUE(busy.Finish().ok());
  // Once they read, everything is there.
  for (const auto& client : idle) {
    EXPECT_EQ(client->ReadAnswers(kMessages, kTokens).size(), static_cast<size_t>(kMessages));
  }
  for (std::thread& writer : writers) writer.join();
  for (const auto& client : idle) EXPECT_TRUE(client->Finish().ok());
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

// Each stream may always have a message in flight, so their number must not be what bounds answers.
TEST(ForwardStreamBudgetTest, AnswersOnAllStreamsTogetherAreBounded) {
  constexpr int64_t kTokens = 512;  // 64 KiB
  constexpr size_t kStreams = 12;
  constexpr size_t kTaken = 7;  // of 68 KiB, in twice max_all_bytes
  StreamServer server(
      {.limits = {.max_stream_bytes = int64_t{64} << 10, .max_all_bytes = int64_t{256} << 10}});
  std::vector<std::unique_ptr<ForwardStreamClient>> clients;
  size_t num_refused = 0;
  for (uint64_t i = 0; i < kStreams; ++i) {
    ForwardStreamClient& client =
        *clients.emplace_back(std::make_unique<ForwardStreamClient>(server));
    ASSERT_TRUE(client.Send(i, kTokens));
    if (num_refused == 0 && i < kTaken) {
      server.controller().AwaitHeld(i + 1);
      continue;
    }
    v1::ForwardStreamResponse response;
    ASSERT_TRUE(client.stream().Read(&response));
    EXPECT_EQ(response.error().code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED))
        << response.ShortDebugString();
    ++num_refused;
  }
  EXPECT_EQ(num_refused, kStreams - kTaken);
  server.controller().AnswerAtOnce();
  for (uint64_t i = 0; i < kStreams; ++i) {
    if (i < kTaken) {
      EXPECT_EQ(clients[i]->ReadAnswer(kTokens), i);
    }
    ASSERT_TRUE(clients[i]->Send(100, kTokens));
    EXPECT_EQ(clients[i]->ReadAnswer(kTokens), 100u);
    EXPECT_TRUE(clients[i]->Finish().ok());
  }
}

}  // namespace
}  // namespace expertmesh
