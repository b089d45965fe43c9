#include "server/control/admission.h"

#include <limits>

#include "gtest/gtest.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1'800'000'000);

TEST(AdmissionTest, CountsUpToTheLimitsAndBack) {
  Admission admission({.max_bytes_in_flight = 100, .max_tokens_in_flight = 10});
  EXPECT_TRUE(admission.Admit(60, 4, kStart).ok());
  EXPECT_TRUE(admission.Admit(40, 6, kStart).ok());
  EXPECT_EQ(admission.bytes_in_flight(), 100);
  EXPECT_EQ(admission.tokens_in_flight(), 10);
  EXPECT_FALSE(admission.Admit(0, 1, kStart).ok());
  EXPECT_FALSE(admission.Admit(1, 0, kStart).ok());
  admission.Release(40, 6, kStart);
  EXPECT_TRUE(admission.Admit(40, 5, kStart).ok());
  EXPECT_EQ(admission.bytes_in_flight(), 100);
}

TEST(AdmissionTest, HugeSizesDoNotWrapAround) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  Admission admission({.max_bytes_in_flight = kMax, .max_tokens_in_flight = 10});
  EXPECT_TRUE(admission.Admit(kMax, 1, kStart).ok());
  EXPECT_FALSE(admission.Admit(kMax, 1, kStart).ok());
  EXPECT_FALSE(admission.Admit(1, 1, kStart).ok());
}

TEST(AdmissionTest, AdviceFollowsTheRecentPace) {
  Admission admission({.max_bytes_in_flight = 1'000'000, .max_tokens_in_flight = 1000});
  absl::Time now = kStart;
  // 500 tokens every 10 ms, for long enough: 50,000 a second.
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(admission.Admit(500, 500, now).ok());
    now += absl::Milliseconds(10);
    admission.Release(500, 500, now);
  }
  ASSERT_TRUE(admission.Admit(1000, 1000, now).ok());
  const auto details = GetCallErrorDetails(admission.Admit(500, 500, now));
  ASSERT_TRUE(details.has_value());
  EXPECT_EQ(details->reason, ErrorReason::kQueueFull);
  EXPECT_NEAR(absl::ToDoubleMilliseconds(details->retry_after), 10.0, 0.5);
  // The pace is forgotten: the advice grows, to a limit.
  now += absl::Seconds(60);
  EXPECT_EQ(GetCallErrorDetails(admission.Admit(500, 500, now))->retry_after, absl::Seconds(5));
}

TEST(AdmissionTest, WithoutAnyPaceTheAdviceIsTheUsualOne) {
  Admission admission({.max_bytes_in_flight = 100, .max_tokens_in_flight = 10});
  ASSERT_TRUE(admission.Admit(1, 10, kStart).ok());
  EXPECT_EQ(GetCallErrorDetails(admission.Admit(1, 1, kStart))->retry_after, kDefaultRetryAfter);
}

TEST(AdmissionTest, WhatCanNeverFitIsToldTheLimitAndNoTime) {
  Admission admission({.max_bytes_in_flight = 100, .max_tokens_in_flight = 10});
  const absl::Status status = admission.Admit(101, 1, kStart);
  const auto details = GetCallErrorDetails(status);
  ASSERT_TRUE(details.has_value());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(details->reason, ErrorReason::kMessageTooLarge);
  EXPECT_EQ(details->value, "101 bytes");
  EXPECT_EQ(details->limit, "100 bytes");
  EXPECT_EQ(details->retry_after, absl::ZeroDuration());
}

}  // namespace
}  // namespace expertmesh
