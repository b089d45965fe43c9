#include "client/cli/bench_run.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "absl/time/clock.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kProgressInterval = absl::Milliseconds(500);

// Sends requests and books their answers; shared by both loops.
class Runner {
 public:
  Runner(ExpertClient& client, const std::vector<std::unique_ptr<ForwardJob>>& load,
         const BenchRunOptions& options)
      : client_(client), load_(load), options_(options) {}

  // `due`: when the call should have started. A closed loop goes on by itself until Stop; `after`
  // is the call that this one follows.
  void Send(absl::Time due, bool closed_loop, std::optional<absl::Time> after = std::nullopt) {
    size_t request = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (after.has_value()) in_flight_.erase(in_flight_.find(*after));
      if (stopping_) {
        if (in_flight_.empty()) idle_.notify_all();
        return;
      }
      if (!closed_loop && static_cast<int>(in_flight_.size()) >= options_.max_in_flight) {
        if (measuring_) ++num_not_sent_;
        return;
      }
      in_flight_.insert(due);
      request = next_request_++ % load_.size();
    }
    client_.ForwardAsync(load_[request]->input, options_.call,
                         [this, due, request, closed_loop](absl::StatusOr<ForwardOutput> answer) {
                           record_.Add(absl::Now() - due, answer);
                           KeepSample(request, std::move(answer));
                           if (closed_loop) return Send(absl::Now(), true, due);
                           const std::lock_guard<std::mutex> lock(mutex_);
                           in_flight_.erase(in_flight_.find(due));
                           if (in_flight_.empty()) idle_.notify_all();
                         });
  }

  void StartMeasuring() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      measuring_ = true;
    }
    record_.Restart();
  }

  void StopSending() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }

  void WaitForCallsInFlight() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return in_flight_.empty(); });
  }

  int64_t in_flight() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(in_flight_.size());
  }
  // How long the oldest call in flight has waited.
  absl::Duration longest_wait() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_.empty() ? absl::ZeroDuration() : absl::Now() - *in_flight_.begin();
  }
  int64_t num_not_sent() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_not_sent_;
  }
  BenchSummary Summarize() const { return record_.Summarize(); }
  std::vector<BenchSample> TakeSamples() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::move(samples_);
  }

 private:
  // The first answer to each of the first requests.
  void KeepSample(size_t request, absl::StatusOr<ForwardOutput> answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!measuring_ || !answer.ok() ||
        request >= static_cast<size_t>(std::max(0, options_.num_samples)))
      return;
    const bool known =
        std::any_of(samples_.begin(), samples_.end(),
                    [&](const BenchSample& sample) { return sample.request == request; });
    if (!known) samples_.push_back({request, *std::move(answer)});
  }

  ExpertClient& client_;
  const std::vector<std::unique_ptr<ForwardJob>>& load_;
  const BenchRunOptions& options_;
  BenchRecord record_;

  // std, for ThreadSanitizer does not see into Debian's build of absl::Mutex. Guards all below.
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  bool measuring_ = false;
  bool stopping_ = false;
  std::multiset<absl::Time> in_flight_;  // when they were due
  int64_t num_not_sent_ = 0;
  size_t next_request_ = 0;
  std::vector<BenchSample> samples_;
};

// Sends at Poisson moments until `end`; on a thread of its own, so that printing never delays a
// call.
void OpenLoop(Runner& runner, const BenchRunOptions& options, absl::Time end) {
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> gap(options.rate);
  for (absl::Time due = absl::Now(); due < end; due += absl::Seconds(gap(random))) {
    absl::SleepFor(due - absl::Now());
    runner.Send(due, /*closed_loop=*/false);
  }
}

}  // namespace

BenchResult RunBench(ExpertClient& client, const std::vector<std::unique_ptr<ForwardJob>>& load,
                     const BenchRunOptions& options,
                     absl::FunctionRef<void(double, const BenchSummary&, int64_t)> progress) {
  Runner runner(client, load, options);
  const absl::Time measure_from = absl::Now() + options.warmup;
  const absl::Time end = measure_from + options.duration;
  std::thread open_loop;
  bool measuring = options.warmup <= absl::ZeroDuration();
  if (measuring) runner.StartMeasuring();
  if (options.rate > 0) {
    open_loop = std::thread([&] { OpenLoop(runner, options, end); });
  } else {
    for (int i = 0; i < options.concurrency; ++i) runner.Send(absl::Now(), /*closed_loop=*/true);
  }
  while (absl::Now() < end) {
    const absl::Time now = absl::Now();
    if (!measuring && now >= measure_from) {
      runner.StartMeasuring();
      measuring = true;
    }
    absl::SleepFor(std::min(
        {kProgressInterval, end - now, measuring ? kProgressInterval : measure_from - now}));
    progress(absl::ToDoubleSeconds(absl::Now() - measure_from), runner.Summarize(),
             runner.in_flight());
  }
  BenchResult result;
  // Summarized before the calls in flight end: they were part of the load, but what they add has no
  // second to stand in.
  runner.StopSending();
  result.summary = runner.Summarize();
  result.num_not_sent = runner.num_not_sent();
  result.num_unfinished = runner.in_flight();
  result.oldest_unfinished_micros = absl::ToInt64Microseconds(runner.longest_wait());
  if (open_loop.joinable()) open_loop.join();
  runner.WaitForCallsInFlight();
  result.unfinished_errors_by_code = runner.Summarize().errors_by_code;
  for (const auto& [code, count] : result.summary.errors_by_code) {
    int64_t& later = result.unfinished_errors_by_code[code];
    later -= count;
    if (later == 0) result.unfinished_errors_by_code.erase(code);
  }
  result.samples = runner.TakeSamples();
  return result;
}

}  // namespace expertmesh
