#include "client/cli/bench_report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace expertmesh {
namespace {

std::string Rates(const BenchSummary& summary) {
  if (summary.num_ok == 0) return "nothing answered yet";
  const double seconds = summary.seconds > 0 ? summary.seconds : 1;
  return absl::StrFormat("%.0f calls/s  %.0f tokens/s  p50 %d  p95 %d  p99 %d us",
                         static_cast<double>(summary.num_ok) / seconds,
                         static_cast<double>(summary.num_tokens) / seconds, summary.p50_micros,
                         summary.p95_micros, summary.p99_micros);
}

std::string CountsByCode(const std::map<std::string, int64_t>& counts) {
  std::string text = counts.empty() ? "none" : "";
  for (const auto& [code, count] : counts) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", code, " ", count);
  }
  return text;
}

void PrintVerification(const BenchVerification& verification) {
  const int num_samples =
      verification.num_same + verification.num_different + verification.num_not_comparable;
  if (num_samples == 0) {
    puts("  verified      nothing: no answer was kept");
    return;
  }
  printf(
      "  verified      %d of %d answers have the bytes of the same request alone%s\n",
      verification.num_same, num_samples,
      verification.num_not_comparable > 0 ? " (the others were served by another placement)" : "");
  if (verification.num_right + verification.num_wrong > 0) {
    printf("                %d of %d agree with the checkpoint, max error %.2e\n",
           verification.num_right, verification.num_right + verification.num_wrong,
           verification.max_error);
  }
}

nlohmann::ordered_json VerificationJson(const absl::StatusOr<BenchVerification>& verification) {
  if (!verification.ok()) return nullptr;
  return {{"same_bytes", verification->num_same},
          {"different_bytes", verification->num_different},
          {"not_comparable", verification->num_not_comparable},
          {"agree_with_checkpoint", verification->num_right},
          {"disagree_with_checkpoint", verification->num_wrong}};
}

}  // namespace

BenchProgressLine::BenchProgressLine(absl::Duration timeout)
    : timeout_(timeout), is_terminal_(isatty(STDERR_FILENO) != 0) {}

void BenchProgressLine::Show(const BenchProgress& progress) {
  if (!is_terminal_) return Say(progress);
  const BenchSummary summary = progress.summarize();
  const std::string in_flight = absl::StrFormat("in flight %d", progress.num_in_flight);
  switch (progress.phase) {
    case BenchProgress::Phase::kWarmup:
      return Draw(absl::StrFormat("warming up %.1f s  %s  errors %d  %s",
                                  std::max(0.0, progress.seconds), Rates(summary),
                                  summary.num_errors(), in_flight));
    case BenchProgress::Phase::kMeasuring:
      return Draw(absl::StrFormat("measuring %.1f s  %s  errors %d  %s", progress.seconds,
                                  Rates(summary), summary.num_errors(), in_flight));
    case BenchProgress::Phase::kWaitingForCalls:
      return Draw(WhatItWaitsFor(progress));
  }
}

void BenchProgressLine::Say(const BenchProgress& progress) {
  if (!has_said_error_ && !progress.first_error.ok()) {
    has_said_error_ = true;
    fprintf(stderr, "  first error: %s: %s\n",
            absl::StatusCodeToString(progress.first_error.code()).c_str(),
            std::string(progress.first_error.message()).c_str());
  }
  if (!has_said_wait_ && progress.phase == BenchProgress::Phase::kWaitingForCalls) {
    has_said_wait_ = true;
    fprintf(stderr, "  %s\n", WhatItWaitsFor(progress).c_str());
  }
}

std::string BenchProgressLine::WhatItWaitsFor(const BenchProgress& progress) const {
  return absl::StrFormat(
      "time is over; waiting for %d calls in flight, the oldest for %.1f s (they end within "
      "--timeout=%s)",
      progress.num_in_flight, absl::ToDoubleSeconds(progress.longest_wait),
      absl::FormatDuration(timeout_));
}

void BenchProgressLine::Draw(const std::string& text) {
  if (!is_terminal_) return;
  fprintf(stderr, "\r\033[K  %s", text.c_str());
  fflush(stderr);
}

void BenchProgressLine::Erase() {
  if (is_terminal_) fputs("\r\033[K", stderr);
}

void PrintBenchText(const BenchReport& report) {
  const BenchResult& result = report.result;
  const BenchSummary& summary = result.summary;
  const double seconds = summary.seconds > 0 ? summary.seconds : 1;
  printf("  measured      %.1f s, %lld calls answered\n", summary.seconds,
         static_cast<long long>(summary.num_ok));
  if (summary.num_ok > 0) {
    printf("  throughput    %.1f calls/s, %.1f tokens/s\n",
           static_cast<double>(summary.num_ok) / seconds,
           static_cast<double>(summary.num_tokens) / seconds);
    printf(
        "  latency us    p50 %lld, p95 %lld, p99 %lld, max %lld (inside the server: mean %.0f)\n",
        static_cast<long long>(summary.p50_micros), static_cast<long long>(summary.p95_micros),
        static_cast<long long>(summary.p99_micros), static_cast<long long>(summary.max_micros),
        summary.mean_server_micros);
  }
  printf("  errors        %s\n", CountsByCode(summary.errors_by_code).c_str());
  for (const auto& [code, message] : summary.first_message_by_code) {
    printf("                first %s: %s\n", code.c_str(), message.c_str());
  }
  // A few at the end are a closed loop's nature.
  if (result.num_unfinished > summary.num_ok / 100 ||
      result.oldest_unfinished_micros > summary.max_micros ||
      !result.unfinished_errors_by_code.empty()) {
    printf(
        "  unfinished    %lld calls were in flight at the end and are in no figure above, the "
        "oldest waiting for %.1f s; errors among them: %s\n",
        static_cast<long long>(result.num_unfinished),
        static_cast<double>(result.oldest_unfinished_micros) * 1e-6,
        CountsByCode(result.unfinished_errors_by_code).c_str());
  }
  if (result.num_not_sent > 0) {
    printf(
        "  not sent      %lld calls: too many were in flight; the server is slower than the rate "
        "asked for\n",
        static_cast<long long>(result.num_not_sent));
  }
  if (report.verification.ok()) {
    PrintVerification(*report.verification);
  } else {
    printf("  verified      nothing: %s\n", absl::IsCancelled(report.verification.status())
                                                ? "interrupted"
                                                : "calls made for it failed");
  }
}

void PrintBenchJson(const BenchReport& report) {
  const BenchResult& result = report.result;
  const BenchSummary& summary = result.summary;
  const double seconds = summary.seconds > 0 ? summary.seconds : 1;
  const nlohmann::ordered_json latency = summary.num_ok == 0
                                             ? nlohmann::ordered_json(nullptr)
                                             : nlohmann::ordered_json{{"p50", summary.p50_micros},
                                                                      {"p95", summary.p95_micros},
                                                                      {"p99", summary.p99_micros},
                                                                      {"max", summary.max_micros}};
  const nlohmann::ordered_json json = {
      {"model", report.model},
      {"tokens_per_call", report.load.tokens_per_call},
      {"hidden_size", report.hidden_size},
      {"dtype", std::string(DTypeName(report.load.dtype))},
      {"skew", report.skew},
      {"concurrency", report.run.rate > 0 ? 0 : report.run.concurrency},
      {"rate", report.run.rate},
      {"seconds", summary.seconds},
      {"calls_ok", summary.num_ok},
      {"calls_per_second", static_cast<double>(summary.num_ok) / seconds},
      {"tokens_per_second", static_cast<double>(summary.num_tokens) / seconds},
      {"latency_micros", latency},
      {"mean_server_micros", summary.mean_server_micros},
      {"errors", summary.errors_by_code},
      {"first_messages", summary.first_message_by_code},
      {"calls_not_sent", result.num_not_sent},
      {"calls_unfinished", result.num_unfinished},
      {"oldest_unfinished_micros", result.oldest_unfinished_micros},
      {"errors_of_unfinished", result.unfinished_errors_by_code},
      {"verified", VerificationJson(report.verification)}};
  printf("%s\n", json.dump(2).c_str());
}

}  // namespace expertmesh
