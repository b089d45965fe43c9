#include "server/rpc/open_calls.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "absl/time/clock.h"
#include "grpcpp/client_context.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {
namespace {

// Ends what hangs.
void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
}

int64_t NumOpen(StreamServer* server) {
  return server->open_calls().AwaitNone(absl::InfinitePast());
}

TEST(OpenCallsTest, AwaitsTheLast) {
  OpenCalls calls;
  EXPECT_EQ(calls.AwaitNone(absl::InfiniteFuture()), 0);
  calls.Begin();
  calls.Begin();
  EXPECT_EQ(calls.AwaitNone(absl::Now() + absl::Milliseconds(10)), 2);
  std::future<int64_t> left =
      std::async(std::launch::async, [&calls] { return calls.AwaitNone(absl::InfiniteFuture()); });
  calls.End();
  EXPECT_EQ(calls.AwaitNone(absl::InfinitePast()), 1);
  calls.End();
  EXPECT_EQ(left.get(), 0);
}

TEST(OpenCallsTest, AUnaryCallIsOpenUntilItIsAnswered) {
  StreamServer server;
  const auto stub = server.NewStub();
  std::future<bool> answered = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::ForwardResponse response;
    return stub->Forward(&context, server.Message(7).request(), &response).ok();
  });
  server.controller().AwaitHeld(1);
  EXPECT_EQ(NumOpen(&server), 1);
  EXPECT_TRUE(server.controller().Answer("7"));
  EXPECT_TRUE(answered.get());
  EXPECT_EQ(server.open_calls().AwaitNone(absl::Now() + absl::Seconds(60)), 0);
}

TEST(OpenCallsTest, AStreamIsOpenUntilItsAnswersAreRead) {
  StreamServer server;
  const auto stub = server.NewStub();
  grpc::ClientContext context;
  SetDeadline(&context);
  const auto stream = stub->ForwardStream(&context);
  // More than gRPC and the kernel take from a server whose client does not read.
  constexpr int64_t kNumTokens = 200'000;
  ASSERT_TRUE(stream->Write(server.Message(1, kNumTokens)));
  server.controller().AwaitHeld(1);
  server.controller().AnswerAtOnce();
  server.streams().EndAll();
  EXPECT_EQ(server.open_calls().AwaitNone(absl::Now() + absl::Milliseconds(100)), 1);
  v1::ForwardStreamResponse response;
  EXPECT_TRUE(stream->Read(&response));
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.open_calls().AwaitNone(absl::Now() + absl::Seconds(60)), 0);
}

}  // namespace
}  // namespace expertmesh
