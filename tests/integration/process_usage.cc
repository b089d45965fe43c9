#include "tests/integration/process_usage.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <ostream>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "kernels/base/steady_now.h"

namespace expertmesh {
namespace {

// "VmRSS:	  123 kB"
void ReadLine(absl::string_view line, absl::string_view name, int64_t unit, int64_t* value) {
  if (!absl::ConsumePrefix(&line, absl::StrCat(name, ":"))) return;
  absl::ConsumeSuffix(&line, " kB");
  if (absl::SimpleAtoi(line, value)) *value *= unit;
}

}  // namespace

ProcessUsage UsageOf(pid_t pid) {
  ProcessUsage usage;
  const std::string folder = absl::StrCat("/proc/", pid);
  std::ifstream file(folder + "/status");
  for (std::string line; std::getline(file, line);) {
    ReadLine(line, "VmRSS", 1024, &usage.resident_bytes);
    ReadLine(line, "VmHWM", 1024, &usage.max_resident_bytes);
    ReadLine(line, "Threads", 1, &usage.num_threads);
  }
  std::error_code error;
  const std::filesystem::directory_iterator fds(folder + "/fd", error);
  if (!error) usage.num_fds = std::distance(begin(fds), end(fds));
  return usage;
}

absl::Duration CpuTimeOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  // The name, the second field, may hold anything. utime and stime are the 14th and the 15th.
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string skipped;
  for (int i = 3; i < 14; ++i) fields >> skipped;
  int64_t user = 0, system = 0;
  fields >> user >> system;
  return absl::Seconds(user + system) / sysconf(_SC_CLK_TCK);
}

bool IsStopped(pid_t pid) {
  std::error_code error;
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), error)) {
    std::ifstream file(task.path() / "status");
    std::string line;
    while (std::getline(file, line) && !absl::StartsWith(line, "State:")) {
    }
    if (!absl::StrContains(line, "T (stopped)")) return false;
  }
  return !error;
}

bool WaitUntilStopped(pid_t pid) {
  const absl::Time deadline = SteadyNow() + absl::Minutes(1);
  while (!IsStopped(pid)) {
    if (SteadyNow() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

std::ostream& operator<<(std::ostream& out, const ProcessUsage& usage) {
  return out << usage.resident_bytes / (1 << 20) << " MiB resident (at most "
             << usage.max_resident_bytes / (1 << 20) << "), " << usage.num_threads << " threads, "
             << usage.num_fds << " file descriptors";
}

}  // namespace expertmesh
