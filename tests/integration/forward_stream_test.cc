// ForwardStream against a real server process.

#include "client/forward_stream.h"

#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/expert_client.h"
#include "expertmesh/v1/expert_service.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "tests/integration/bad_requests.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/sparse_checkpoint.h"

namespace expertmesh {
namespace {

using Stream = grpc::ClientReaderWriter<v1::ForwardStreamRequest, v1::ForwardStreamResponse>;

constexpr char kFixture[] = "tests/golden/qwen3_moe_bfloat16";
constexpr char kInFlight[] = "expertmesh_calls_in_flight{method=\"ForwardStream\"}";

RequestTarget FixtureTarget() { return {"qwen3_moe_bfloat16", 1, 0, 48, 12}; }

std::unique_ptr<ExpertClient> NewClient(const ServerUnderTest& server) {
  ExpertClientOptions options;
  options.target = server.address();
  auto client = ExpertClient::Create(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

std::string ReasonOf(const google::rpc::Status& status) {
  google::rpc::ErrorInfo info;
  return status.details_size() > 0 && status.details(0).UnpackTo(&info) ? info.reason() : "";
}

bool WaitForMetric(ServerUnderTest* server, const std::string& series, double value) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (absl::Now() < deadline) {
    if (server->Metric(series) == value) return true;
  }
  return false;
}

// "VmRSS" and the like, in bytes.
int64_t MemoryOf(pid_t pid, const std::string& key) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  std::string word;
  while (file >> word) {
    int64_t kib = 0;
    if (word == absl::StrCat(key, ":") && file >> kib) return kib << 10;
  }
  return 0;
}

// A stream by generated code, on a connection of its own, that reads and writes only when told to.
class PlainStream {
 public:
  explicit PlainStream(const ServerUnderTest& server) {
    grpc::ChannelArguments args;
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    args.SetMaxReceiveMessageSize(-1);
    stub_ = v1::ExpertService::NewStub(
        grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), args));
    // Ends what hangs.
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(10));
    stream_ = stub_->ForwardStream(&context_);
  }

  bool Send(uint64_t stream_seq, const v1::ForwardRequest& request, int64_t timeout_micros = 0) {
    v1::ForwardStreamRequest message;
    message.set_stream_seq(stream_seq);
    message.set_timeout_micros(timeout_micros);
    *message.mutable_request() = request;
    return stream_->Write(message);
  }
  v1::ForwardStreamResponse Read() {
    v1::ForwardStreamResponse response;
    EXPECT_TRUE(stream_->Read(&response));
    return response;
  }
  grpc::Status Finish() {
    stream_->WritesDone();
    return AwaitEnd();
  }
  grpc::Status AwaitEnd() {
    v1::ForwardStreamResponse response;
    while (stream_->Read(&response)) {
    }
    return stream_->Finish();
  }
  void Reset() { context_.TryCancel(); }

 private:
  std::unique_ptr<v1::ExpertService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<Stream> stream_;
};

// One message's tensors, drawn at random.
struct RandomInput {
  RandomInput(std::mt19937_64* random, int64_t tokens, int32_t topk) : num_tokens(tokens), k(topk) {
    const auto below = [random](uint64_t limit) { return (*random)() % limit; };
    for (int64_t i = 0; i < tokens * target.hidden_size; ++i) {
      // Both signs, about 2^-4 to 2^3.
      hidden.push_back(static_cast<uint16_t>((below(2) << 15) | (0x3d80 + below(0x380))));
    }
    for (int64_t i = 0; i < tokens * topk; ++i) {
      ids.push_back(static_cast<int32_t>(below(static_cast<uint64_t>(target.num_experts) + 1)) - 1);
      weights.push_back(static_cast<float>(below(1000)) / 1000.0f);
    }
  }
  ForwardInput Input() const {
    ForwardInput input;
    input.layer = target.layer;
    input.num_tokens = num_tokens;
    input.hidden_size = target.hidden_size;
    input.hidden_states = {hidden.data(), static_cast<int64_t>(hidden.size() * 2),
                           v1::DATA_TYPE_BFLOAT16, nullptr};
    input.routing = TopKRouting{k, ids, weights};
    return input;
  }

  int64_t num_tokens;
  int32_t k;
  const RequestTarget target = FixtureTarget();
  std::vector<uint16_t> hidden;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

TEST(ForwardStreamIntegrationTest, AThousandPipelinedMessagesHaveTheBytesOfForward) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--local_ranks=2"}});
  ASSERT_NE(server, nullptr);
  const auto client = NewClient(*server);
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t kMessages = 1000;
  std::vector<RandomInput> inputs;
  std::vector<std::vector<std::byte>> expected;
  for (uint64_t seq = 0; seq < kMessages; ++seq) {
    inputs.emplace_back(&random, static_cast<int64_t>(random() % 24),
                        static_cast<int32_t>(random() % 6));
    auto output = client->Forward(inputs.back().Input());
    ASSERT_TRUE(output.ok()) << output.status();
    expected.push_back(std::move(output->output));
  }
  const auto stream = client->OpenForwardStream();
  std::vector<std::atomic<int>> answers(kMessages);
  std::mutex mutex;
  std::vector<uint64_t> order;
  for (uint64_t seq = 0; seq < kMessages; ++seq) {
    // What is sent does not depend on what comes behind it: numbers from anywhere.
    const absl::Status sent =
        stream->Send(seq * 0x9e3779b97f4a7c15u, absl::ZeroDuration(), inputs[seq].Input(),
                     [&, seq](absl::StatusOr<ForwardOutput> output) {
                       ++answers[seq];
                       EXPECT_TRUE(output.ok()) << output.status();
                       if (!output.ok()) return;
                       EXPECT_TRUE(output->output == expected[seq]) << seq;
                       const std::lock_guard<std::mutex> lock(mutex);
                       order.push_back(seq);
                     });
    ASSERT_TRUE(sent.ok()) << sent;
  }
  EXPECT_TRUE(stream->Finish().ok());
  for (const auto& count : answers) EXPECT_EQ(count, 1);
  // They did travel together: far fewer steps than messages.
  EXPECT_LT(server->Metric("expertmesh_steps_total"), 2 * kMessages);
  RecordProperty("in_order", std::is_sorted(order.begin(), order.end()) ? "yes" : "no");
}

TEST(ForwardStreamIntegrationTest, EachErrorEndsItsMessageAlone) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  PlainStream stream(*server);
  const v1::ForwardRequest good = GoodRequest(FixtureTarget(), 4, 2);
  const CallOutcome expected = server->Forward(good);
  ASSERT_TRUE(expected.ok()) << expected;
  const std::vector<BadRequest> cases = BadRequests(FixtureTarget());
  for (uint64_t i = 0; i < cases.size(); ++i) {
    v1::ForwardRequest bad = good;
    cases[i].spoil(&bad);
    ASSERT_TRUE(stream.Send(2 * i, bad));
    ASSERT_TRUE(stream.Send(2 * i + 1, good));
  }
  std::set<uint64_t> answered;
  for (uint64_t i = 0; i < 2 * cases.size(); ++i) {
    const v1::ForwardStreamResponse response = stream.Read();
    const uint64_t seq = response.stream_seq();
    EXPECT_TRUE(answered.insert(seq).second);
    ASSERT_LT(seq / 2, cases.size());
    SCOPED_TRACE(cases[seq / 2].name);
    if (seq % 2 == 0) {
      EXPECT_EQ(response.error().code(), static_cast<int>(cases[seq / 2].code));
      EXPECT_EQ(ReasonOf(response.error()), cases[seq / 2].reason);
    } else {
      EXPECT_EQ(response.response().output().data(), expected.response.output().data());
    }
  }
  EXPECT_TRUE(stream.Finish().ok());
}

class SlowStreamTest : public testing::Test {
 protected:
  SlowStreamTest() : checkpoint_(SparseCheckpointShape{.intermediate_size = 1360 / kSlowdown}) {}

  std::unique_ptr<ServerUnderTest> StartServer(std::vector<std::string> args = {}) {
    args.push_back("--model_name=slow");
    args.push_back("--threads=1");  // equally slow on large machines
    return ServerUnderTest::Start({.checkpoint = checkpoint_.path(), .args = args});
  }
  v1::ForwardRequest Request(int64_t num_tokens) const {
    return GoodRequest(
        {"slow", 0, 1, checkpoint_.shape().hidden_size, checkpoint_.shape().num_experts},
        num_tokens, 4);
  }

  SparseCheckpoint checkpoint_;
};

TEST_F(SlowStreamTest, DeadlinesAndErrorsOvertakeWhatRuns) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  PlainStream stream(*server);
  ASSERT_TRUE(stream.Send(1, Request(2048)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 2048));
  ASSERT_TRUE(stream.Send(2, Request(8), 1'000));
  ASSERT_TRUE(stream.Send(3, Request(8)));
  v1::ForwardRequest bad = Request(8);
  bad.set_layer(99);
  ASSERT_TRUE(stream.Send(4, bad));
  std::map<uint64_t, v1::ForwardStreamResponse> responses;
  std::vector<uint64_t> order;
  for (int i = 0; i < 4; ++i) {
    const v1::ForwardStreamResponse response = stream.Read();
    order.push_back(response.stream_seq());
    responses[response.stream_seq()] = response;
  }
  EXPECT_EQ(responses[2].error().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(ReasonOf(responses[2].error()), "DEADLINE_PASSED");
  EXPECT_EQ(ReasonOf(responses[4].error()), "LAYER_NOT_FOUND");
  EXPECT_TRUE(responses[1].has_response()) << responses[1].error().ShortDebugString();
  EXPECT_TRUE(responses[3].has_response()) << responses[3].error().ShortDebugString();
  EXPECT_THAT(order, testing::ElementsAre(testing::AnyOf(2, 4), testing::AnyOf(2, 4),
                                          testing::AnyOf(1, 3), testing::AnyOf(1, 3)));
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(SlowStreamTest, ResetsLeaveNothingBehind) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<PlainStream>> streams;
    for (int i = 0; i < 6; ++i) {
      streams.push_back(std::make_unique<PlainStream>(*server));
      for (uint64_t seq = 0; seq < 10; ++seq) ASSERT_TRUE(streams.back()->Send(seq, Request(32)));
    }
    for (const auto& stream : streams) stream->Reset();
    for (const auto& stream : streams) {
      EXPECT_EQ(stream->AwaitEnd().error_code(), grpc::StatusCode::CANCELLED);
    }
  }
  EXPECT_TRUE(WaitForMetric(server.get(), kInFlight, 0));
  EXPECT_TRUE(WaitForMetric(server.get(), "expertmesh_bytes_in_flight", 0));
  EXPECT_TRUE(server->Forward(Request(1)).ok());
}

TEST_F(SlowStreamTest, DrainFinishesWhatIsInFlight) {
  const auto server = StartServer({"--drain_timeout=2m"});
  ASSERT_NE(server, nullptr);
  PlainStream busy(*server), idle(*server);
  ASSERT_TRUE(idle.Send(7, Request(1)));
  EXPECT_EQ(idle.Read().stream_seq(), 7u);
  ASSERT_TRUE(busy.Send(1, Request(2048)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 2048));
  ASSERT_TRUE(server->process().Terminate().ok());
  ASSERT_TRUE(server->process().WaitForLine("draining", absl::Seconds(30)).ok());
  ASSERT_TRUE(busy.Send(2, Request(1)));
  const v1::ForwardStreamResponse refused = busy.Read();
  EXPECT_EQ(refused.stream_seq(), 2u);
  EXPECT_EQ(refused.error().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(ReasonOf(refused.error()), "DRAINING");
  const v1::ForwardStreamResponse answered = busy.Read();
  EXPECT_EQ(answered.stream_seq(), 1u);
  EXPECT_TRUE(answered.has_response()) << answered.error().ShortDebugString();
  // Neither half-closes; both are told why they end.
  for (PlainStream* stream : {&busy, &idle}) {
    const grpc::Status status = stream->AwaitEnd();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
    google::rpc::Status details;
    EXPECT_TRUE(details.ParseFromString(status.error_details()));
    EXPECT_EQ(ReasonOf(details), "DRAINING");
  }
  // Well within the drain's time: there is nothing left to wait for, though nobody looks at the
  // connections any more.
  const auto exit = server->process().Wait(absl::Seconds(60));
  ASSERT_TRUE(exit.ok()) << exit.status();
  EXPECT_EQ(*exit, 0);
}

TEST(ForwardStreamIntegrationTest, ClientsThatNeverReadHoldLittleAndStopNobody) {
  const auto server = ServerUnderTest::Start(
      {.checkpoint = kFixture,
       .args = {"--max_stream_inflight_bytes=4MiB", "--max_all_streams_inflight_bytes=8MiB"}});
  ASSERT_NE(server, nullptr);
  const v1::ForwardRequest large = GoodRequest(FixtureTarget(), 2000, 2);  // 224 KB, answer 192 KB
  const v1::ForwardRequest small = GoodRequest(FixtureTarget(), 4, 2);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(server->Forward(large).ok());
  const int64_t before = MemoryOf(server->process().pid(), "VmRSS");
  ASSERT_GT(before, 0);

  constexpr int kIdle = 4;
  constexpr int kMessages = 1000;  // 224 MB each
  std::atomic<int> num_written{0};
  std::atomic<int> num_writing{0};
  std::vector<std::unique_ptr<PlainStream>> idle;
  std::vector<std::thread> writers;
  for (int i = 0; i < kIdle; ++i) {
    idle.push_back(std::make_unique<PlainStream>(*server));
    writers.emplace_back([&, stream = idle.back().get()] {
      for (uint64_t seq = 0; seq < kMessages && stream->Send(seq, large); ++seq) {
        ++num_written;
        if (seq == 0) ++num_writing;
      }
    });
  }
  PlainStream busy(*server);
  int64_t most = 0;
  std::vector<double> unary_millis;
  uint64_t next_seq = 0;
  const auto call_both_ways = [&] {
    const uint64_t i = next_seq++;
    const absl::Time start = absl::Now();
    ASSERT_TRUE(server->Forward(small).ok());
    unary_millis.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
    ASSERT_TRUE(busy.Send(i, small));
    const v1::ForwardStreamResponse response = busy.Read();
    EXPECT_EQ(response.stream_seq(), i);
    EXPECT_TRUE(response.has_response()) << response.error().ShortDebugString();
    most = std::max(most, MemoryOf(server->process().pid(), "VmRSS"));
  };
  // Until the clients are stuck: nothing more was written in the time of many calls of others.
  const absl::Time deadline = absl::Now() + absl::Minutes(2);
  for (int written = -1; written != num_written || num_writing < kIdle;) {
    if (absl::Now() > deadline) {
      ADD_FAILURE() << "the clients are never stuck";
      break;
    }
    written = num_written;
    for (int i = 0; i < 250; ++i) ASSERT_NO_FATAL_FAILURE(call_both_ways());
  }
  const int64_t most_by_then = most;
  for (int i = 0; i < 500; ++i) ASSERT_NO_FATAL_FAILURE(call_both_ways());
  EXPECT_TRUE(busy.Finish().ok());
  // The clients are far from done, and stuck.
  EXPECT_LT(num_written, kIdle * kMessages);
  // 8 MiB of budget and a message over it per stream; the rest is what gRPC receives ahead, up to
  // some 20 MB a connection. What the clients want to send are 900 MB, and as much in answers.
  if (kResidentBytesMeanSomething) {
    EXPECT_LE(most - before, int64_t{192} << 20);
    EXPECT_LE(most - most_by_then, int64_t{8} << 20) << "it does not stay there";
  }
  std::sort(unary_millis.begin(), unary_millis.end());
  RecordProperty("messages_written", num_written.load());
  RecordProperty("rss_growth_bytes", absl::StrCat(most - before));
  RecordProperty("unary_p50_millis", absl::StrCat(unary_millis[unary_millis.size() / 2]));
  RecordProperty("unary_p99_millis", absl::StrCat(unary_millis[unary_millis.size() * 99 / 100]));
  // Once they read, everything comes; the first one shows it, the others vanish.
  for (int i = 1; i < kIdle; ++i) idle[static_cast<size_t>(i)]->Reset();
  std::set<uint64_t> answered;
  for (int i = 0; i < kMessages; ++i) {
    const v1::ForwardStreamResponse response = idle[0]->Read();
    ASSERT_TRUE(response.has_response()) << response.error().ShortDebugString();
    answered.insert(response.stream_seq());
  }
  EXPECT_EQ(answered.size(), static_cast<size_t>(kMessages));
  for (std::thread& writer : writers) writer.join();
  EXPECT_TRUE(idle[0]->Finish().ok());
  EXPECT_TRUE(WaitForMetric(server.get(), kInFlight, 0));
  EXPECT_TRUE(WaitForMetric(server.get(), "expertmesh_bytes_in_flight", 0));
}

}  // namespace
}  // namespace expertmesh
