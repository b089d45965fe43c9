#include "client/cli/bench_record.h"

namespace expertmesh {

int64_t BenchSummary::num_errors() const {
  int64_t sum = 0;
  for (const auto& [code, count] : errors_by_code) sum += count;
  return sum;
}

void BenchRecord::Add(absl::Duration latency, const absl::StatusOr<ForwardOutput>& answer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!answer.ok()) {
    const std::string code = absl::StatusCodeToString(answer.status().code());
    ++errors_by_code_[code];
    first_message_by_code_.emplace(code, answer.status().message());
    if (first_error_.ok()) first_error_ = answer.status();
    return;
  }
  latencies_micros_.Add(absl::ToInt64Microseconds(latency));
  num_tokens_ += answer->num_tokens;
  server_micros_ += answer->response.timings().total_micros();
}

void BenchRecord::Restart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  start_ = SteadyNow();
  latencies_micros_.Clear();
  num_tokens_ = server_micros_ = 0;
  errors_by_code_.clear();
  first_message_by_code_.clear();
  first_error_ = absl::OkStatus();
}

absl::Status BenchRecord::first_error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return first_error_;
}

BenchSummary BenchRecord::Summarize() const {
  BenchSummary summary;
  LatencyHistogram latencies;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    summary.seconds = absl::ToDoubleSeconds(SteadyNow() - start_);
    summary.num_tokens = num_tokens_;
    summary.errors_by_code = errors_by_code_;
    summary.first_message_by_code = first_message_by_code_;
    summary.first_error = first_error_;
    summary.mean_server_micros = static_cast<double>(server_micros_);
    latencies = latencies_micros_;
  }
  summary.num_ok = latencies.count();
  if (summary.num_ok == 0) return summary;
  summary.mean_server_micros /= static_cast<double>(summary.num_ok);
  summary.p50_micros = latencies.Percentile(0.50);
  summary.p95_micros = latencies.Percentile(0.95);
  summary.p99_micros = latencies.Percentile(0.99);
  summary.max_micros = latencies.max();
  return summary;
}

}  // namespace expertmesh
