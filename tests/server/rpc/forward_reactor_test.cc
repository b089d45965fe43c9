#include "server/rpc/forward_reactor.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "kernels/base/steady_now.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// One of the unary methods that take their message as bytes.
class CallWithoutMessageTest : public ::testing::TestWithParam<const char*> {
 protected:
  enum class End { kCancel, kHalfClose };

  // Sends the headers of a call and, instead of a message, its end.
  grpc::Status Call(End end) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoSeconds(kPatience));
    grpc::CompletionQueue queue;
    const auto call =
        stub_.PrepareCall(&context, absl::StrCat("/", kExpertServiceName, "/", GetParam()), &queue);
    call->StartCall(&context);
    EXPECT_TRUE(Next(queue));
    if (end == End::kCancel) {
      context.TryCancel();
    } else {
      call->WritesDone(&context);
      EXPECT_TRUE(Next(queue));
    }
    grpc::Status status;
    call->Finish(&status, &context);
    EXPECT_TRUE(Next(queue));
    queue.Shutdown();
    EXPECT_FALSE(Next(queue));
    return status;
  }

  int64_t Counted(const char* code) const {
    return server_.CallsTotal(absl::StrCat("{code=\"", code, "\",method=\"", GetParam(), "\"}"));
  }

  StreamServer server_;

 private:
  static bool Next(grpc::CompletionQueue& queue) {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_{
      grpc::CreateChannel(server_.target(), grpc::InsecureChannelCredentials())};
};

TEST_P(CallWithoutMessageTest, CancelledBeforeItsMessageCame) {
  // gRPC drops some of them itself.
  constexpr int64_t kNumCounted = 20;
  const absl::Time deadline = SteadyNow() + kPatience;
  while (Counted("CANCELLED") < kNumCounted) {
    ASSERT_LT(SteadyNow(), deadline);
    EXPECT_EQ(Call(End::kCancel).error_code(), grpc::StatusCode::CANCELLED);
    ASSERT_EQ(Counted("INVALID_ARGUMENT") + Counted("NOT_FOUND"), 0);
  }
  EXPECT_EQ(server_.open_calls().AwaitNone(SteadyNow() + kPatience), 0);
  EXPECT_EQ(Counted("INVALID_ARGUMENT") + Counted("NOT_FOUND"), 0);
}

TEST_P(CallWithoutMessageTest, ClosedBeforeItsMessageCame) {
  const grpc::Status status = Call(End::kHalfClose);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(status.error_message(), "the call ended before its message came");
  EXPECT_EQ(Counted("CANCELLED"), 1);
}

INSTANTIATE_TEST_SUITE_P(Methods, CallWithoutMessageTest, ::testing::Values("Forward", "Explain"),
                         [](const auto& method) { return std::string(method.param); });

}  // namespace
}  // namespace expertmesh
