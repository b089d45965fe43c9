#include "server/ops/logging.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"

namespace expertmesh {
namespace {

constexpr int64_t kTime = 1'795'971'845'000'042;  // 2026-11-29 17:04:05.000042 UTC

TEST(LoggingTest, TextLine) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, LogLevel::kWarning, "step is late",
                          {{"request_id", "r-1"}, {"micros", 17}, {"late", true}}, kTime),
            "2026-11-29 17:04:05.000042 W step is late request_id=r-1 micros=17 late=true");
}

TEST(LoggingTest, TextQuotesWhatWouldNotReadBack) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, LogLevel::kInfo, "m",
                          {{"a", ""}, {"b", "x y"}, {"c", "x\ny"}, {"d", "q\"q"}}, kTime),
            "2026-11-29 17:04:05.000042 I m a=\"\" b=\"x y\" c=\"x\\ny\" d=\"q\\\"q\"");
}

TEST(LoggingTest, AMessageStaysOneLine) {
  const std::string line =
      FormatLogLine(LogFormat::kText, LogLevel::kInfo, "two\nlines \x1b[31m", {}, kTime);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_EQ(line.find('\x1b'), std::string::npos);
}

TEST(LoggingTest, JsonLineParsesBack) {
  const std::string id = "r\"\\\n\xff";
  const std::string line = FormatLogLine(LogFormat::kJson, LogLevel::kError, "it \"broke\"",
                                         {{"request_id", id},
                                          {"view", std::string_view("v")},
                                          {"absl_view", absl::string_view("w")},
                                          {"bytes", int64_t{1} << 40},
                                          {"unsigned", ~uint64_t{0}},
                                          {"share", 0.5},
                                          {"ok", false},
                                          {"nan", std::numeric_limits<double>::quiet_NaN()}},
                                         kTime);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const nlohmann::json json = nlohmann::json::parse(line);
  EXPECT_EQ(json["time"], "2026-11-29T17:04:05.000042Z");
  EXPECT_EQ(json["level"], "error");
  EXPECT_EQ(json["message"], "it \"broke\"");
  EXPECT_EQ(json["request_id"], "r\"\\\n\xef\xbf\xbd");
  EXPECT_EQ(json["view"], "v");
  EXPECT_EQ(json["absl_view"], "w");
  EXPECT_EQ(json["bytes"], int64_t{1} << 40);
  EXPECT_EQ(json["unsigned"], ~uint64_t{0});
  EXPECT_EQ(json["share"], 0.5);
  EXPECT_EQ(json["ok"], false);
  EXPECT_TRUE(json["nan"].is_string());
}

TEST(LoggingTest, NamesOfLevelsAndFormats) {
  EXPECT_EQ(*ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(*ParseLogLevel("error"), LogLevel::kError);
  EXPECT_EQ(*ParseLogFormat("json"), LogFormat::kJson);
  EXPECT_EQ(ParseLogLevel("loud").status().message(),
            "log level 'loud' is not one of debug, info, warning, error");
  EXPECT_EQ(ParseLogFormat("xml").status().message(), "log format 'xml' is not one of text, json");
}

TEST(LoggingTest, LinesOfManyThreadsStayWhole) {
  InitLogging({LogLevel::kInfo, LogFormat::kJson});
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 100; ++i) {
        LogInfo("line", {{"thread", t}, {"i", i}});
        LogDebug("never written");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string text = testing::internal::GetCapturedStderr();
  InitLogging({});
  int num_lines = 0;
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    EXPECT_EQ(nlohmann::json::parse(text.substr(begin, end - begin))["message"], "line");
    begin = end + 1;
    ++num_lines;
  }
  EXPECT_EQ(num_lines, 400);
  EXPECT_FALSE(LogEnabled(LogLevel::kDebug));
}

}  // namespace
}  // namespace expertmesh
