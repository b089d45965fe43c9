#include "server/rpc/answered_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "server/ops/call_error.h"
#include "tests/server/control/fake_clock.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

class AnsweredCallsTest : public testing::Test {
 protected:
  // What the log says of such a call.
  std::string Count(const absl::Status& status, absl::StatusCode code,
                    absl::string_view request_id = "r") {
    testing::internal::CaptureStderr();
    calls_.Count({.request_id = request_id, .status = status, .code = code});
    return testing::internal::GetCapturedStderr();
  }
  std::string Lost(absl::string_view request_id = "r") {
    return Count(CallError(ErrorReason::kStepLost, "rank 1 is gone"),
                 absl::StatusCode::kUnavailable, request_id);
  }

  FakeClock clock_;
  MetricsRegistry registry_;
  const ServerMetrics metrics_{&registry_};
  AnsweredCalls calls_{&metrics_, &clock_};
};

TEST_F(AnsweredCallsTest, OneLineAtOnceThenOneAnIntervalWithTheirNumber) {
  const std::string first = Lost("first");
  EXPECT_THAT(first, HasSubstr(" W calls failed, and not through their clients calls=1 "
                               "code=UNAVAILABLE last_request_id=first error=\"rank 1 is gone\""));
  EXPECT_EQ(std::count(first.begin(), first.end(), '\n'), 1);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(Lost(), "");
  clock_.Advance(AnsweredCalls::kInterval);
  const std::string next = Lost("last");
  EXPECT_THAT(next, HasSubstr("calls=1001 code=UNAVAILABLE last_request_id=last"));
  EXPECT_EQ(std::count(next.begin(), next.end(), '\n'), 1);
  EXPECT_EQ(Lost(), "");
  EXPECT_EQ(metrics_.num_failed(CallMethod::kForward), 1003u);
}

TEST_F(AnsweredCallsTest, TheRestIsToldWhenCallsAreAnsweredAgain) {
  EXPECT_NE(Lost(), "");
  EXPECT_EQ(Lost(), "");
  EXPECT_EQ(Count(absl::OkStatus(), absl::StatusCode::kOk), "");
  clock_.Advance(AnsweredCalls::kInterval);
  EXPECT_THAT(Count(absl::OkStatus(), absl::StatusCode::kOk), HasSubstr("calls=1 "));
  clock_.Advance(AnsweredCalls::kInterval);
  EXPECT_EQ(Count(absl::OkStatus(), absl::StatusCode::kOk), "");
}

TEST_F(AnsweredCallsTest, TheRestIsToldWhenNoCallComesAnyMore) {
  testing::internal::CaptureStderr();
  {
    AnsweredCalls calls(&metrics_, &clock_);
    const absl::Status lost = CallError(ErrorReason::kStepLost, "rank 1 is gone");
    for (int i = 0; i < 3; ++i) {
      calls.Count({.status = lost, .code = absl::StatusCode::kUnavailable});
    }
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("calls=1 "));
  EXPECT_THAT(log, HasSubstr("calls=2 "));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 2);
}

TEST_F(AnsweredCallsTest, DefectsAreErrorsThatOthersDoNotHide) {
  EXPECT_NE(Lost(), "");
  const absl::Status defect = absl::NotFoundError("a defect");
  EXPECT_THAT(Count(defect, absl::StatusCode::kInternal),
              HasSubstr(" E calls failed, and not through their clients calls=1 code=INTERNAL"));
  EXPECT_EQ(Count(defect, absl::StatusCode::kInternal), "");
}

TEST_F(AnsweredCallsTest, WhatClientsOrOperatorsDoIsNotToldOf) {
  EXPECT_EQ(Count(InvalidFieldError("layer", 3, "0"), absl::StatusCode::kInvalidArgument), "");
  EXPECT_EQ(Count(CallError(ErrorReason::kQueueFull, "full"), absl::StatusCode::kResourceExhausted),
            "");
  EXPECT_EQ(Count(CallError(ErrorReason::kDraining, "stopping"), absl::StatusCode::kUnavailable),
            "");
  EXPECT_EQ(Count(absl::CancelledError(""), absl::StatusCode::kCancelled), "");
}

}  // namespace
}  // namespace expertmesh
