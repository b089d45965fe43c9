#include "client/cli/bench_run.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/base/steady_now.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kProgressInterval = absl::Milliseconds(500);
// Of a closed loop's slot, after an error.
constexpr absl::Duration kFirstPause = absl::Milliseconds(20);
constexpr absl::Duration kLongestPause = absl::Seconds(1);

// Sends requests and books their answers; shared by both loops, and with the calls in flight, which
// may outlive them when nobody waits for them any more.
class Runner : public std::enable_shared_from_this<Runner> {
 public:
  Runner(ExpertClient& client, const std::vector<std::unique_ptr<ForwardJob>>& load,
         const BenchRunOptions& options)
      : client_(client), load_(load), options_(options), pacer_([this] { SendWhatPaused(); }) {}
  // No call starts once this has returned, but for those that are in the middle of it. Must come
  // before the end of this object, and never on one of the client's threads.
  void StopPacer() {
    StopSending();
    pacer_.join();
  }

  // An open loop's call, at the moment when it is due.
  void SendOne(absl::Time due) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      if (static_cast<int>(in_flight_.size()) >= options_.max_in_flight) {
        if (measuring_) ++num_not_sent_;
        return;
      }
      in_flight_.insert(due);
    }
    Call(due, [this, due](bool) {
      const std::lock_guard<std::mutex> lock(mutex_);
      Ended(due);
    });
  }

  // Keeps one call in flight until StopSending; `num_errors`: that the ones before it ended with in
  // a row.
  void KeepSending(int num_errors = 0) {
    const absl::Time due = SteadyNow();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      in_flight_.insert(due);
    }
    KeepSendingFrom(due, num_errors);
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
    pause_changed_.notify_one();
  }
  bool is_stopping() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopping_;
  }

  // False: there still are some.
  bool WaitForCallsInFlight(absl::Duration timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return idle_.wait_for(lock, absl::ToChronoMilliseconds(timeout),
                          [this] { return in_flight_.empty(); });
  }

  int64_t in_flight() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(in_flight_.size());
  }
  // How long the oldest call in flight has waited.
  absl::Duration longest_wait() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_.empty() ? absl::ZeroDuration() : SteadyNow() - *in_flight_.begin();
  }
  int64_t num_not_sent() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_not_sent_;
  }
  BenchSummary Summarize() const { return record_.Summarize(); }
  absl::Status first_error() const { return record_.first_error(); }
  std::vector<BenchSample> TakeSamples() {
    const std::lock_guard<std::mutex> lock(mutex_);
    measuring_ = false;
    return std::move(samples_);
  }

 private:
  // `due` is in in_flight_.
  void KeepSendingFrom(absl::Time due, int num_errors) {
    Call(due, [this, due, num_errors](bool ok) {
      const absl::Time next = SteadyNow();
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        Ended(due);
        if (stopping_) return;
        if (!ok) {
          paused_.emplace(
              next + std::min(kFirstPause * (1 << std::min(num_errors, 10)), kLongestPause),
              num_errors + 1);
          pause_changed_.notify_one();
          return;
        }
        in_flight_.insert(next);
      }
      KeepSendingFrom(next, 0);
    });
  }

  template <typename Done>
  void Call(absl::Time due, Done done) {
    size_t request = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      request = next_request_++ % load_.size();
    }
    client_.ForwardAsync(load_[request]->input, options_.call,
                         [this, self = shared_from_this(), due, request,
                          done](absl::StatusOr<ForwardOutput> answer) {
                           const bool ok = answer.ok();
                           record_.Add(SteadyNow() - due, answer);
                           KeepSample(request, std::move(answer));
                           done(ok);
                         });
  }

  // Under mutex_.
  void Ended(absl::Time due) {
    in_flight_.erase(in_flight_.find(due));
    if (in_flight_.empty()) idle_.notify_all();
  }

  // The pacer's thread.
  void SendWhatPaused() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      if (paused_.empty()) {
        pause_changed_.wait(lock);
      } else if (const absl::Time next = paused_.begin()->first; next > SteadyNow()) {
        pause_changed_.wait_for(lock, absl::ToChronoNanoseconds(next - SteadyNow()));
      } else {
        const int num_errors = paused_.begin()->second;
        paused_.erase(paused_.begin());
        lock.unlock();
        KeepSending(num_errors);
        lock.lock();
      }
    }
  }

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
  const BenchRunOptions options_;
  BenchRecord record_;

  // std, for ThreadSanitizer does not see into Debian's build of absl::Mutex. Guards all below.
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::condition_variable pause_changed_;
  bool measuring_ = false;
  bool stopping_ = false;
  std::multiset<absl::Time> in_flight_;  // when they were due
  int64_t num_not_sent_ = 0;
  size_t next_request_ = 0;
  std::vector<BenchSample> samples_;
  std::multimap<absl::Time, int> paused_;  // when to go on, after how many errors in a row
  std::thread pacer_;                      // the last member: it uses the others
};

// Sends at Poisson moments until `end`; on a thread of its own, so that printing never delays a
// call.
void OpenLoop(Runner& runner, const BenchRunOptions& options, absl::Time end) {
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> gap(options.rate);
  for (absl::Time due = SteadyNow(); due < end; due += absl::Seconds(gap(random))) {
    // In short pieces, for a run that is ended early.
    while (SteadyNow() < due && !runner.is_stopping()) {
      absl::SleepFor(std::min(due - SteadyNow(), kProgressInterval));
    }
    if (runner.is_stopping()) return;
    runner.SendOne(due);
  }
}

}  // namespace

BenchResult RunBench(ExpertClient& client, const std::vector<std::unique_ptr<ForwardJob>>& load,
                     const BenchRunOptions& options,
                     absl::FunctionRef<void(const BenchProgress&)> progress,
                     absl::FunctionRef<bool(absl::Duration)> sleep) {
  using Phase = BenchProgress::Phase;
  const auto shared_runner = std::make_shared<Runner>(client, load, options);
  Runner& runner = *shared_runner;
  const auto report = [&](Phase phase, absl::Duration time) {
    progress({phase, absl::ToDoubleSeconds(time), [&] { return runner.Summarize(); },
              runner.first_error(), runner.in_flight(), runner.longest_wait()});
  };
  const absl::Time measure_from = SteadyNow() + options.warmup;
  const absl::Time end = measure_from + options.duration;
  std::thread open_loop;
  bool measuring = options.warmup <= absl::ZeroDuration();
  if (measuring) runner.StartMeasuring();
  if (options.rate > 0) {
    open_loop = std::thread([&] { OpenLoop(runner, options, end); });
  } else {
    for (int i = 0; i < options.concurrency; ++i) runner.KeepSending();
  }
  bool stop = false;
  while (!stop && SteadyNow() < end) {
    const absl::Time now = SteadyNow();
    if (!measuring && now >= measure_from) {
      runner.StartMeasuring();
      measuring = true;
    }
    stop = sleep(std::min(
        {kProgressInterval, end - now, measuring ? kProgressInterval : measure_from - now}));
    if (measuring) {
      report(Phase::kMeasuring, SteadyNow() - measure_from);
    } else {
      report(Phase::kWarmup, measure_from - SteadyNow());
    }
  }
  BenchResult result;
  // Summarized before the calls in flight end: they were part of the load, but what they add has no
  // second to stand in.
  runner.StopSending();
  const absl::Time stopped = SteadyNow();
  result.summary = runner.Summarize();
  result.num_not_sent = runner.num_not_sent();
  result.num_unfinished = runner.in_flight();
  result.oldest_unfinished_micros = absl::ToInt64Microseconds(runner.longest_wait());
  if (open_loop.joinable()) open_loop.join();
  while (!result.interrupted && !runner.WaitForCallsInFlight(kProgressInterval)) {
    report(Phase::kWaitingForCalls, SteadyNow() - stopped);
    result.interrupted = sleep(absl::ZeroDuration());
  }
  runner.StopPacer();
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
