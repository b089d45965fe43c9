// The client library against servers that come and go.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/expert_client.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

constexpr char kCheckpoint[] = "tests/golden/qwen3_moe_float32";
constexpr int64_t kHiddenSize = 48;

ForwardInput OneToken(std::shared_ptr<std::vector<float>> hidden, int32_t layer) {
  ForwardInput input;
  input.layer = layer;
  input.num_tokens = 1;
  input.hidden_size = static_cast<int64_t>(hidden->size());
  input.hidden_states = {hidden->data(), static_cast<int64_t>(hidden->size() * sizeof(float)),
                         v1::DATA_TYPE_FLOAT32, hidden};
  input.routing = ServerGateRouting();
  return input;
}

// A server that has been and gone: nobody listens on its port.
struct GoneServer {
  std::string address;
  int64_t hidden_size = kHiddenSize;
  int32_t layer = 0;
};
GoneServer StartAndEnd() {
  GoneServer gone;
  const auto server = ServerUnderTest::Start({.checkpoint = kCheckpoint});
  if (server == nullptr) return gone;
  const auto model = server->GetModel("");
  if (!model.ok()) {
    ADD_FAILURE() << model.status();
    return gone;
  }
  gone.address = server->address();
  gone.hidden_size = model->hidden_size();
  gone.layer = model->layers(0).index();
  return gone;
}

TEST(ClientRetryTest, ACallThatWasRetriedLetsGoOfItsTensors) {
  const GoneServer gone = StartAndEnd();
  ExpertClientOptions options;
  options.target = gone.address;
  options.retry = {3, absl::Milliseconds(2), absl::Milliseconds(4), 2.0};
  auto hidden = std::make_shared<std::vector<float>>(gone.hidden_size, 1.0f);
  {
    const auto client = ExpertClient::Create(options);
    ASSERT_TRUE(client.ok()) << client.status();
    for (int i = 0; i < 3; ++i) {
      const auto output = (*client)->Forward(OneToken(hidden, gone.layer));
      EXPECT_EQ(output.status().code(), absl::StatusCode::kUnavailable) << output.status();
    }
  }
  // gRPC lets go of what it was to send on a thread of its own, now and then after the call's end.
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (hidden.use_count() > 1 && absl::Now() < deadline) {
  }
  EXPECT_EQ(hidden.use_count(), 1);
}

TEST(ClientRetryTest, ACallSucceedsWhenTheServerComesInTime) {
  const GoneServer gone = StartAndEnd();
  const std::string port = gone.address.substr(gone.address.rfind(':') + 1);
  ExpertClientOptions options;
  options.target = gone.address;
  options.retry = {1000, absl::Milliseconds(20), absl::Milliseconds(100), 2.0};
  const auto client = ExpertClient::Create(options);
  ASSERT_TRUE(client.ok()) << client.status();
  auto hidden = std::make_shared<std::vector<float>>(gone.hidden_size, 1.0f);
  absl::StatusOr<ForwardOutput> output = absl::UnknownError("no answer");
  absl::Notification answered;
  (*client)->ForwardAsync(OneToken(hidden, gone.layer), {.timeout = absl::Seconds(60)},
                          [&](absl::StatusOr<ForwardOutput> answer) {
                            output = std::move(answer);
                            answered.Notify();
                          });
  // On the same port: --listen given again wins over the one that Start gives.
  const auto server = ServerUnderTest::Start(
      {.checkpoint = kCheckpoint, .args = {absl::StrCat("--listen=127.0.0.1:", port)}});
  ASSERT_NE(server, nullptr);
  answered.WaitForNotification();
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->num_tokens, 1);
}

}  // namespace
}  // namespace expertmesh
