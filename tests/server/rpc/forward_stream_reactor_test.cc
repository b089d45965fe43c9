#include "server/rpc/forward_stream_reactor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/server/rpc/forward_stream_client.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {
namespace {

using grpc::StatusCode;

TEST(ForwardStreamReactorTest, AnswersAsCallsComplete) {
  StreamServer server;
  ForwardStreamClient client(server);
  for (const uint64_t seq : {10, 11, 12, 0}) ASSERT_TRUE(client.Send(seq));
  server.controller().AwaitHeld(4);
  for (const uint64_t seq : {12, 0, 10, 11}) {
    ASSERT_TRUE(server.controller().Answer(absl::StrCat(seq)));
    client.ExpectAnswer(seq);
  }
  EXPECT_TRUE(client.Finish().ok());
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

TEST(ForwardStreamReactorTest, OnlyAMessageAloneMayRunOnItsThread) {
  StreamServer server;
  ForwardStreamClient client(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  EXPECT_EQ(server.controller().num_inline(), 1);
  ASSERT_TRUE(client.Send(2));
  server.controller().AwaitHeld(2);
  EXPECT_EQ(server.controller().num_inline(), 1);
  server.controller().AnswerAtOnce();
  EXPECT_EQ(client.ReadAnswers(2), (std::set<uint64_t>{1, 2}));
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, EachMessageHasItsOwnDeadline) {
  StreamServer server;
  ForwardStreamClient client(server);
  const absl::Time before = absl::Now();
  for (const int64_t seconds : {0, 5, 500}) {
    v1::ForwardStreamRequest message = server.Message(static_cast<uint64_t>(seconds));
    message.set_timeout_micros(seconds * 1'000'000);
    ASSERT_TRUE(client.stream().Write(message));
  }
  server.controller().AwaitHeld(3);
  const auto left = [&](const char* id) { return server.controller().deadline(id) - before; };
  EXPECT_GE(left("5"), absl::Seconds(5));
  EXPECT_LT(left("5"), absl::Seconds(20));
  // The server's own limit, a minute, and the stream's, a little less.
  EXPECT_GT(left("0"), absl::Seconds(40));
  EXPECT_LE(left("0"), absl::Seconds(61));
  EXPECT_LE(left("500"), absl::Seconds(61));
  server.controller().Fail("5", absl::DeadlineExceededError("late"));
  client.ExpectError(5, StatusCode::DEADLINE_EXCEEDED, "DEADLINE_PASSED");
  server.controller().AnswerAtOnce();
  EXPECT_EQ(client.ReadAnswers(2), (std::set<uint64_t>{0, 500}));
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, CancelEndsOneMessage) {
  StreamServer server;
  ForwardStreamClient client(server);
  client.Cancel(99);  // nothing of that number
  for (const uint64_t seq : {1, 2}) ASSERT_TRUE(client.Send(seq));
  server.controller().AwaitHeld(2);
  client.Cancel(1);
  client.ExpectError(1, StatusCode::CANCELLED, "CALL_CANCELLED");
  server.controller().AnswerAtOnce();
  client.ExpectAnswer(2);
  client.Cancel(2);
  ASSERT_TRUE(client.Send(1));
  client.ExpectAnswer(1);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, WaitsWhileLoadingAndCanBeCancelledThere) {
  StreamServer server({.serving = false});
  ForwardStreamClient client(server);
  for (const uint64_t seq : {1, 2, 3}) ASSERT_TRUE(client.Send(seq));
  client.Cancel(2);
  client.ExpectError(2, StatusCode::CANCELLED, "CALL_CANCELLED");
  server.controller().AnswerAtOnce();
  server.Serve();
  EXPECT_EQ(client.ReadAnswers(2), (std::set<uint64_t>{1, 3}));
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, DrainingFinishesWhatIsInFlightAndRefusesTheRest) {
  StreamServer server;
  ForwardStreamClient client(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  server.state().StartDraining();
  ASSERT_TRUE(client.Send(2));
  client.ExpectError(2, StatusCode::UNAVAILABLE, "DRAINING");
  ASSERT_TRUE(server.controller().Answer("1"));
  client.ExpectAnswer(1);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, TheEndOfDrainingEndsOpenStreamsOnceTheyAreAnswered) {
  StreamServer server;
  ForwardStreamClient client(server), idle(server), late(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  server.state().StartDraining();
  server.streams().EndAll();
  // What was on its way is answered too, or the stream was ended before it came.
  EXPECT_EQ(idle.Finish().error_code(), StatusCode::UNAVAILABLE);
  ASSERT_TRUE(server.controller().Answer("1"));
  client.ExpectAnswer(1);
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(status), "DRAINING");
  EXPECT_EQ(ReasonOf(late.Finish()), "DRAINING");
}

TEST(ForwardStreamReactorTest, ShutdownEndsStreamsThatStayOpen) {
  StreamServer server;
  ForwardStreamClient client(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  server.server().Shutdown(absl::Now() + absl::Milliseconds(50));
  EXPECT_EQ(server.controller().num_cancelled(), 1);
  EXPECT_EQ(client.Finish().error_code(), StatusCode::UNAVAILABLE);
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

TEST(ForwardStreamReactorTest, HalfCloseIsFollowedByAllAnswers) {
  StreamServer server;
  ForwardStreamClient client(server);
  for (uint64_t seq = 0; seq < 50; ++seq) ASSERT_TRUE(client.Send(seq));
  client.HalfClose();
  server.controller().AwaitHeld(50);
  for (uint64_t seq = 50; seq-- > 0;) ASSERT_TRUE(server.controller().Answer(absl::StrCat(seq)));
  for (uint64_t seq = 50; seq-- > 0;) client.ExpectAnswer(seq);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, AnEmptyStreamIsFine) {
  StreamServer server;
  ForwardStreamClient client(server);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, AResetCancelsEverything) {
  StreamServer server;
  {
    ForwardStreamClient client(server);
    for (uint64_t seq = 0; seq < 20; ++seq) ASSERT_TRUE(client.Send(seq));
    server.controller().AwaitHeld(20);
    client.Reset();
    EXPECT_EQ(client.Finish().error_code(), StatusCode::CANCELLED);
  }
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.controller().num_cancelled(), 20);
  EXPECT_EQ(server.CallsTotal(R"({code="CANCELLED",method="ForwardStream"})"), 20);
  EXPECT_EQ(server.CallsTotal(R"({code="INVALID_ARGUMENT",method="ForwardStream"})"), 0);
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

TEST(ForwardStreamReactorTest, ANumberMayBeUsedAgainAsSoonAsItIsAnswered) {
  StreamServer server;
  server.controller().AnswerAtOnce();
  ForwardStreamClient client(server);
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(client.Send(7));
    client.ExpectAnswer(7);
    ASSERT_FALSE(testing::Test::HasFailure()) << i;
  }
  EXPECT_TRUE(client.Finish().ok());
}

// Everything at once, for the sanitizers; each stream checks that its answers are its own.
TEST(ForwardStreamReactorTest, ManyStreamsDoAnything) {
  StreamServer server(
      {.limits = {.max_stream_bytes = int64_t{64} << 10, .max_all_bytes = int64_t{256} << 10}});
  std::atomic<bool> stop{false};
  std::thread answering([&] {
    while (!stop) {
      if (!server.controller().AnswerOldest()) std::this_thread::yield();
    }
  });
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(seed + thread);
      for (int round = 0; round < 20; ++round) {
        ForwardStreamClient client(server);
        const uint64_t count = random() % 60;
        const bool reset = random() % 4 == 0;
        std::thread writer([&, choice = random()] {
          std::mt19937_64 own(choice);
          for (uint64_t seq = 0; seq < count; ++seq) {
            if (!client.Send(seq, static_cast<int64_t>(own() % 20))) return;
            if (own() % 8 == 0) {
              v1::ForwardStreamRequest cancel;
              cancel.set_stream_seq(own() % (seq + 1));
              cancel.set_cancel(true);
              if (!client.stream().Write(cancel)) return;
            }
            if (reset && own() % 10 == 0) return client.Reset();
          }
          client.stream().WritesDone();
        });
        std::set<uint64_t> answered;
        v1::ForwardStreamResponse response;
        while (client.stream().Read(&response)) {
          EXPECT_TRUE(answered.insert(response.stream_seq()).second);
          if (response.has_response()) {
            EXPECT_EQ(response.response().request_id(), absl::StrCat(response.stream_seq()));
          } else {
            EXPECT_EQ(response.error().code(), static_cast<int>(StatusCode::CANCELLED));
          }
        }
        writer.join();
        const grpc::Status status = client.stream().Finish();
        if (!reset) {
          EXPECT_TRUE(status.ok()) << status.error_message();
          EXPECT_EQ(answered.size(), count);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  server.AwaitStreamsEnd();
  stop = true;
  answering.join();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

}  // namespace
}  // namespace expertmesh
