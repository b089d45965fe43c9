// Clients that send or take more than a server can hold, or that vanish.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/http2_socket.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/shared_request.h"
#include "tests/integration/tcp_relay.h"

namespace expertmesh {
namespace {

constexpr char kFixture[] = "tests/golden/qwen3_moe_bfloat16";
constexpr int64_t kMebibyte = 1 << 20;

RequestTarget FixtureTarget() { return {"qwen3_moe_bfloat16", 1, 0, 48, 12}; }

// Until `series` is `value`, or at least that when it is not zero.
bool AwaitMetric(ServerUnderTest* server, const std::string& series, double value) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (absl::Now() < deadline) {
    const double now = server->Metric(series);
    if (value == 0 ? now == 0 : now >= value) return true;
  }
  return false;
}

// Until Forward calls have been answered, with whatever code, that often.
bool AwaitAnswered(ServerUnderTest* server, int num_calls) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (absl::Now() < deadline) {
    double sum = 0;
    for (const char* code : {"OK", "RESOURCE_EXHAUSTED"}) {
      sum += std::max(0.0, server->Metric(absl::StrCat("expertmesh_calls_total{code=\"", code,
                                                       "\",method=\"Forward\"}")));
    }
    if (sum >= num_calls) return true;
  }
  return false;
}

std::vector<std::unique_ptr<ExpertClient>> SeparateClients(int port, int num_clients) {
  std::vector<std::unique_ptr<ExpertClient>> clients;
  for (int i = 0; i < num_clients; ++i) {
    clients.push_back(SeparateClient(absl::StrCat("127.0.0.1:", port), i));
  }
  return clients;
}

class FloodTest : public testing::Test {
 protected:
  // One small call has been served.
  void StartServer(std::vector<std::string> args) {
    server_ = ServerUnderTest::Start({.checkpoint = kFixture, .args = std::move(args)});
    ASSERT_NE(server_, nullptr);
    ASSERT_TRUE(SmallCall().ok());
    before_ = UsageOf(server_->process().pid());
  }

  CallOutcome SmallCall() {
    return server_->Forward(GoodRequest(FixtureTarget(), 64, 4), absl::Seconds(30));
  }

  void ExpectHeldAtMost(int64_t bytes) const {
    const ProcessUsage usage = UsageOf(server_->process().pid());
    EXPECT_GT(usage.max_resident_bytes, 0);
    if (kResidentBytesMeanSomething) {
      EXPECT_LT(usage.max_resident_bytes, before_.resident_bytes + bytes)
          << "before: " << before_ << "\nafter: " << usage;
    }
  }

  // Nothing of the flood is left: neither calls nor connections.
  void ExpectRecovery() {
    EXPECT_TRUE(AwaitMetric(server_.get(), "expertmesh_calls_in_flight{method=\"Forward\"}", 0));
    EXPECT_TRUE(AwaitMetric(server_.get(), "expertmesh_bytes_in_flight", 0));
    const absl::Time deadline = absl::Now() + absl::Minutes(1);
    ProcessUsage usage;
    do {
      usage = UsageOf(server_->process().pid());
    } while (usage.num_fds > before_.num_fds && absl::Now() < deadline);
    EXPECT_LE(usage.num_fds, before_.num_fds);
    CallOutcome outcome;
    do {
      outcome = SmallCall();
    } while (outcome.code == absl::StatusCode::kUnavailable && absl::Now() < deadline);
    EXPECT_TRUE(outcome.ok()) << outcome;
  }

  std::unique_ptr<ServerUnderTest> server_;
  ProcessUsage before_;
};

TEST_F(FloodTest, UploadsThatNeverEndHoldBoundedMemory) {
  constexpr int kNumClients = 40;
  StartServer({"--max_transport_bytes=128MiB"});
  const SharedRequest large(FixtureTarget(), 60 * kMebibyte / 96, 1);
  TcpRelay relay(server_->port(), {.max_up_bytes = 59 * kMebibyte});
  const auto clients = SeparateClients(relay.port(), kNumClients);
  CallGroup flood;
  for (const auto& client : clients) flood.Start(client.get(), large.Input(), absl::Seconds(3));
  // Others are served all the while, by retries if need be: gRPC, short of memory, also closes
  // connections that hold none.
  ExpertClientOptions options;
  options.target = server_->address();
  auto bystander = ExpertClient::Create(options);
  ASSERT_TRUE(bystander.ok()) << bystander.status();
  const SharedRequest small(FixtureTarget(), 64, 4);
  while (flood.num_ended() < kNumClients) {
    const absl::StatusOr<ForwardOutput> answer = (*bystander)->Forward(small.Input());
    EXPECT_TRUE(answer.ok()) << answer.status();
  }
  for (const CallGroup::Ended& call : flood.Wait()) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(call.status) || absl::IsResourceExhausted(call.status) ||
                absl::IsUnavailable(call.status))
        << call.status;
  }
  // Of 2.3 GiB.
  ExpectHeldAtMost(2 * 128 * kMebibyte);
  relay.ResetAll();
  (*bystander).reset();
  ExpectRecovery();
}

TEST_F(FloodTest, MessagesAboveTheLimitHoldBoundedMemory) {
  StartServer({"--max_message_bytes=1MiB", "--max_transport_bytes=128MiB"});
  const SharedRequest large(FixtureTarget(), 60 * kMebibyte / 96, 1);
  {
    const auto clients = SeparateClients(server_->port(), 20);
    CallGroup flood;
    for (int round = 0; round < 3; ++round) {
      for (const auto& client : clients) flood.Start(client.get(), large.Input(), absl::Minutes(5));
    }
    for (const CallGroup::Ended& call : flood.Wait()) {
      // Over the limit, or one connection too many for the transport's memory.
      EXPECT_TRUE(absl::IsResourceExhausted(call.status) || absl::IsUnavailable(call.status))
          << call.status;
    }
  }
  // Of 3.6 GiB.
  ExpectHeldAtMost(2 * 128 * kMebibyte);
  ExpectRecovery();
}

TEST_F(FloodTest, AnswersThatAreNeverReadHoldBoundedMemoryAndMakeRoom) {
  // No deadline is what makes room.
  constexpr absl::Duration kLong = absl::Minutes(10);
  StartServer({"--max_inflight_bytes=128MiB", "--keepalive_timeout=2s",
               absl::StrCat("--max_deadline=", absl::FormatDuration(kLong))});
  const SharedRequest large(FixtureTarget(), 30 * kMebibyte / 96, 1);
  TcpRelay relay(server_->port(), {.max_down_bytes = 64 << 10});
  const auto clients = SeparateClients(relay.port(), 24);
  CallGroup flood;
  for (size_t i = 0; i < clients.size(); ++i) {
    flood.Start(clients[i].get(), large.Input(), kLong);
    // One after the other, or the requests themselves would be too many.
    ASSERT_TRUE(AwaitAnswered(server_.get(), static_cast<int>(i) + 2));
  }
  // There is room again when the kernel has given the connections up.
  {
    const auto reader = SeparateClient(server_->address(), 1000);
    const absl::Time deadline = absl::Now() + absl::Minutes(1);
    absl::Status status;
    do {
      status = reader->Forward(large.Input(), {.timeout = absl::Minutes(2)}).status();
      EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    } while (!status.ok() && absl::Now() < deadline);
    EXPECT_TRUE(status.ok()) << status;
  }
  // Payload, answers, the transport and what the allocator keeps; of 1.4 GiB of payload and
  // answers.
  ExpectHeldAtMost(5 * 128 * kMebibyte);
  relay.ResetAll();
  flood.Wait();
  ExpectRecovery();
}

// A connection that is alive, for it answers pings and has room in its socket, yet never makes room
// for the message.
TEST_F(FloodTest, AnAnswerThatIsNotWantedMakesRoomForOneThatIs) {
  StartServer({"--max_inflight_bytes=240KiB"});
  v1::ForwardRequest request = GoodRequest(FixtureTarget(), 640, 1);
  request.mutable_server_gate();
  request.mutable_options()->set_output_dtype(v1::DATA_TYPE_FLOAT32);
  Http2Socket idle(server_->port());
  ASSERT_TRUE(idle.SendCall("/expertmesh.v1.ExpertService/Forward", request.SerializeAsString()));
  ASSERT_TRUE(AwaitAnswered(server_.get(), 2));
  CallOutcome outcome = server_->Forward(request);
  EXPECT_EQ(outcome.code, absl::StatusCode::kResourceExhausted) << outcome;
  EXPECT_EQ(outcome.reason, "BUFFERS_EXHAUSTED");
  EXPECT_GT(outcome.retry_after, absl::ZeroDuration());
  EXPECT_TRUE(SmallCall().ok());
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (!outcome.ok() && absl::Now() < deadline) outcome = server_->Forward(request);
  EXPECT_TRUE(outcome.ok()) << outcome;
  EXPECT_TRUE(idle.ReadUntil(Http2Socket::kResetStream, absl::Now() + absl::Minutes(1)));
}

TEST_F(FloodTest, ClientsThatVanishInTheMiddleLeaveNothing) {
  StartServer({"--local_ranks=2"});
  const SharedRequest large(FixtureTarget(), 16 * kMebibyte / 96, 2);
  for (int round = 0; round < 3; ++round) {
    TcpRelay relay(server_->port(), {.max_up_bytes = (5 + round) * kMebibyte});
    const auto clients = SeparateClients(relay.port(), 8);
    CallGroup calls;
    for (const auto& client : clients) calls.Start(client.get(), large.Input(), absl::Seconds(60));
    ASSERT_TRUE(relay.AwaitStalled(8, absl::Seconds(60)));
    relay.ResetAll();
    for (const CallGroup::Ended& call : calls.Wait()) {
      EXPECT_TRUE(absl::IsUnavailable(call.status)) << call.status;
    }
  }
  // A process that is killed while it sends, waits and reads.
  for (int round = 0; round < 3; ++round) {
    auto client = ServerProcess::Start(
        {.path = SiblingBinary("expertmesh"),
         .args = {"bench", absl::StrCat("--target=", server_->address()), "--tokens=20000",
                  "--requests=1", "--concurrency=16", "--warmup=0s", "--duration=60s"}});
    ASSERT_TRUE(client.ok()) << client.status();
    ASSERT_TRUE(AwaitMetric(server_.get(), "expertmesh_calls_in_flight{method=\"Forward\"}", 2));
    ASSERT_TRUE((*client)->Kill().ok());
    EXPECT_EQ(*(*client)->Wait(absl::Seconds(30)), -SIGKILL);
  }
  ExpectRecovery();
}

}  // namespace
}  // namespace expertmesh
