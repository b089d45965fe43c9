#ifndef EXPERTMESH_TESTS_INTEGRATION_PROCESS_H_
#define EXPERTMESH_TESTS_INTEGRATION_PROCESS_H_

#include <sys/types.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertmesh {

// Path of a program that the build put beside the running test's own executable.
std::string SiblingBinary(std::string_view name);

// A real program under test. It never outlives this object, nor the test's process if that dies.
// When the current GoogleTest test has failed, the destructor prints the end of the program's
// output. Thread-safe, except that the destructor must come last.
class ServerProcess {
 public:
  struct Options {
    std::string path;
    std::vector<std::string> args;         // without the program's own name
    std::vector<std::string> environment;  // "NAME=value", on top of the test's own environment
  };

  // Starts the program; its standard input is /dev/null. INTERNAL if it could not be executed.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(Options options);

  // SIGKILL if it still runs; waits for its end.
  ~ServerProcess();

  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  pid_t pid() const { return pid_; }

  // Blocks until a whole line of standard output or standard error, from the start on, contains a
  // match of the ECMAScript regular expression `pattern`; returns the match and its groups, [0]
  // being the whole match. DEADLINE_EXCEEDED after `timeout`; FAILED_PRECONDITION as soon as the
  // program has ended without such a line. Both messages carry the end of the output.
  absl::StatusOr<std::vector<std::string>> WaitForLine(const std::string& pattern,
                                                       absl::Duration timeout);

  // FAILED_PRECONDITION if the program has already ended.
  absl::Status Signal(int signal_number);
  absl::Status Terminate();  // SIGTERM
  absl::Status Kill();       // SIGKILL

  // Blocks until the program has ended. Its exit code, or minus the number of the signal that ended
  // it; DEADLINE_EXCEEDED after `timeout`, with the program left running.
  absl::StatusOr<int> Wait(absl::Duration timeout);

  // What has been captured so far.
  std::string Stdout() const;
  std::string Stderr() const;

 private:
  struct Output {
    int fd = -1;
    std::string text;
  };

  explicit ServerProcess(Options options) : options_(std::move(options)) {}

  void Run();
  pid_t Spawn(int error_fd);
  void CaptureUntilExit(int pid_fd);
  bool ReadAvailable(Output* output);
  void Reap();
  std::string DescribeLocked() const;

  const Options options_;
  // Starts the program, reads its output and reaps it: the kernel ends a child with
  // PR_SET_PDEATHSIG when the *thread* that made it ends, so that thread must live as long as the
  // child.
  std::thread keeper_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false;
  absl::Status start_status_;
  pid_t pid_ = -1;
  std::optional<int> exit_;
  Output stdout_;
  Output stderr_;
};

// What a program that ends by itself left behind.
struct FinishedProcess {
  int exit_code = -1;
  std::string out;
  std::string err;
};

// Runs a program to its end; fails the current test when that takes longer than `timeout`.
FinishedProcess RunToEnd(ServerProcess::Options options,
                         absl::Duration timeout = absl::Seconds(120));

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_PROCESS_H_
