#include "client/retrying_call.h"

#include <gtest/gtest.h>

#include <string>

#include "client/client_error.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertmesh {
namespace {

absl::Status ServerError(grpc::StatusCode code, const std::string& reason, int64_t retry_millis) {
  google::rpc::Status details;
  details.set_code(code);
  google::rpc::ErrorInfo info;
  info.set_domain("expertmesh");
  info.set_reason(reason);
  (*info.mutable_metadata())["field"] = "topk.ids[3]";
  details.add_details()->PackFrom(info);
  if (retry_millis > 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_millis * 1000000));
    details.add_details()->PackFrom(retry);
  }
  return StatusOfServer(grpc::Status(code, "text", details.SerializeAsString()));
}

const absl::Time kNow = absl::FromUnixSeconds(1000);
const absl::Time kLate = kNow + absl::Hours(1);

TEST(RetryingCallTest, DetailsSurviveTheWay) {
  const auto details =
      GetServerErrorDetails(ServerError(grpc::StatusCode::INVALID_ARGUMENT, "INVALID_FIELD", 0));
  ASSERT_TRUE(details.has_value());
  EXPECT_EQ(details->reason, "INVALID_FIELD");
  EXPECT_EQ(details->field, "topk.ids[3]");
  EXPECT_FALSE(details->retry_after.has_value());
  EXPECT_FALSE(GetServerErrorDetails(absl::UnavailableError("connection refused")).has_value());
}

TEST(RetryingCallTest, BackoffGrowsToItsLimitWithJitterInItsUpperHalf) {
  const RetryPolicy policy{10, absl::Milliseconds(50), absl::Milliseconds(300), 2.0};
  const absl::Status lost = absl::UnavailableError("");
  EXPECT_EQ(BackoffBeforeRetry(policy, lost, 1, kNow, kLate, 0.0), absl::Milliseconds(25));
  EXPECT_EQ(BackoffBeforeRetry(policy, lost, 1, kNow, kLate, 1.0), absl::Milliseconds(50));
  EXPECT_EQ(BackoffBeforeRetry(policy, lost, 2, kNow, kLate, 1.0), absl::Milliseconds(100));
  EXPECT_EQ(BackoffBeforeRetry(policy, lost, 3, kNow, kLate, 1.0), absl::Milliseconds(200));
  EXPECT_EQ(BackoffBeforeRetry(policy, lost, 4, kNow, kLate, 1.0), absl::Milliseconds(300));
}

TEST(RetryingCallTest, OnlyWhatMayBeRetriedIs) {
  const RetryPolicy policy;
  EXPECT_TRUE(
      BackoffBeforeRetry(policy, absl::UnavailableError(""), 1, kNow, kLate, 0).has_value());
  for (const absl::Status& status :
       {absl::InvalidArgumentError(""), absl::InternalError(""), absl::DeadlineExceededError(""),
        absl::CancelledError(""),
        ServerError(grpc::StatusCode::RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE", 0)}) {
    EXPECT_FALSE(BackoffBeforeRetry(policy, status, 1, kNow, kLate, 0).has_value()) << status;
  }
  EXPECT_FALSE(
      BackoffBeforeRetry(policy, absl::UnavailableError(""), policy.max_attempts, kNow, kLate, 0)
          .has_value());
}

TEST(RetryingCallTest, TheServersAdviceIsFollowed) {
  const RetryPolicy policy;
  EXPECT_EQ(BackoffBeforeRetry(policy,
                               ServerError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 700),
                               1, kNow, kLate, 0.0),
            absl::Milliseconds(700));
}

TEST(RetryingCallTest, NoRetryThatTheDeadlineWouldCutOff) {
  const RetryPolicy policy{4, absl::Milliseconds(50), absl::Seconds(2), 2.0};
  EXPECT_FALSE(BackoffBeforeRetry(policy, absl::UnavailableError(""), 1, kNow,
                                  kNow + absl::Milliseconds(50), 1.0)
                   .has_value());
  EXPECT_TRUE(BackoffBeforeRetry(policy, absl::UnavailableError(""), 1, kNow,
                                 kNow + absl::Milliseconds(51), 1.0)
                  .has_value());
}

TEST(RetryingCallTest, ADeadlineWithoutAReasonTellsOfTheAttemptBefore) {
  const absl::Status before = ServerError(grpc::StatusCode::UNAVAILABLE, "NO_EPOCH", 10);
  const absl::Status late = absl::DeadlineExceededError("Deadline Exceeded");
  const absl::Status told = WithAttemptBefore(late, before);
  EXPECT_EQ(told.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(told.message(), "Deadline Exceeded (the attempt before ended UNAVAILABLE: text)");
  EXPECT_EQ(WithAttemptBefore(late, absl::OkStatus()), late);
  EXPECT_EQ(WithAttemptBefore(absl::UnavailableError("gone"), before),
            absl::UnavailableError("gone"));
  const absl::Status explained = ServerError(grpc::StatusCode::DEADLINE_EXCEEDED, "TOO_LATE", 0);
  EXPECT_EQ(WithAttemptBefore(explained, before), explained);
}

}  // namespace
}  // namespace expertmesh
