// Connections: addresses, sizes that one side refuses, signs of life, and what is left of those
// that ended.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "client/client_error.h"
#include "tests/integration/http2_socket.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/shared_request.h"
#include "tests/integration/tcp_relay.h"

namespace expertmesh {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr char kFixture[] = "tests/golden/qwen3_moe_bfloat16";
constexpr absl::Duration kPatience = absl::Minutes(1);

RequestTarget FixtureTarget() { return {"qwen3_moe_bfloat16", 1, 0, 48, 12}; }

// ---- Addresses ---------------------------------------------------------------------------------

struct Family {
  const char* name;
  std::string host;        // as in --listen
  std::string other_host;  // the other family's loopback
};

class AddressTest : public testing::TestWithParam<Family> {};

TEST_P(AddressTest, ListensOnItsFamilyAlone) {
  const Family& family = GetParam();
  auto server = ServerProcess::Start(
      {.path = SiblingBinary("expertmesh-control-plane"),
       .args = {absl::StrCat("--checkpoint=", kFixture),
                "--metrics_listen=", absl::StrCat("--listen=", family.host, ":0")}});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto line = (*server)->WaitForLine("serving .* on (.*):([0-9]+)", absl::Seconds(60));
  if (!line.ok() && absl::StrContains((*server)->Stderr(), "Cannot assign requested address")) {
    GTEST_SKIP() << "this machine has no " << family.name;
  }
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ((*line)[1], family.host);
  const std::string address = absl::StrCat(family.host, ":", (*line)[2]);
  const SharedRequest request(FixtureTarget(), 3, 2);
  const auto client = SeparateClient(address);
  const auto answer = client->Forward(request.Input());
  EXPECT_TRUE(answer.ok()) << answer.status();
  const auto stranger = SeparateClient(absl::StrCat(family.other_host, ":", (*line)[2]));
  EXPECT_TRUE(absl::IsUnavailable(stranger->Forward(request.Input()).status()));

  // The same address for a second one.
  auto second =
      ServerProcess::Start({.path = SiblingBinary("expertmesh-control-plane"),
                            .args = {absl::StrCat("--checkpoint=", kFixture),
                                     "--metrics_listen=", absl::StrCat("--listen=", address)}});
  ASSERT_TRUE(second.ok()) << second.status();
  const auto exit_code = (*second)->Wait(kPatience);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT((*second)->Stderr(),
              HasSubstr(absl::StrCat("cannot listen on ", address, ": Address already in use")));
  EXPECT_TRUE(client->Forward(request.Input()).ok());
}

INSTANTIATE_TEST_SUITE_P(Families, AddressTest,
                         testing::Values(Family{"IPv4", "127.0.0.1", "[::1]"},
                                         Family{"IPv6", "[::1]", "127.0.0.1"}),
                         [](const auto& family) { return family.param.name; });

// ---- Sizes -------------------------------------------------------------------------------------

TEST(MessageLimitTest, EverySidesRefusalNamesSizeAndLimit) {
  const auto server =
      ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--max_message_bytes=1MiB"}});
  ASSERT_NE(server, nullptr);
  // The server's, on the request.
  const SharedRequest large(FixtureTarget(), 12'000, 1);
  const auto client = SeparateClient(server->address());
  const absl::Status by_server = client->Forward(large.Input()).status();
  EXPECT_TRUE(absl::IsResourceExhausted(by_server)) << by_server;
  EXPECT_THAT(std::string(by_server.message()), ContainsRegex("12[0-9]{5} .*1048576"));
  // The size is the request's own, so that advice can say whose message it was.
  ASSERT_TRUE(GetRequestBytes(by_server).has_value());
  const std::string request_size = absl::StrCat("(", *GetRequestBytes(by_server), " vs. ");
  EXPECT_THAT(std::string(by_server.message()),
              HasSubstr(absl::StrCat("Received message larger than max ", request_size)));
  // In a stream too, where it ends the stream.
  const auto stream = client->OpenForwardStream({.timeout = kPatience});
  absl::Status in_stream;
  absl::BlockingCounter answered(1);
  ASSERT_TRUE(stream
                  ->Send(1, absl::ZeroDuration(), large.Input(),
                         [&](absl::StatusOr<ForwardOutput> answer) {
                           in_stream = answer.status();
                           answered.DecrementCount();
                         })
                  .ok());
  answered.Wait();
  EXPECT_TRUE(absl::IsResourceExhausted(in_stream)) << in_stream;
  EXPECT_THAT(std::string(in_stream.message()), ContainsRegex("12[0-9]{5} .*1048576"));

  // The client's own, on what it sends and on what it receives: float32 is twice as large.
  const SharedRequest small(FixtureTarget(), 6'000, 1);
  ASSERT_TRUE(client->Forward(small.Input()).ok());
  ExpertClientOptions options;
  options.target = server->address();
  options.max_message_bytes = 1'000'000;
  const auto narrow = ExpertClient::Create(options);
  ASSERT_TRUE(narrow.ok()) << narrow.status();
  const absl::Status sending = (*narrow)->Forward(large.Input()).status();
  EXPECT_TRUE(absl::IsResourceExhausted(sending)) << sending;
  EXPECT_THAT(std::string(sending.message()), ContainsRegex("12[0-9]{5} .*1000000"));
  EXPECT_EQ(GetRequestBytes(sending), GetRequestBytes(by_server));
  EXPECT_THAT(std::string(sending.message()),
              HasSubstr(absl::StrCat("Sent message larger than max ", request_size)));
  ForwardInput as_float32 = small.Input();
  as_float32.options.set_output_dtype(v1::DATA_TYPE_FLOAT32);
  const absl::Status receiving = (*narrow)->Forward(as_float32).status();
  EXPECT_TRUE(absl::IsResourceExhausted(receiving)) << receiving;
  EXPECT_THAT(std::string(receiving.message()), ContainsRegex("115[0-9]{4} .*1000000"));
  ASSERT_TRUE(GetRequestBytes(receiving).has_value());
  EXPECT_LT(*GetRequestBytes(receiving), 1'000'000);
  EXPECT_TRUE((*narrow)->Forward(small.Input()).ok());
}

// ---- Signs of life -----------------------------------------------------------------------------

constexpr uint32_t kEnhanceYourCalm = 11;
constexpr uint8_t kAck = 1;

TEST(KeepaliveTest, AClientThatPingsTooOftenIsToldAndHarmsNobody) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  Http2Socket polite(server->port());
  ASSERT_TRUE(polite.ReadUntil(Http2Socket::kSettings, absl::Now() + kPatience).has_value());
  ASSERT_TRUE(polite.Send(Http2Socket::kPing, 0, "12345678"));
  const auto pong = polite.ReadUntil(Http2Socket::kPing, absl::Now() + kPatience);
  ASSERT_TRUE(pong.has_value());
  EXPECT_EQ(pong->flags, kAck);
  EXPECT_EQ(pong->payload, "12345678");

  Http2Socket rude(server->port());
  for (int i = 0; i < 10'000 && rude.Send(Http2Socket::kPing, 0, "12345678"); ++i) {
  }
  const auto go_away = rude.ReadUntil(Http2Socket::kGoAway, absl::Now() + kPatience);
  ASSERT_TRUE(go_away.has_value());
  ASSERT_GE(go_away->payload.size(), 8u);
  EXPECT_EQ(static_cast<uint32_t>(go_away->payload[7]), kEnhanceYourCalm);
  EXPECT_EQ(go_away->payload.substr(8), "too_many_pings");
  while (rude.Read(absl::Now() + kPatience).has_value()) {
  }
  EXPECT_TRUE(rude.is_closed());

  EXPECT_FALSE(polite.ReadUntil(Http2Socket::kGoAway, absl::Now()).has_value());
  EXPECT_FALSE(polite.is_closed());
  EXPECT_TRUE(server->Forward(GoodRequest(FixtureTarget(), 4, 2)).ok());
}

TEST(KeepaliveTest, APeerThatGivesNoSignOfLifeIsClosed) {
  const auto server = ServerUnderTest::Start(
      {.checkpoint = kFixture, .args = {"--keepalive_time=200ms", "--keepalive_timeout=2s"}});
  ASSERT_NE(server, nullptr);
  ASSERT_TRUE(server->Forward(GoodRequest(FixtureTarget(), 4, 2)).ok());
  const ProcessUsage before = UsageOf(server->process().pid());
  // Never acknowledges a ping.
  Http2Socket dead(server->port());
  ASSERT_TRUE(dead.ReadUntil(Http2Socket::kPing, absl::Now() + kPatience).has_value());
  while (dead.Read(absl::Now() + kPatience).has_value()) {
  }
  EXPECT_TRUE(dead.is_closed());
  // One whose network goes while a stream is open and a call half sent.
  TcpRelay relay(server->port());
  const auto client = SeparateClient(absl::StrCat("127.0.0.1:", relay.port()));
  const auto stream = client->OpenForwardStream({.timeout = kPatience});
  const SharedRequest request(FixtureTarget(), 3, 2);
  ASSERT_TRUE(client->Forward(request.Input()).ok());
  relay.StallAll();
  EXPECT_TRUE(relay.AwaitClosedByServer(1, kPatience));
  const absl::Time deadline = absl::Now() + kPatience;
  while (UsageOf(server->process().pid()).num_fds > before.num_fds && absl::Now() < deadline) {
  }
  EXPECT_LE(UsageOf(server->process().pid()).num_fds, before.num_fds);
  // This test's own client answers its pings, and lives; on a busy machine now and then too late.
  CallOutcome outcome;
  do {
    outcome = server->Forward(GoodRequest(FixtureTarget(), 4, 2));
  } while (outcome.code == absl::StatusCode::kUnavailable && absl::Now() < deadline);
  EXPECT_TRUE(outcome.ok()) << outcome;
}

TEST(KeepaliveTest, AClientNoticesAServerThatStopped) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  ExpertClientOptions options;
  options.target = server->address();
  options.retry.max_attempts = 1;
  options.keepalive_time = absl::Milliseconds(500);
  options.keepalive_timeout = absl::Milliseconds(500);
  const auto client = ExpertClient::Create(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const SharedRequest request(FixtureTarget(), 3, 2);
  // A call may meet the end of a connection: the one to the server that was stopped, or one whose
  // pings a busy machine answered too late.
  const auto call = [&] {
    const absl::Time deadline = absl::Now() + kPatience;
    absl::Status status;
    do {
      status = (*client)->Forward(request.Input()).status();
    } while (absl::IsUnavailable(status) && absl::Now() < deadline);
    return status;
  };
  ASSERT_TRUE(call().ok());
  ASSERT_TRUE(server->process().Signal(SIGSTOP).ok());
  ASSERT_TRUE(WaitUntilStopped(server->process().pid()));
  const absl::Time start = absl::Now();
  const absl::Status status =
      (*client)->Forward(request.Input(), {.timeout = absl::Minutes(4)}).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_LT(absl::Now() - start, absl::Minutes(2));
  ASSERT_TRUE(server->process().Signal(SIGCONT).ok());
  const absl::Status again = call();
  EXPECT_TRUE(again.ok()) << again;
}

// ---- What is left ------------------------------------------------------------------------------

TEST(ConnectionCyclesTest, TwoHundredLeaveNothing) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--local_ranks=2"}});
  ASSERT_NE(server, nullptr);
  const SharedRequest request(FixtureTarget(), 256, 2);
  // Every way to end.
  const auto cycle = [&](int number) {
    const auto client = SeparateClient(server->address(), number);
    const auto answer = client->Forward(request.Input());
    ASSERT_TRUE(answer.ok()) << answer.status();
    const auto stream = client->OpenForwardStream({.timeout = kPatience});
    ASSERT_TRUE(stream->Send(1, absl::ZeroDuration(), request.Input(), [](const auto&) {}).ok());
    if (number % 3 == 0) {
      EXPECT_TRUE(stream->Finish().ok());
    }
    if (number % 3 == 1) stream->Abort();
    CallGroup hasty;
    hasty.Start(client.get(), request.Input(), absl::Milliseconds(1));
  };
  // gRPC keeps a few threads more or fewer.
  constexpr int kMoreThreads = 4;
  const auto settled = [&](const ProcessUsage& before) {
    const absl::Time deadline = absl::Now() + kPatience;
    ProcessUsage usage;
    do {
      usage = UsageOf(server->process().pid());
    } while (
        (usage.num_fds > before.num_fds || usage.num_threads > before.num_threads + kMoreThreads) &&
        absl::Now() < deadline);
    return usage;
  };
  ProcessUsage idle = UsageOf(server->process().pid());
  idle.num_threads += 1000;  // it makes them with the first calls
  for (int i = 0; i < 50; ++i) cycle(i);
  const ProcessUsage warm = settled(idle);
  for (int i = 0; i < 200; ++i) cycle(i);
  const ProcessUsage after = settled(warm);
  EXPECT_LE(after.num_fds, warm.num_fds) << after;
  EXPECT_LE(after.num_threads, warm.num_threads + kMoreThreads) << after;
  if (kResidentBytesMeanSomething) {
    EXPECT_LE(after.resident_bytes, warm.resident_bytes + (4 << 20))
        << "before: " << warm << "\nafter: " << after;
  }
}

}  // namespace
}  // namespace expertmesh
