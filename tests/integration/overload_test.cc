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
#include "tests/integration/process_usage.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/shared_request.h"
#include "tests/integration/sparse_checkpoint.h"

namespace expertmesh {
namespace {

constexpr int64_t kTokensPerCall = 16;
constexpr int kCallsAdmitted = 8;
constexpr absl::Duration kPhase = absl::Milliseconds(1500);
// Overload lasts until so many calls are sent and answered: many times what is admitted before the
// first answer, also where a sanitizer leaves the server two calls a second.
constexpr int kMinCallsSent = 100;
constexpr int kMinCallsAnswered = 2 * kCallsAdmitted;

struct Capacity {
  double calls_per_second = 0;
  absl::Duration cpu_per_call;  // of the server
};

// What `num_callers` get, each asking again when it is answered.
Capacity MeasureCapacity(ExpertClient* client, pid_t server, const SharedRequest& request,
                         int num_callers) {
  std::vector<std::thread> callers;
  std::vector<int> num_answered(num_callers, 0);
  const absl::Time start = absl::Now();
  const absl::Duration cpu_before = CpuTimeOf(server);
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
  return {sum / absl::ToDoubleSeconds(absl::Now() - start), (CpuTimeOf(server) - cpu_before) / sum};
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
  const pid_t pid = server->process().pid();
  const Capacity capacity = MeasureCapacity(client.get(), pid, request, 4);

  constexpr uint64_t kSeed = 7;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  std::exponential_distribution<double> gap(1);
  CallGroup calls;
  const absl::Time start = absl::Now();
  const absl::Time latest_end = start + absl::Minutes(1);
  const absl::Duration cpu_before = CpuTimeOf(pid);
  int num_sent = 0;
  std::mutex mutex;
  std::condition_variable arrivals;  // never notified: a clock
  std::unique_lock<std::mutex> lock(mutex);
  for (absl::Time due = start;
       absl::Now() < latest_end && (due < start + kPhase || num_sent < kMinCallsSent ||
                                    calls.num_answered() < kMinCallsAnswered);) {
    // The moments of arrival are the load itself; no state of the server is waited for here.
    arrivals.wait_until(lock, absl::ToChronoTime(due));
    calls.Start(client.get(), request.Input(), absl::Minutes(2));
    ++num_sent;
    // The machine may have more time for the server now than when its capacity was measured.
    const double rate = calls.num_answered() / absl::ToDoubleSeconds(absl::Now() - start);
    due += absl::Seconds(gap(random) / (10 * std::max(capacity.calls_per_second, rate)));
  }
  const std::vector<CallGroup::Ended> ended = calls.Wait();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const absl::Duration cpu = CpuTimeOf(pid) - cpu_before;

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
  // What it serves costs what it did before: refusals are cheap. By processor time, for what else
  // the machine does changes from one second to the next.
  const auto num_admitted = static_cast<int64_t>(admitted.size());
  EXPECT_LT(cpu / num_admitted, 4 * capacity.cpu_per_call);
  const double served = static_cast<double>(num_admitted) / seconds;
  EXPECT_GT(served, capacity.calls_per_second / 20);
  // By Little's law an admitted call takes kCallsAdmitted / served on average; without admission
  // the backlog would make it the whole phase. A pause of the machine strikes kCallsAdmitted calls.
  std::sort(admitted.begin(), admitted.end());
  const absl::Duration median = admitted[admitted.size() / 2];
  const absl::Duration mean = absl::Seconds(kCallsAdmitted / served);
  EXPECT_LE(median, 4 * mean + absl::Milliseconds(200));
  std::cerr << "capacity " << capacity.calls_per_second << "/s, sent " << num_sent / seconds
            << "/s, served " << served << "/s, median " << median << ", mean by Little " << mean
            << ", processor time of a call " << capacity.cpu_per_call << ", now "
            << cpu / num_admitted << "\n";
  EXPECT_TRUE(client->Forward(request.Input()).ok());
}

}  // namespace
}  // namespace expertmesh
