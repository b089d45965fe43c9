// What goes wrong with one message is told in the stream, and ends that message alone; what goes
// wrong with the stream ends it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "tests/server/rpc/forward_stream_client.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {
namespace {

using grpc::StatusCode;

TEST(ForwardStreamErrorsTest, ErrorsAreThoseOfForwardAndEndTheirMessageAlone) {
  StreamServer server;
  server.controller().AnswerAtOnce();
  ForwardStreamClient client(server);
  uint64_t seq = 0;
  for (const BadRequest& bad : BadRequests(server.model())) {
    SCOPED_TRACE(bad.name);
    v1::ForwardStreamRequest message = server.Message(seq, 4);
    message.mutable_request()->Clear();
    *message.mutable_request() = GoodRequest(server.model(), 4, 2);
    bad.spoil(message.mutable_request());
    ASSERT_TRUE(client.stream().Write(message));
    const v1::ForwardStreamResponse response = client.Read();
    EXPECT_EQ(response.stream_seq(), seq++);

    grpc::ClientContext context;
    v1::ForwardResponse unary_response;
    const grpc::Status unary = client.stub().Forward(&context, message.request(), &unary_response);
    google::rpc::Status expected;
    ASSERT_TRUE(expected.ParseFromString(unary.error_details()));
    // Maps have no order in bytes.
    EXPECT_EQ(response.error().DebugString(), expected.DebugString());

    ASSERT_TRUE(client.Send(seq));
    client.ExpectAnswer(seq++);
  }
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamErrorsTest, ErrorsOfTheEnvelopeAreInBandToo) {
  StreamServer server;
  server.controller().AnswerAtOnce();
  ForwardStreamClient client(server);
  v1::ForwardStreamRequest message = server.Message(5);
  message.set_timeout_micros(-1);
  ASSERT_TRUE(client.stream().Write(message));
  client.ExpectError(5, StatusCode::INVALID_ARGUMENT, "INVALID_FIELD");
  message.Clear();
  message.set_stream_seq(6);
  ASSERT_TRUE(client.stream().Write(message));
  client.ExpectError(6, StatusCode::INVALID_ARGUMENT, "INVALID_FIELD");
  message = server.Message(7);
  message.set_traceparent(std::string(5000, 'x'));
  ASSERT_TRUE(client.stream().Write(message));
  client.ExpectError(7, StatusCode::INVALID_ARGUMENT, "INVALID_FIELD");
  message = server.Message(8);
  message.mutable_request()->mutable_options()->set_validate_only(true);
  ASSERT_TRUE(client.stream().Write(message));
  const v1::ForwardStreamResponse response = client.Read();
  EXPECT_EQ(response.stream_seq(), 8u);
  EXPECT_TRUE(response.has_response());
  EXPECT_FALSE(response.response().has_output());
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamErrorsTest, ANumberInFlightEndsTheStream) {
  StreamServer server;
  ForwardStreamClient client(server);
  for (const uint64_t seq : {1, 2, 1}) ASSERT_TRUE(client.Send(seq));
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(status), "INVALID_FIELD");
  EXPECT_THAT(status.error_message(), testing::HasSubstr("stream_seq is 1"));
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.controller().num_cancelled(), 2);
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

// Bytes that no generated code would send.
class RawClient {
 public:
  explicit RawClient(const StreamServer& server)
      : stub_(grpc::CreateChannel(server.target(), grpc::InsecureChannelCredentials())) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    call_ = stub_.PrepareCall(&context_, "/expertmesh.v1.ExpertService/ForwardStream", &queue_);
    call_->StartCall(nullptr);
    Await();
  }
  ~RawClient() { queue_.Shutdown(); }
  bool Write(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    call_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    return Await();
  }
  v1::ForwardStreamResponse Read() {
    grpc::ByteBuffer buffer;
    call_->Read(&buffer, nullptr);
    v1::ForwardStreamResponse response;
    grpc::Slice slice;
    if (Await() && buffer.DumpToSingleSlice(&slice).ok()) {
      EXPECT_TRUE(response.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
    }
    return response;
  }
  grpc::Status Finish() {
    grpc::Status status;
    call_->Finish(&status, nullptr);
    Await();
    return status;
  }

 private:
  bool Await() {
    void* tag;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

TEST(ForwardStreamErrorsTest, MalformedInsideIsInBandAndOutsideEndsTheStream) {
  StreamServer server;
  server.controller().AnswerAtOnce();
  RawClient client(server);
  // stream_seq 9, then a request of two bytes that is cut short within.
  ASSERT_TRUE(client.Write(std::string("\x08\x09\x7a\x02\x0a\x05", 6)));
  const v1::ForwardStreamResponse response = client.Read();
  EXPECT_EQ(response.stream_seq(), 9u);
  EXPECT_EQ(ReasonOf(response.error()), "MALFORMED_MESSAGE");
  ASSERT_TRUE(client.Write(server.Message(9).SerializeAsString()));
  EXPECT_TRUE(client.Read().has_response());
  ASSERT_TRUE(client.Write(std::string("\x08\x09\x7a\x05", 4)));
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(status), "MALFORMED_MESSAGE");
}

// One token's logits, which only a router reads.
v1::ForwardStreamRequest ValidateOnly(const StreamServer& server, uint64_t stream_seq) {
  v1::ForwardStreamRequest message = server.Message(stream_seq);
  message.mutable_request()->mutable_options()->set_validate_only(true);
  v1::Tensor* logits = message.mutable_request()->mutable_router_logits();
  logits->add_shape(1);
  logits->add_shape(server.model().num_experts);
  for (int i = 0; i < server.model().num_experts; ++i) logits->add_values(1);
  return message;
}

TEST(ForwardStreamErrorsTest, ValidateOnlyFindsWhatOnlyTheRouterDoes) {
  StreamServer server;
  ForwardStreamClient client(server);
  for (const uint64_t seq : {1, 2, 3}) {
    v1::ForwardStreamRequest message = ValidateOnly(server, seq);
    if (seq == 2) message.mutable_request()->mutable_router_logits()->set_values(3, std::nanf(""));
    ASSERT_TRUE(client.stream().Write(message));
    if (seq == 2) {
      client.ExpectError(seq, StatusCode::INVALID_ARGUMENT, "INVALID_FIELD");
    } else {
      const v1::ForwardStreamResponse response = client.Read();
      EXPECT_EQ(response.stream_seq(), seq);
      EXPECT_TRUE(response.has_response()) << response.DebugString();
    }
  }
  EXPECT_TRUE(client.Finish().ok());
}

// Whose routing takes until the test lets it go.
class HeldRouter : public Router {
 public:
  HeldRouter(std::promise<void>* begun, std::shared_future<void> go, int32_t layer)
      : begun_(begun), go_(std::move(go)) {
    layer_.index = layer;
  }
  const LayerSpec& layer() const override { return layer_; }
  absl::Status RouteLogits(const std::byte*, DType, int64_t, absl::Span<int32_t>,
                           absl::Span<float>) const override {
    begun_->set_value();
    go_.wait();
    return absl::OkStatus();
  }
  absl::Status RouteHidden(absl::Span<const RowSpan>, DType, absl::Span<int32_t>,
                           absl::Span<float>) const override {
    return absl::UnimplementedError("");
  }
  absl::Status ComputeLogits(absl::Span<const RowSpan>, DType, absl::Span<float>) const override {
    return absl::UnimplementedError("");
  }

 private:
  std::promise<void>* const begun_;  // told once
  const std::shared_future<void> go_;
  LayerSpec layer_;
};

TEST(ForwardStreamErrorsTest, ValidateOnlyThatWaitsHasItsTimeoutAndCanBeCancelled) {
  std::promise<void> begun, go;
  StreamServerOptions options;
  options.router = std::make_unique<HeldRouter>(&begun, go.get_future().share(), /*layer=*/1);
  StreamServer server(std::move(options));
  ForwardStreamClient client(server);
  for (const uint64_t seq : {1, 2, 3}) {
    v1::ForwardStreamRequest message = ValidateOnly(server, seq);
    if (seq == 2) message.set_timeout_micros(20'000);
    ASSERT_TRUE(client.stream().Write(message));
    if (seq == 1) begun.get_future().wait();
  }
  client.ExpectError(2, StatusCode::DEADLINE_EXCEEDED, "DEADLINE_PASSED");
  client.Cancel(3);
  client.ExpectError(3, StatusCode::CANCELLED, "CALL_CANCELLED");
  go.set_value();
  const v1::ForwardStreamResponse response = client.Read();
  EXPECT_EQ(response.stream_seq(), 1u);
  EXPECT_TRUE(response.has_response()) << response.DebugString();
  EXPECT_TRUE(client.Finish().ok());
}

}  // namespace
}  // namespace expertmesh
