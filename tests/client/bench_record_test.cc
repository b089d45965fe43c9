#include "client/cli/bench_record.h"

#include <gtest/gtest.h>

namespace expertmesh {
namespace {

TEST(BenchRecordTest, ErrorsAreCountedByCodeAndDoNotCountAsAnswers) {
  BenchRecord record;
  ForwardOutput output;
  output.num_tokens = 5;
  output.response.mutable_timings()->set_total_micros(40);
  record.Add(absl::Microseconds(100), output);
  record.Add(absl::Microseconds(300), output);
  record.Add(absl::Seconds(9), absl::UnavailableError(""));
  record.Add(absl::Seconds(9), absl::UnavailableError(""));
  record.Add(absl::Seconds(9), absl::DeadlineExceededError(""));
  const BenchSummary summary = record.Summarize();
  EXPECT_EQ(summary.num_ok, 2);
  EXPECT_EQ(summary.num_tokens, 10);
  EXPECT_EQ(summary.num_errors(), 3);
  EXPECT_EQ(summary.errors_by_code.at("UNAVAILABLE"), 2);
  EXPECT_EQ(summary.errors_by_code.at("DEADLINE_EXCEEDED"), 1);
  EXPECT_EQ(summary.p50_micros, 100);
  EXPECT_EQ(summary.max_micros, 300);
  EXPECT_EQ(summary.mean_server_micros, 40);
  record.Restart();
  EXPECT_EQ(record.Summarize().num_ok, 0);
  EXPECT_EQ(record.Summarize().num_errors(), 0);
}

}  // namespace
}  // namespace expertmesh
