#include "client/cli/error_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "client/client_error.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertmesh {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

std::string TooLarge(const char* message, int64_t request_bytes) {
  return ErrorWithAdvice(WithRequestBytes(absl::ResourceExhaustedError(message), request_bytes));
}

TEST(ErrorAdviceTest, WhoseLimitAMessageExceeds) {
  const std::string request =
      TooLarge("Received message larger than max (80000000 vs. 75497472)", 80000000);
  EXPECT_THAT(request,
              HasSubstr("the request of 80000000 bytes is above the server's limit of 75497472"));
  EXPECT_THAT(request, HasSubstr("--max_message_bytes"));
  const std::string answer =
      TooLarge("Received message larger than max (80000000 vs. 75497472)", 1000);
  EXPECT_THAT(answer, HasSubstr("the answer of 80000000 bytes is above this client's limit"));
  EXPECT_THAT(answer, Not(HasSubstr("--max_message_bytes")));
}

// Not told apart by the client's own limit, which a server may have, too.
TEST(ErrorAdviceTest, AServerWithTheClientsLimit) {
  const char message[] = "Received message larger than max (268435457 vs. 268435456)";
  EXPECT_THAT(TooLarge(message, 268435457), HasSubstr("above the server's limit of 268435456"));
  EXPECT_THAT(TooLarge(message, 1000), HasSubstr("above this client's limit of 268435456"));
}

TEST(ErrorAdviceTest, WhatASenderRefuses) {
  const char message[] = "Sent message larger than max (268435457 vs. 268435456)";
  const std::string request = TooLarge(message, 268435457);
  EXPECT_THAT(request, HasSubstr("the request of 268435457 bytes is above this client's limit"));
  EXPECT_THAT(request, Not(HasSubstr("--max_message_bytes")));
  EXPECT_THAT(TooLarge(message, 1000), HasSubstr("above the server's limit of 268435456"));
}

TEST(ErrorAdviceTest, NobodysLimitWhereTheRequestsSizeIsUnknown) {
  const std::string text = ErrorWithAdvice(
      absl::ResourceExhaustedError("Received message larger than max (268435457 vs. 268435456)"));
  EXPECT_THAT(text, HasSubstr("a message of 268435457 bytes is above its limit of 268435456"));
  EXPECT_THAT(text, Not(HasSubstr("server")));
  for (const char* other : {"no memory", "message larger than max (", "message larger than max (1)",
                            "message larger than max (1 vs. x)"}) {
    EXPECT_THAT(ErrorWithAdvice(absl::ResourceExhaustedError(other)), Not(HasSubstr("advice")));
    EXPECT_THAT(TooLarge(other, 1), Not(HasSubstr("advice")));
  }
}

TEST(ErrorAdviceTest, WhatTheReasonMeansAndWhenToTryAgain) {
  google::rpc::ErrorInfo info;
  info.set_reason("NO_EPOCH");
  info.set_domain("expertmesh");
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(100'000'000);
  google::rpc::Status details;
  details.add_details()->PackFrom(info);
  details.add_details()->PackFrom(retry);
  absl::Status status = absl::UnavailableError("not all ranks came");
  status.SetPayload("type.googleapis.com/google.rpc.Status",
                    absl::Cord(details.SerializeAsString()));
  const std::string text = ErrorWithAdvice(status);
  EXPECT_THAT(text, HasSubstr("UNAVAILABLE: not all ranks came\n  reason: NO_EPOCH\n"));
  EXPECT_THAT(text, HasSubstr("`expertmesh status`"));
  EXPECT_THAT(text, EndsWith("; the server advises to try again in 100ms"));
}

TEST(ErrorAdviceTest, WhatABareDeadlineMayHide) {
  const std::string text = ErrorWithAdvice(absl::DeadlineExceededError("Deadline Exceeded"));
  EXPECT_THAT(text, HasSubstr("--timeout"));
  EXPECT_THAT(text, HasSubstr("which rank it misses: `expertmesh status`"));
}

}  // namespace
}  // namespace expertmesh
