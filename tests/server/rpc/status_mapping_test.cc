#include "server/rpc/status_mapping.h"

#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "server/ops/call_error.h"
#include "server/rpc/wire_reader.h"

namespace expertmesh {
namespace {

using ::testing::EndsWith;

template <typename Detail>
std::optional<Detail> FindDetail(const google::rpc::Status& status) {
  Detail detail;
  for (const auto& any : status.details()) {
    if (any.UnpackTo(&detail)) return detail;
  }
  return std::nullopt;
}

google::rpc::Status DetailsOf(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

TEST(StatusMappingTest, OkIsOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status()).ok());
  EXPECT_TRUE(FromRpcStatus(ToRpcStatus(absl::OkStatus())).ok());
}

TEST(StatusMappingTest, AnInvalidFieldIsABadRequest) {
  const grpc::Status status = ToGrpcStatus(InvalidFieldError("hidden_states.shape[1]", 33, "2048"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "hidden_states.shape[1] is 33; expected 2048");
  const google::rpc::Status details = DetailsOf(status);
  EXPECT_EQ(details.code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
  EXPECT_EQ(details.message(), status.error_message());
  const auto info = FindDetail<google::rpc::ErrorInfo>(details);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason(), "INVALID_FIELD");
  EXPECT_EQ(info->domain(), "expertmesh");
  EXPECT_EQ(info->metadata().at("field"), "hidden_states.shape[1]");
  EXPECT_EQ(info->metadata().at("value"), "33");
  EXPECT_EQ(info->metadata().at("limit"), "2048");
  const auto bad_request = FindDetail<google::rpc::BadRequest>(details);
  ASSERT_TRUE(bad_request.has_value());
  ASSERT_EQ(bad_request->field_violations_size(), 1);
  EXPECT_EQ(bad_request->field_violations(0).field(), "hidden_states.shape[1]");
  EXPECT_EQ(bad_request->field_violations(0).description(), status.error_message());
  EXPECT_FALSE(FindDetail<google::rpc::RetryInfo>(details).has_value());
}

TEST(StatusMappingTest, RetryAdviceIsRetryInfo) {
  const grpc::Status status =
      ToGrpcStatus(RetryableError(ErrorReason::kQueueFull, "full", absl::Milliseconds(2250)));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const google::rpc::Status details = DetailsOf(status);
  const auto retry = FindDetail<google::rpc::RetryInfo>(details);
  ASSERT_TRUE(retry.has_value());
  EXPECT_EQ(retry->retry_delay().seconds(), 2);
  EXPECT_EQ(retry->retry_delay().nanos(), 250'000'000);
  EXPECT_FALSE(FindDetail<google::rpc::BadRequest>(details).has_value());
}

TEST(StatusMappingTest, EveryReasonCrossesAndComesBack) {
  for (int i = 0; i < kNumErrorReasons; ++i) {
    const auto reason = static_cast<ErrorReason>(i);
    SCOPED_TRACE(std::string(ErrorReasonName(reason)));
    CallErrorDetails sent;
    sent.field = "topk.ids";
    sent.value = "9";
    sent.limit = "-1 to 7";
    sent.retry_after = absl::Microseconds(1234567);
    const absl::Status status = CallError(reason, "what happened", sent);
    const grpc::Status grpc_status = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(grpc_status.error_code()), static_cast<int>(status.code()));
    EXPECT_EQ(FindDetail<google::rpc::ErrorInfo>(DetailsOf(grpc_status))->reason(),
              std::string(ErrorReasonName(reason)));
    for (const absl::Status& back :
         {FromGrpcStatus(grpc_status), FromRpcStatus(ToRpcStatus(status))}) {
      EXPECT_EQ(back.code(), status.code());
      EXPECT_EQ(back.message(), status.message());
      const auto details = GetCallErrorDetails(back);
      ASSERT_TRUE(details.has_value());
      EXPECT_EQ(details->reason, reason);
      EXPECT_EQ(details->field, sent.field);
      EXPECT_EQ(details->value, sent.value);
      EXPECT_EQ(details->limit, sent.limit);
      EXPECT_EQ(details->retry_after, sent.retry_after);
    }
  }
}

TEST(StatusMappingTest, WhatNoLayerMeantForACallerIsInternal) {
  const auto reason_of = [](const absl::Status& status) {
    return FindDetail<google::rpc::ErrorInfo>(ToRpcStatus(status))->reason();
  };
  for (const absl::Status& status :
       {absl::InvalidArgumentError("m"), absl::NotFoundError("m"), absl::UnknownError("m"),
        absl::OutOfRangeError("m"), absl::DataLossError("m"), absl::InternalError("m")}) {
    const grpc::Status mapped = ToGrpcStatus(status);
    EXPECT_EQ(mapped.error_code(), grpc::StatusCode::INTERNAL);
    EXPECT_EQ(mapped.error_message(), "m");
    EXPECT_EQ(reason_of(status), "INTERNAL_ERROR");
  }
  EXPECT_EQ(ToGrpcStatus(absl::CancelledError("m")).error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(reason_of(absl::CancelledError("m")), "CALL_CANCELLED");
  EXPECT_EQ(ToGrpcStatus(absl::DeadlineExceededError("m")).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(reason_of(absl::DeadlineExceededError("m")), "DEADLINE_PASSED");
  EXPECT_EQ(ToGrpcStatus(absl::UnavailableError("m")).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(reason_of(absl::UnavailableError("m")), "STEP_LOST");
  EXPECT_TRUE(
      FindDetail<google::rpc::RetryInfo>(ToRpcStatus(absl::UnavailableError("m"))).has_value());
  EXPECT_EQ(reason_of(absl::ResourceExhaustedError("m")), "BUFFERS_EXHAUSTED");
  EXPECT_EQ(reason_of(absl::UnimplementedError("m")), "NOT_IMPLEMENTED");
}

TEST(StatusMappingTest, AnyTextMakesAReadableStatus) {
  CallErrorDetails details;
  details.field = "adapters[\xff]";
  details.value = std::string(5000, 'v');
  const grpc::Status status =
      ToGrpcStatus(CallError(ErrorReason::kInvalidField, "bad \xff text", details));
  EXPECT_TRUE(IsValidUtf8(status.error_message()));
  const google::rpc::Status parsed = DetailsOf(status);
  const auto info = FindDetail<google::rpc::ErrorInfo>(parsed);
  ASSERT_TRUE(info.has_value());
  EXPECT_LE(info->metadata().at("value").size(), 256u);

  // Cut between characters.
  std::string text = "x";
  while (text.size() < 4000) text += "\xe2\x82\xac";
  const grpc::Status longer = ToGrpcStatus(CallError(ErrorReason::kStepFailed, text));
  EXPECT_LE(longer.error_message().size(), 1024u);
  EXPECT_THAT(longer.error_message(), EndsWith("..."));
  EXPECT_TRUE(IsValidUtf8(longer.error_message()));
}

TEST(StatusMappingTest, ForeignStatusesKeepCodeAndMessage) {
  const absl::Status plain =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "no"));
  EXPECT_EQ(plain.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(plain.message(), "no");
  EXPECT_FALSE(GetCallErrorDetails(plain).has_value());
  EXPECT_EQ(FromGrpcStatus(grpc::Status(grpc::StatusCode::ABORTED, "m", "\xff no proto")).code(),
            absl::StatusCode::kAborted);
  for (const int code : {-1, 17, 99}) {
    google::rpc::Status unknown;
    unknown.set_code(code);
    EXPECT_EQ(FromRpcStatus(unknown).code(), absl::StatusCode::kUnknown);
  }
  // A reason that contradicts the code, and another domain's.
  google::rpc::Status liar = ToRpcStatus(CallError(ErrorReason::kQueueFull, "m"));
  liar.set_code(static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(FromRpcStatus(liar).code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(GetCallErrorDetails(FromRpcStatus(liar)).has_value());
  google::rpc::ErrorInfo info;
  info.set_domain("elsewhere");
  info.set_reason("QUEUE_FULL");
  google::rpc::Status foreign;
  foreign.set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  foreign.add_details()->PackFrom(info);
  EXPECT_FALSE(GetCallErrorDetails(FromRpcStatus(foreign)).has_value());
}

}  // namespace
}  // namespace expertmesh
