// Ten times as many calls as a server can serve.

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client_error.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/shared_request.h"
#include "tests/integration/sparse_checkpoint.h"

namespace expertmesh {
namespace {

constexpr int64_t kTokensPerCall = 16;
constexpr int kCallsAdmitted = 8;
constexpr absl::Duration kPhase = absl::Milliseconds(1500);
// Under overload at least so many calls are sent: many times what is admitted before the first
// answer, also where a sanitizer leaves the server two calls a second.
constexpr int kMinCallsSent = 100;

// Calls a second that `num_callers` get answered, each asking again when it is answered.
double MeasureCapacity(ExpertClient* client, const SharedRequest& request, int num_callers) {
  std::vector<std::thread> callers;
  std::vector<int> num_answered(num_callers, 0);
  const absl::Time start = absl::Now();
  for (int i = 0; i < num_callers; ++i) {
    callers.emplace_back([&, i] {
      while (absl::Now() < start + kPhase) {
        const auto answer = client->Forward(request.Input());
        EXPECT_TRUE(answer.ok()) << answer.status();
        ++num_answered[i];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  int sum = 0;
  for (const int count : num_answered) sum += count;
  return sum / absl::ToDoubleSeconds(absl::Now() - start);
}

TEST(OverloadTest, TenTimesTheCapacityIsRefusedWithAdviceAndTheRestIsServedInTime) {
  const SparseCheckpoint checkpoint(
      {.hidden_size = 512, .intermediate_size = 8192, .num_experts = 4});
  // A step takes one call, so that capacity is a fact and no matter of merging.
  const auto server = ServerUnderTest::Start(
      {.checkpoint = checkpoint.path(),
       .args = {"--model_name=slow", "--threads=1",
                absl::StrCat("--max_step_tokens=", kTokensPerCall),
                absl::StrCat("--max_inflight_tokens=", kCallsAdmitted * kTokensPerCall)}});
  ASSERT_NE(server, nullptr);
  const SharedRequest request({"slow", 0, 1, 512, 4}, kTokensPerCall, 4);
  const auto client = SeparateClient(server->address());
  ASSERT_TRUE(client->Forward(request.Input()).ok());
  const double capacity = MeasureCapacity(client.get(), request, 4);

  constexpr uint64_t kSeed = 7;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  std::exponential_distribution<double> gap(10 * capacity);
  CallGroup calls;
  const absl::Time start = absl::Now();
  const absl::Duration phase = std::max(kPhase, absl::Seconds(kMinCallsSent / (10 * capacity)));
  int num_sent = 0;
  std::mutex mutex;
  std::condition_variable arrivals;  // never notified: a clock
  std::unique_lock<std::mutex> lock(mutex);
  for (absl::Time due = start; due < start + phase; due += absl::Seconds(gap(random))) {
    // The moments of arrival are the load itself; no state of the server is waited for here.
    arrivals.wait_until(lock, absl::ToChronoTime(due));
    calls.Start(client.get(), request.Input(), absl::Seconds(60));
    ++num_sent;
  }
  const std::vector<CallGroup::Ended> ended = calls.Wait();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);

  std::vector<absl::Duration> admitted;
  for (const CallGroup::Ended& call : ended) {
    if (call.status.ok()) {
      admitted.push_back(call.latency);
      continue;
    }
    ASSERT_TRUE(absl::IsResourceExhausted(call.status)) << call.status;
    const auto details = GetServerErrorDetails(call.status);
    ASSERT_TRUE(details.has_value()) << call.status;
    ASSERT_EQ(details->reason, "QUEUE_FULL");
    ASSERT_TRUE(details->retry_after.has_value());
    ASSERT_GT(*details->retry_after, absl::ZeroDuration());
    ASSERT_LE(*details->retry_after, absl::Seconds(5));
  }
  ASSERT_FALSE(admitted.empty());
  EXPECT_GT(ended.size(), 2 * admitted.size());
  // What it serves it serves as fast as before.
  const double served = static_cast<double>(admitted.size()) / seconds;
  EXPECT_GT(served, capacity / 4);
  // By Little's law an admitted call takes kCallsAdmitted / served on average; without admission
  // the backlog would make it seconds.
  std::sort(admitted.begin(), admitted.end());
  const absl::Duration p99 = admitted[admitted.size() * 99 / 100];
  const absl::Duration mean = absl::Seconds(kCallsAdmitted / served);
  EXPECT_LE(p99, 4 * mean + absl::Milliseconds(200));
  std::cerr << "capacity " << capacity << "/s, sent " << num_sent / seconds << "/s, served "
            << served << "/s, p99 " << p99 << ", mean by Little " << mean << "\n";
  EXPECT_TRUE(client->Forward(request.Input()).ok());
}

}  // namespace
}  // namespace expertmesh
