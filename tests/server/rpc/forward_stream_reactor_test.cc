#include "server/rpc/forward_stream_reactor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/rpc/error_details.pb.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {
namespace {

using grpc::StatusCode;
using Stream = grpc::ClientReaderWriter<v1::ForwardStreamRequest, v1::ForwardStreamResponse>;

std::string ReasonOf(const google::rpc::Status& status) {
  google::rpc::ErrorInfo info;
  return status.details_size() > 0 && status.details(0).UnpackTo(&info) ? info.reason() : "";
}

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  return details.ParseFromString(status.error_details()) ? ReasonOf(details) : "";
}

// A stream that the test drives by blocking calls.
class Client {
 public:
  explicit Client(const StreamServer& server) : server_(server), stub_(server.NewStub()) {
    // Ends what hangs.
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream_ = stub_->ForwardStream(&context_);
  }

  bool Send(uint64_t stream_seq, int64_t num_tokens = 1) {
    return stream_->Write(server_.Message(stream_seq, num_tokens));
  }
  void Cancel(uint64_t stream_seq) {
    v1::ForwardStreamRequest message;
    message.set_stream_seq(stream_seq);
    message.set_cancel(true);
    EXPECT_TRUE(stream_->Write(message));
  }
  v1::ForwardStreamResponse Read() {
    v1::ForwardStreamResponse response;
    EXPECT_TRUE(stream_->Read(&response));
    return response;
  }
  // The next answer is that message's.
  void ExpectAnswer(uint64_t stream_seq) { EXPECT_EQ(ReadAnswer(), stream_seq); }
  // The next answer must be some message's own hidden states; tells whose.
  uint64_t ReadAnswer(int64_t num_tokens = 1) {
    const v1::ForwardStreamResponse response = Read();
    CheckAnswer(response, num_tokens);
    return response.stream_seq();
  }
  void CheckAnswer(const v1::ForwardStreamResponse& response, int64_t num_tokens) {
    const uint64_t stream_seq = response.stream_seq();
    ASSERT_TRUE(response.has_response()) << response.error().ShortDebugString();
    EXPECT_EQ(response.response().request_id(), absl::StrCat(stream_seq));
    EXPECT_TRUE(response.response().output().data() ==
                server_.Message(stream_seq, num_tokens).request().hidden_states().data());
  }
  // Of that many messages, in any order: two threads of the server may work on one stream.
  std::set<uint64_t> ReadAnswers(int count, int64_t num_tokens = 1) {
    std::set<uint64_t> answered;
    for (int i = 0; i < count; ++i) answered.insert(ReadAnswer(num_tokens));
    return answered;
  }
  void ExpectError(uint64_t stream_seq, StatusCode code, const std::string& reason) {
    const v1::ForwardStreamResponse response = Read();
    EXPECT_EQ(response.stream_seq(), stream_seq);
    EXPECT_EQ(response.error().code(), static_cast<int>(code)) << response.ShortDebugString();
    EXPECT_EQ(ReasonOf(response.error()), reason);
  }
  void HalfClose() {
    if (!std::exchange(half_closed_, true)) stream_->WritesDone();
  }
  grpc::Status Finish() {
    HalfClose();
    v1::ForwardStreamResponse response;
    EXPECT_FALSE(stream_->Read(&response)) << response.ShortDebugString();
    return stream_->Finish();
  }
  Stream& stream() { return *stream_; }
  v1::ExpertService::Stub& stub() { return *stub_; }
  void Reset() { context_.TryCancel(); }

 private:
  const StreamServer& server_;
  std::unique_ptr<v1::ExpertService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<Stream> stream_;
  bool half_closed_ = false;
};

TEST(ForwardStreamReactorTest, AnswersAsCallsComplete) {
  StreamServer server;
  Client client(server);
  for (const uint64_t seq : {10, 11, 12, 0}) ASSERT_TRUE(client.Send(seq));
  server.controller().AwaitHeld(4);
  for (const uint64_t seq : {12, 0, 10, 11}) {
    ASSERT_TRUE(server.controller().Answer(absl::StrCat(seq)));
    client.ExpectAnswer(seq);
  }
  EXPECT_TRUE(client.Finish().ok());
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

TEST(ForwardStreamReactorTest, OnlyAMessageAloneMayRunOnItsThread) {
  StreamServer server;
  Client client(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  EXPECT_EQ(server.controller().num_inline(), 1);
  ASSERT_TRUE(client.Send(2));
  server.controller().AwaitHeld(2);
  EXPECT_EQ(server.controller().num_inline(), 1);
  server.controller().AnswerAtOnce();
  EXPECT_EQ(client.ReadAnswers(2), (std::set<uint64_t>{1, 2}));
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, ErrorsAreThoseOfForwardAndEndTheirMessageAlone) {
  StreamServer server;
  server.controller().AnswerAtOnce();
  Client client(server);
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

TEST(ForwardStreamReactorTest, ErrorsOfTheEnvelopeAreInBandToo) {
  StreamServer server;
  server.controller().AnswerAtOnce();
  Client client(server);
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

TEST(ForwardStreamReactorTest, ValidateOnlyFindsWhatOnlyTheRouterDoes) {
  StreamServer server;
  Client client(server);
  for (const uint64_t seq : {1, 2, 3}) {
    v1::ForwardStreamRequest message = server.Message(seq);
    v1::ForwardRequest& request = *message.mutable_request();
    request.mutable_options()->set_validate_only(true);
    v1::Tensor* logits = request.mutable_router_logits();
    logits->add_shape(1);
    logits->add_shape(server.model().num_experts);
    for (int i = 0; i < server.model().num_experts; ++i) {
      logits->add_values(seq == 2 && i == 3 ? std::nanf("") : 1.0f);
    }
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

TEST(ForwardStreamReactorTest, ValidateOnlyThatWaitsHasItsTimeoutAndCanBeCancelled) {
  std::promise<void> begun, go;
  StreamServerOptions options;
  options.router = std::make_unique<HeldRouter>(&begun, go.get_future().share(), /*layer=*/1);
  StreamServer server(std::move(options));
  Client client(server);
  for (const uint64_t seq : {1, 2, 3}) {
    v1::ForwardStreamRequest message = server.Message(seq);
    message.mutable_request()->mutable_options()->set_validate_only(true);
    v1::Tensor* logits = message.mutable_request()->mutable_router_logits();
    logits->add_shape(1);
    logits->add_shape(server.model().num_experts);
    for (int i = 0; i < server.model().num_experts; ++i) logits->add_values(1);
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

TEST(ForwardStreamReactorTest, ANumberInFlightEndsTheStream) {
  StreamServer server;
  Client client(server);
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

TEST(ForwardStreamReactorTest, MalformedInsideIsInBandAndOutsideEndsTheStream) {
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

TEST(ForwardStreamReactorTest, EachMessageHasItsOwnDeadline) {
  StreamServer server;
  Client client(server);
  const absl::Time before = absl::Now();
  for (const int64_t seconds : {0, 5, 500}) {
    v1::ForwardStreamRequest message = server.Message(static_cast<uint64_t>(seconds));
    message.set_timeout_micros(seconds * 1'000'000);
    ASSERT_TRUE(client.stream().Write(message));
  }
  server.controller().AwaitHeld(3);
  const auto left = [&](const char* id) { return server.controller().deadline(id) - before; };
  EXPECT_GE(left("5"), absl::Seconds(5));
  EXPECT_LT(left("5"), absl::Seconds(20));
  // The server's own limit, a minute, and the stream's, a little less.
  EXPECT_GT(left("0"), absl::Seconds(40));
  EXPECT_LE(left("0"), absl::Seconds(61));
  EXPECT_LE(left("500"), absl::Seconds(61));
  server.controller().Fail("5", absl::DeadlineExceededError("late"));
  client.ExpectError(5, StatusCode::DEADLINE_EXCEEDED, "DEADLINE_PASSED");
  server.controller().AnswerAtOnce();
  EXPECT_EQ(client.ReadAnswers(2), (std::set<uint64_t>{0, 500}));
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, CancelEndsOneMessage) {
  StreamServer server;
  Client client(server);
  client.Cancel(99);  // nothing of that number
  for (const uint64_t seq : {1, 2}) ASSERT_TRUE(client.Send(seq));
  server.controller().AwaitHeld(2);
  client.Cancel(1);
  client.ExpectError(1, StatusCode::CANCELLED, "CALL_CANCELLED");
  server.controller().AnswerAtOnce();
  client.ExpectAnswer(2);
  client.Cancel(2);
  ASSERT_TRUE(client.Send(1));
  client.ExpectAnswer(1);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, WaitsWhileLoadingAndCanBeCancelledThere) {
  StreamServer server({.serving = false});
  Client client(server);
  for (const uint64_t seq : {1, 2, 3}) ASSERT_TRUE(client.Send(seq));
  client.Cancel(2);
  client.ExpectError(2, StatusCode::CANCELLED, "CALL_CANCELLED");
  server.controller().AnswerAtOnce();
  server.Serve();
  EXPECT_EQ(client.ReadAnswers(2), (std::set<uint64_t>{1, 3}));
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, DrainingFinishesWhatIsInFlightAndRefusesTheRest) {
  StreamServer server;
  Client client(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  server.state().StartDraining();
  ASSERT_TRUE(client.Send(2));
  client.ExpectError(2, StatusCode::UNAVAILABLE, "DRAINING");
  ASSERT_TRUE(server.controller().Answer("1"));
  client.ExpectAnswer(1);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, TheEndOfDrainingEndsOpenStreamsOnceTheyAreAnswered) {
  StreamServer server;
  Client client(server), idle(server), late(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  server.state().StartDraining();
  server.streams().EndAll();
  // What was on its way is answered too, or the stream was ended before it came.
  EXPECT_EQ(idle.Finish().error_code(), StatusCode::UNAVAILABLE);
  ASSERT_TRUE(server.controller().Answer("1"));
  client.ExpectAnswer(1);
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(status), "DRAINING");
  EXPECT_EQ(ReasonOf(late.Finish()), "DRAINING");
}

TEST(ForwardStreamReactorTest, ShutdownEndsStreamsThatStayOpen) {
  StreamServer server;
  Client client(server);
  ASSERT_TRUE(client.Send(1));
  server.controller().AwaitHeld(1);
  server.server().Shutdown(absl::Now() + absl::Milliseconds(50));
  EXPECT_EQ(server.controller().num_cancelled(), 1);
  EXPECT_EQ(client.Finish().error_code(), StatusCode::UNAVAILABLE);
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

TEST(ForwardStreamReactorTest, HalfCloseIsFollowedByAllAnswers) {
  StreamServer server;
  Client client(server);
  for (uint64_t seq = 0; seq < 50; ++seq) ASSERT_TRUE(client.Send(seq));
  client.HalfClose();
  server.controller().AwaitHeld(50);
  for (uint64_t seq = 50; seq-- > 0;) ASSERT_TRUE(server.controller().Answer(absl::StrCat(seq)));
  for (uint64_t seq = 50; seq-- > 0;) client.ExpectAnswer(seq);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, AnEmptyStreamIsFine) {
  StreamServer server;
  Client client(server);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, AResetCancelsEverything) {
  StreamServer server;
  {
    Client client(server);
    for (uint64_t seq = 0; seq < 20; ++seq) ASSERT_TRUE(client.Send(seq));
    server.controller().AwaitHeld(20);
    client.Reset();
    EXPECT_EQ(client.Finish().error_code(), StatusCode::CANCELLED);
  }
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.controller().num_cancelled(), 20);
  EXPECT_EQ(server.CallsTotal(R"({code="CANCELLED",method="ForwardStream"})"), 20);
  EXPECT_EQ(server.CallsTotal(R"({code="INVALID_ARGUMENT",method="ForwardStream"})"), 0);
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

TEST(ForwardStreamReactorTest, ANumberMayBeUsedAgainAsSoonAsItIsAnswered) {
  StreamServer server;
  server.controller().AnswerAtOnce();
  Client client(server);
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(client.Send(7));
    client.ExpectAnswer(7);
    ASSERT_FALSE(testing::Test::HasFailure()) << i;
  }
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, ReadsAreWithheldWhileTheBudgetIsSpent) {
  constexpr int64_t kTokens = 512;  // 64 KiB of hidden states, and as much for the answer
  StreamServer server({.limits = {.max_stream_bytes = int64_t{1} << 20}});
  Client client(server);
  constexpr int kMessages = 200;
  std::thread writer([&] {
    for (int seq = 0; seq < kMessages; ++seq) {
      EXPECT_TRUE(client.Send(static_cast<uint64_t>(seq), kTokens));
    }
  });
  server.controller().AwaitHeld(7);
  std::set<uint64_t> answered;
  for (int i = 0; i < kMessages; ++i) {
    server.controller().AwaitHeld(1);
    ASSERT_TRUE(server.controller().AnswerOldest());
    answered.insert(client.ReadAnswer(kTokens));
  }
  EXPECT_EQ(answered.size(), static_cast<size_t>(kMessages));
  writer.join();
  // Seven of 140 KiB make 1 MiB; one more may be read, and one while an answer's size is unknown.
  EXPECT_LE(server.controller().max_held(), 9u);
  EXPECT_TRUE(client.Finish().ok());
}

TEST(ForwardStreamReactorTest, ClientsThatNeverReadHoldLittleAndStopNobody) {
  constexpr int64_t kTokens = 512;
  // Together the idle ones use up the process's bound as well.
  StreamServer server(
      {.limits = {.max_stream_bytes = int64_t{2} << 20, .max_all_bytes = int64_t{4} << 20}});
  server.controller().AnswerAtOnce();
  constexpr int kIdle = 4;
  constexpr int kMessages = 300;  // 20 MiB each
  std::vector<std::unique_ptr<Client>> idle;
  std::vector<std::thread> writers;
  std::atomic<int> num_written{0};
  for (int i = 0; i < kIdle; ++i) {
    idle.push_back(std::make_unique<Client>(server));
    writers.emplace_back([&, client = idle.back().get()] {
      for (int seq = 0; seq < kMessages; ++seq) {
        EXPECT_TRUE(client->Send(static_cast<uint64_t>(seq), kTokens));
        ++num_written;
      }
    });
  }
  Client busy(server);
  int64_t most_allocated = 0;
  for (uint64_t seq = 0; seq < 500; ++seq) {
    ASSERT_TRUE(busy.Send(seq));
    busy.ExpectAnswer(seq);
    grpc::ClientContext context;
    v1::ForwardResponse response;
    ASSERT_TRUE(busy.stub().Forward(&context, server.Message(seq).request(), &response).ok());
    most_allocated = std::max(most_allocated, server.pool().allocated_bytes());
  }
  EXPECT_LT(num_written, kIdle * kMessages) << "the test did not fill the budget";
  EXPECT_LE(most_allocated, (int64_t{4} << 20) + (kIdle + 1) * (int64_t{256} << 10));
  EXPECT_TRUE(busy.Finish().ok());
  // Once they read, everything is there.
  for (const auto& client : idle) {
    EXPECT_EQ(client->ReadAnswers(kMessages, kTokens).size(), static_cast<size_t>(kMessages));
  }
  for (std::thread& writer : writers) writer.join();
  for (const auto& client : idle) EXPECT_TRUE(client->Finish().ok());
  server.AwaitStreamsEnd();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

// Each stream may always have a message in flight, so their number must not be what bounds answers.
TEST(ForwardStreamReactorTest, AnswersOnAllStreamsTogetherAreBounded) {
  constexpr int64_t kTokens = 512;  // 64 KiB
  constexpr size_t kStreams = 12;
  constexpr size_t kTaken = 7;  // of 68 KiB, in twice max_all_bytes
  StreamServer server(
      {.limits = {.max_stream_bytes = int64_t{64} << 10, .max_all_bytes = int64_t{256} << 10}});
  std::vector<std::unique_ptr<Client>> clients;
  size_t num_refused = 0;
  for (uint64_t i = 0; i < kStreams; ++i) {
    Client& client = *clients.emplace_back(std::make_unique<Client>(server));
    ASSERT_TRUE(client.Send(i, kTokens));
    if (num_refused == 0 && i < kTaken) {
      server.controller().AwaitHeld(i + 1);
      continue;
    }
    v1::ForwardStreamResponse response;
    ASSERT_TRUE(client.stream().Read(&response));
    EXPECT_EQ(response.error().code(), static_cast<int>(StatusCode::RESOURCE_EXHAUSTED))
        << response.ShortDebugString();
    ++num_refused;
  }
  EXPECT_EQ(num_refused, kStreams - kTaken);
  server.controller().AnswerAtOnce();
  for (uint64_t i = 0; i < kStreams; ++i) {
    if (i < kTaken) {
      EXPECT_EQ(clients[i]->ReadAnswer(kTokens), i);
    }
    ASSERT_TRUE(clients[i]->Send(100, kTokens));
    EXPECT_EQ(clients[i]->ReadAnswer(kTokens), 100u);
    EXPECT_TRUE(clients[i]->Finish().ok());
  }
}

// Everything at once, for the sanitizers; each stream checks that its answers are its own.
TEST(ForwardStreamReactorTest, ManyStreamsDoAnything) {
  StreamServer server(
      {.limits = {.max_stream_bytes = int64_t{64} << 10, .max_all_bytes = int64_t{256} << 10}});
  std::atomic<bool> stop{false};
  std::thread answering([&] {
    while (!stop) {
      if (!server.controller().AnswerOldest()) std::this_thread::yield();
    }
  });
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(seed + thread);
      for (int round = 0; round < 20; ++round) {
        Client client(server);
        const uint64_t count = random() % 60;
        const bool reset = random() % 4 == 0;
        std::thread writer([&, choice = random()] {
          std::mt19937_64 own(choice);
          for (uint64_t seq = 0; seq < count; ++seq) {
            if (!client.Send(seq, static_cast<int64_t>(own() % 20))) return;
            if (own() % 8 == 0) {
              v1::ForwardStreamRequest cancel;
              cancel.set_stream_seq(own() % (seq + 1));
              cancel.set_cancel(true);
              if (!client.stream().Write(cancel)) return;
            }
            if (reset && own() % 10 == 0) return client.Reset();
          }
          client.stream().WritesDone();
        });
        std::set<uint64_t> answered;
        v1::ForwardStreamResponse response;
        while (client.stream().Read(&response)) {
          EXPECT_TRUE(answered.insert(response.stream_seq()).second);
          if (response.has_response()) {
            EXPECT_EQ(response.response().request_id(), absl::StrCat(response.stream_seq()));
          } else {
            EXPECT_EQ(response.error().code(), static_cast<int>(StatusCode::CANCELLED));
          }
        }
        writer.join();
        const grpc::Status status = client.stream().Finish();
        if (!reset) {
          EXPECT_TRUE(status.ok()) << status.error_message();
          EXPECT_EQ(answered.size(), count);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  server.AwaitStreamsEnd();
  stop = true;
  answering.join();
  EXPECT_EQ(server.pool().allocated_bytes(), 0);
}

}  // namespace
}  // namespace expertmesh
