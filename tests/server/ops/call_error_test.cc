#include "server/ops/call_error.h"

#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

TEST(CallErrorTest, EveryReasonHasItsOwnNameAndComesBackFromIt) {
  std::set<std::string> names;
  for (int i = 0; i < kNumErrorReasons; ++i) {
    const auto reason = static_cast<ErrorReason>(i);
    const std::string name(ErrorReasonName(reason));
    SCOPED_TRACE(name);
    EXPECT_TRUE(names.insert(name).second);
    EXPECT_EQ(ErrorReasonFromName(name), reason);
    EXPECT_NE(ErrorReasonCode(reason), absl::StatusCode::kOk);
    const absl::Status status = CallError(reason, "text");
    EXPECT_EQ(status.code(), ErrorReasonCode(reason));
    const auto details = GetCallErrorDetails(status);
    ASSERT_TRUE(details.has_value());
    EXPECT_EQ(details->reason, reason);
  }
  EXPECT_FALSE(ErrorReasonFromName("NO_SUCH_REASON").has_value());
}

TEST(CallErrorTest, CodesAreThoseOfTheProtoComment) {
  EXPECT_EQ(ErrorReasonName(ErrorReason::kQueueFull), "QUEUE_FULL");
  EXPECT_EQ(ErrorReasonCode(ErrorReason::kQueueFull), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReasonName(ErrorReason::kRankNotAllowed), "RANK_NOT_ALLOWED");
  EXPECT_EQ(ErrorReasonCode(ErrorReason::kRankNotAllowed), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrorReasonName(ErrorReason::kStepLost), "STEP_LOST");
  EXPECT_EQ(ErrorReasonCode(ErrorReason::kStepLost), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReasonName(ErrorReason::kCallCancelled), "CALL_CANCELLED");
  EXPECT_EQ(ErrorReasonCode(ErrorReason::kCallCancelled), absl::StatusCode::kCancelled);
}

TEST(CallErrorTest, InvalidFieldNamesFieldValueAndLimit) {
  const absl::Status status = InvalidFieldError("topk.topk", 17, "0 to 16");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "topk.topk is 17; expected 0 to 16");
  const auto details = GetCallErrorDetails(status);
  ASSERT_TRUE(details.has_value());
  EXPECT_EQ(details->reason, ErrorReason::kInvalidField);
  EXPECT_EQ(details->field, "topk.topk");
  EXPECT_EQ(details->value, "17");
  EXPECT_EQ(details->limit, "0 to 16");
  EXPECT_EQ(details->retry_after, absl::ZeroDuration());
}

TEST(CallErrorTest, UntrustedValuesAreEscapedAndCut) {
  const absl::Status status =
      InvalidFieldError("model", std::string("a\n\0\xff", 4) + std::string(1000, 'x'), "a name");
  EXPECT_THAT(std::string(status.message()), HasSubstr("a\\n\\x00\\xff"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("(1004 bytes)"));
  EXPECT_LT(status.message().size(), 300u);
  EXPECT_THAT(std::string(InvalidFieldError("model", "", "a name").message()),
              HasSubstr("model is empty"));
}

TEST(CallErrorTest, MembersMayHoldAnyByte) {
  CallErrorDetails details;
  details.field = std::string("a\nb\0c\xff\\n", 8);
  details.value = "\n";
  details.limit = "\\";
  const auto back = GetCallErrorDetails(CallError(ErrorReason::kModelNotFound, "m", details));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->field, details.field);
  EXPECT_EQ(back->value, details.value);
  EXPECT_EQ(back->limit, details.limit);
}

TEST(CallErrorTest, OnlyRetryableReasonsAdviseARetryUnlessTold) {
  EXPECT_EQ(GetCallErrorDetails(CallError(ErrorReason::kQueueFull, "m"))->retry_after,
            kDefaultRetryAfter);
  EXPECT_EQ(GetCallErrorDetails(CallError(ErrorReason::kNoEpoch, "m"))->retry_after,
            absl::Seconds(1));
  EXPECT_EQ(GetCallErrorDetails(CallError(ErrorReason::kMessageTooLarge, "m"))->retry_after,
            absl::ZeroDuration());
  const absl::Status status =
      RetryableError(ErrorReason::kQueueFull, "full", absl::Milliseconds(7));
  EXPECT_EQ(GetCallErrorDetails(status)->retry_after, absl::Milliseconds(7));
}

TEST(CallErrorTest, OtherStatusesHaveNoDetails) {
  EXPECT_FALSE(GetCallErrorDetails(absl::OkStatus()).has_value());
  EXPECT_FALSE(GetCallErrorDetails(absl::InvalidArgumentError("x")).has_value());
}

}  // namespace
}  // namespace expertmesh
