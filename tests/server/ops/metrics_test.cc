#include "server/ops/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/ops/server_metrics.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  timeval limit{.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request =
        absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    char chunk[4096];
    for (ssize_t n = read(fd, chunk, sizeof(chunk)); n > 0; n = read(fd, chunk, sizeof(chunk))) {
      answer.append(chunk, static_cast<size_t>(n));
    }
  }
  close(fd);
  return answer;
}

TEST(MetricsTest, CountsFromManyThreadsAddUp) {
  MetricsRegistry registry;
  const Counter counter = registry.AddCounter("c_total", "help", {{"a", "x"}});
  const Gauge gauge = registry.AddGauge("g", "help", {});
  const Histogram histogram = registry.AddHistogram("h", "help", {}, {1, 10});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        counter.Increment(2);
        gauge.Add(1);
        gauge.Add(-1);
        histogram.Observe(5);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter.value(), 8000);
  EXPECT_EQ(gauge.value(), 0);
  const std::string text = registry.Serialize();
  EXPECT_THAT(text, HasSubstr("c_total{a=\"x\"} 8000"));
  EXPECT_THAT(text, HasSubstr("h_count 4000"));
  EXPECT_THAT(text, HasSubstr("h_sum 20000"));
  EXPECT_THAT(text, HasSubstr("h_bucket{le=\"1\"} 0"));
  EXPECT_THAT(text, HasSubstr("h_bucket{le=\"10\"} 4000"));
}

TEST(MetricsTest, TheSameNameAndLabelsAreTheSameSeries) {
  MetricsRegistry registry;
  registry.AddCounter("c_total", "help", {{"a", "x"}}).Increment();
  registry.AddCounter("c_total", "help", {{"a", "x"}}).Increment();
  registry.AddCounter("c_total", "help", {{"a", "y"}}).Increment();
  EXPECT_EQ(registry.AddCounter("c_total", "help", {{"a", "x"}}).value(), 2);
}

TEST(MetricsTest, HandlesWithoutASeriesIgnoreEverything) {
  Counter().Increment();
  Gauge().Set(1);
  Histogram().Observe(1);
  ServerMetrics().CountCall(CallMethod::kForward, absl::StatusCode::kOk, 1);
  EXPECT_EQ(Counter().value(), 0);
}

TEST(MetricsTest, RefreshesBeforeEveryRead) {
  MetricsRegistry registry;
  const Gauge gauge = registry.AddGauge("g", "help", {});
  int num_reads = 0;
  registry.SetRefresh([&] { gauge.Set(++num_reads); });
  EXPECT_THAT(registry.Serialize(), HasSubstr("g 1"));
  auto exposer = MetricsExposer::Start(&registry, "127.0.0.1:0");
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  EXPECT_THAT(HttpGet((*exposer)->port(), "/metrics"), HasSubstr("g 2"));
  registry.SetRefresh(nullptr);
  EXPECT_THAT(registry.Serialize(), HasSubstr("g 2"));
}

TEST(MetricsTest, CollectedFamiliesAreThoseOfTheMoment) {
  MetricsRegistry registry;
  registry.AddCounter("c_total", "help", {}).Increment(7);
  double value = 1;
  registry.SetCollector([&value] {
    return std::vector<MetricFamily>{
        {"g", "a gauge", MetricFamily::Kind::kGauge, {{{{"a", "x"}}, value}}},
        {"d_total", "a counter", MetricFamily::Kind::kCounter, {{{}, 2 * value}}}};
  });
  std::string text = registry.Serialize();
  EXPECT_THAT(text, HasSubstr("c_total 7"));
  EXPECT_THAT(text, HasSubstr("# HELP g a gauge\n# TYPE g gauge\ng{a=\"x\"} 1"));
  EXPECT_THAT(text, HasSubstr("# TYPE d_total counter\nd_total 2"));
  value = 3;
  EXPECT_THAT(registry.Serialize(), HasSubstr("d_total 6"));
  registry.SetCollector(nullptr);
  text = registry.Serialize();
  EXPECT_THAT(text, Not(HasSubstr("d_total")));
  EXPECT_THAT(text, HasSubstr("c_total 7"));
}

TEST(MetricsTest, ExponentialBounds) {
  EXPECT_THAT(ExponentialBounds(1, 2, 4), testing::ElementsAre(1, 2, 4, 8));
}

TEST(MetricsTest, ServesOnAPortOfTheKernelsChoice) {
  MetricsRegistry registry;
  registry.AddCounter("c_total", "help", {}).Increment(7);
  auto exposer = MetricsExposer::Start(&registry, "127.0.0.1:0");
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  ASSERT_GT((*exposer)->port(), 0);
  const std::string answer = HttpGet((*exposer)->port(), "/metrics");
  EXPECT_THAT(answer, HasSubstr("200 OK"));
  EXPECT_THAT(answer, HasSubstr("c_total 7"));
  EXPECT_THAT(HttpGet((*exposer)->port(), "/etc/passwd"), Not(HasSubstr("root")));
  // Of whatever stands behind it.
  EXPECT_THAT(HttpGet((*exposer)->port(), "/metrics"), Not(HasSubstr("exposer_")));
  EXPECT_THAT(HttpGet((*exposer)->port(), "/metrics"), Not(HasSubstr("Nan")));
}

TEST(MetricsTest, ATakenPortIsAnError) {
  MetricsRegistry registry;
  auto first = MetricsExposer::Start(&registry, "127.0.0.1:0");
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = absl::StrCat("127.0.0.1:", (*first)->port());
  auto second = MetricsExposer::Start(&registry, address);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(address));
  EXPECT_FALSE(MetricsExposer::Start(&registry, "nonsense").ok());
}

TEST(ServerMetricsTest, CallsByMethodAndCode) {
  MetricsRegistry registry;
  const ServerMetrics metrics(&registry);
  metrics.CountCall(CallMethod::kForward, absl::StatusCode::kOk, 0.001);
  metrics.CountCall(CallMethod::kForward, absl::StatusCode::kInvalidArgument, 0.001);
  metrics.CountCall(CallMethod::kForward, absl::StatusCode::kInvalidArgument, 0.001);
  metrics.CountCall(CallMethod::kExplain, absl::StatusCode::kOk, 0.001);
  metrics.ObserveStage(StepStage::kCompute, 1500);
  EXPECT_EQ(metrics.num_ok(CallMethod::kForward), 1u);
  EXPECT_EQ(metrics.num_failed(CallMethod::kForward), 2u);
  EXPECT_EQ(metrics.num_failed(CallMethod::kExplain), 0u);
  const std::string text = registry.Serialize();
  EXPECT_THAT(text, HasSubstr("expertmesh_calls_total{code=\"OK\",method=\"Forward\"} 1"));
  EXPECT_THAT(text,
              HasSubstr("expertmesh_calls_total{code=\"INVALID_ARGUMENT\",method=\"Forward\"} 2"));
  EXPECT_THAT(text, HasSubstr("expertmesh_calls_total{code=\"OK\",method=\"Explain\"} 1"));
  EXPECT_THAT(text, HasSubstr("expertmesh_calls_total{code=\"OK\",method=\"GetModel\"} 0"));
  EXPECT_THAT(text, HasSubstr("expertmesh_call_seconds_count{method=\"Forward\"} 3"));
  EXPECT_THAT(text, HasSubstr("expertmesh_step_stage_seconds_sum{stage=\"compute\"} 0.0015"));
}

}  // namespace
}  // namespace expertmesh
