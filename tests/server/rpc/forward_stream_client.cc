#include "tests/server/rpc/forward_stream_client.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"

namespace expertmesh {

std::string ReasonOf(const google::rpc::Status& status) {
  google::rpc::ErrorInfo info;
  return status.details_size() > 0 && status.details(0).UnpackTo(&info) ? info.reason() : "";
}

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  return details.ParseFromString(status.error_details()) ? ReasonOf(details) : "";
}

ForwardStreamClient::ForwardStreamClient(const StreamServer& server)
    : server_(server), stub_(server.NewStub()) {
  // Ends what hangs.
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  stream_ = stub_->ForwardStream(&context_);
}

bool ForwardStreamClient::Send(uint64_t stream_seq, int64_t num_tokens) {
  return stream_->Write(server_.Message(stream_seq, num_tokens));
}

void ForwardStreamClient::Cancel(uint64_t stream_seq) {
  v1::ForwardStreamRequest message;
  message.set_stream_seq(stream_seq);
  message.set_cancel(true);
  EXPECT_TRUE(stream_->Write(message));
}

v1::ForwardStreamResponse ForwardStreamClient::Read() {
  v1::ForwardStreamResponse response;
  EXPECT_TRUE(stream_->Read(&response));
  return response;
}

void ForwardStreamClient::ExpectAnswer(uint64_t stream_seq) { EXPECT_EQ(ReadAnswer(), stream_seq); }

uint64_t ForwardStreamClient::ReadAnswer(int64_t num_tokens) {
  const v1::ForwardStreamResponse response = Read();
  CheckAnswer(response, num_tokens);
  return response.stream_seq();
}

void ForwardStreamClient::CheckAnswer(const v1::ForwardStreamResponse& response,
                                      int64_t num_tokens) {
  const uint64_t stream_seq = response.stream_seq();
  ASSERT_TRUE(response.has_response()) << response.error().ShortDebugString();
  EXPECT_EQ(response.response().request_id(), absl::StrCat(stream_seq));
  EXPECT_TRUE(response.response().output().data() ==
              server_.Message(stream_seq, num_tokens).request().hidden_states().data());
}

std::set<uint64_t> ForwardStreamClient::ReadAnswers(int count, int64_t num_tokens) {
  std::set<uint64_t> answered;
  for (int i = 0; i < count; ++i) answered.insert(ReadAnswer(num_tokens));
  return answered;
}

void ForwardStreamClient::ExpectError(uint64_t stream_seq, grpc::StatusCode code,
                                      const std::string& reason) {
  const v1::ForwardStreamResponse response = Read();
  EXPECT_EQ(response.stream_seq(), stream_seq);
  EXPECT_EQ(response.error().code(), static_cast<int>(code)) << response.ShortDebugString();
  EXPECT_EQ(ReasonOf(response.error()), reason);
}

void ForwardStreamClient::HalfClose() {
  if (!std::exchange(half_closed_, true)) stream_->WritesDone();
}

grpc::Status ForwardStreamClient::Finish() {
  HalfClose();
  v1::ForwardStreamResponse response;
  EXPECT_FALSE(stream_->Read(&response)) << response.ShortDebugString();
  return stream_->Finish();
}

}  // namespace expertmesh
