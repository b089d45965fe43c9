#include "client/cli/error_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertmesh {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ErrorAdviceTest, WhoseLimitAMessageExceeds) {
  const std::string request = ErrorWithAdvice(
      absl::ResourceExhaustedError("Received message larger than max (80000000 vs. 75497472)"));
  EXPECT_THAT(request, HasSubstr("80000000 bytes is above the server's limit of 75497472"));
  EXPECT_THAT(request, HasSubstr("--max_message_bytes"));
  const std::string answer = ErrorWithAdvice(
      absl::ResourceExhaustedError("Received message larger than max (268435457 vs. 268435456)"));
  EXPECT_THAT(answer, HasSubstr("the answer of 268435457 bytes is above this client's limit"));
  EXPECT_THAT(answer, Not(HasSubstr("--max_message_bytes")));
  for (const char* other : {"no memory", "message larger than max (", "message larger than max (1)",
                            "message larger than max (1 vs. x)"}) {
    EXPECT_THAT(ErrorWithAdvice(absl::ResourceExhaustedError(other)), Not(HasSubstr("advice")));
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

}  // namespace
}  // namespace expertmesh
