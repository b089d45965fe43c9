#include "tests/integration/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <regex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

constexpr size_t kMaxDescribedBytes = 4000;

std::string Tail(const std::string& text) {
  return text.substr(text.size() > kMaxDescribedBytes ? text.size() - kMaxDescribedBytes : 0);
}

std::chrono::steady_clock::time_point Deadline(absl::Duration timeout) {
  // An infinite one would overflow the clock.
  return std::chrono::steady_clock::now() +
         absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24)));
}

std::optional<std::vector<std::string>> MatchLine(const std::string& text,
                                                  const std::regex& pattern) {
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    std::smatch match;
    if (std::regex_search(text.begin() + begin, text.begin() + end, match, pattern)) {
      return std::vector<std::string>(match.begin(), match.end());
    }
  }
  return std::nullopt;
}

}  // namespace

std::string SiblingBinary(std::string_view name) {
  return std::filesystem::read_symlink("/proc/self/exe").replace_filename(name).string();
}

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(Options options) {
  std::unique_ptr<ServerProcess> process(new ServerProcess(std::move(options)));
  process->keeper_ = std::thread([raw = process.get()] { raw->Run(); });
  std::unique_lock<std::mutex> lock(process->mutex_);
  process->changed_.wait(lock, [&] { return process->started_; });
  absl::Status status = process->start_status_;
  lock.unlock();
  if (!status.ok()) return status;
  return process;
}

ServerProcess::~ServerProcess() {
  Kill().IgnoreError();
  if (keeper_.joinable()) keeper_.join();
  if (testing::Test::HasFailure()) {
    std::fprintf(stderr, "%s\n", DescribeLocked().c_str());
  }
}

void ServerProcess::Run() {
  int error_pipe[2];  // carries errno of a failed execve; closed by one that succeeds
  int out_pipe[2];
  int err_pipe[2];
  if (pipe2(error_pipe, O_CLOEXEC) != 0 || pipe2(out_pipe, O_CLOEXEC) != 0 ||
      pipe2(err_pipe, O_CLOEXEC) != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    start_status_ = absl::InternalError(absl::StrCat("pipe2: ", strerror(errno)));
    started_ = true;
    changed_.notify_all();
    return;
  }
  stdout_.fd = out_pipe[1];
  stderr_.fd = err_pipe[1];
  const pid_t pid = Spawn(error_pipe[1]);
  const int spawn_errno = errno;
  close(error_pipe[1]);
  close(out_pipe[1]);
  close(err_pipe[1]);
  stdout_.fd = out_pipe[0];
  stderr_.fd = err_pipe[0];
  fcntl(stdout_.fd, F_SETFL, O_NONBLOCK);
  fcntl(stderr_.fd, F_SETFL, O_NONBLOCK);

  int exec_errno = pid < 0 ? spawn_errno : 0;
  if (pid > 0) {
    int from_child = 0;
    if (read(error_pipe[0], &from_child, sizeof(from_child)) == sizeof(from_child)) {
      exec_errno = from_child;
    }
  }
  close(error_pipe[0]);

  // Before anyone can learn the pid, so that the process cannot have been reaped.
  const int pid_fd = pid > 0 ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pid_ = pid;
    if (exec_errno != 0) {
      start_status_ = absl::InternalError(
          absl::StrCat("cannot run ", options_.path, ": ", strerror(exec_errno)));
    } else if (pid_fd < 0) {
      start_status_ = absl::InternalError(absl::StrCat("pidfd_open: ", strerror(errno)));
      kill(pid, SIGKILL);
    }
    started_ = true;
  }
  changed_.notify_all();

  if (pid_fd >= 0) CaptureUntilExit(pid_fd);
  if (pid > 0) Reap();
  if (pid_fd >= 0) close(pid_fd);
  close(stdout_.fd);
  close(stderr_.fd);
}

pid_t ServerProcess::Spawn(int error_fd) {
  std::vector<char*> argv{const_cast<char*>(options_.path.c_str())};
  for (const std::string& arg : options_.args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  std::vector<char*> envp;
  for (const std::string& entry : options_.environment) {
    envp.push_back(const_cast<char*>(entry.c_str()));
  }
  for (char** inherited = environ; *inherited != nullptr; ++inherited) {
    const bool replaced = std::any_of(
        options_.environment.begin(), options_.environment.end(), [&](const std::string& entry) {
          return strncmp(*inherited, entry.c_str(), entry.find('=') + 1) == 0;
        });
    if (!replaced) envp.push_back(*inherited);
  }
  envp.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;

  // Only async-signal-safe calls from here: other threads of the parent may have held any lock.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // the parent died before prctl
  const int null_fd = open("/dev/null", O_RDONLY);
  dup2(null_fd, STDIN_FILENO);
  dup2(stdout_.fd, STDOUT_FILENO);
  dup2(stderr_.fd, STDERR_FILENO);
  signal(SIGPIPE, SIG_DFL);
  execve(argv[0], argv.data(), envp.data());
  const int exec_errno = errno;
  if (write(error_fd, &exec_errno, sizeof(exec_errno)) < 0) _exit(126);
  _exit(127);
}

void ServerProcess::CaptureUntilExit(int pid_fd) {
  pollfd fds[3] = {{pid_fd, POLLIN, 0}, {stdout_.fd, POLLIN, 0}, {stderr_.fd, POLLIN, 0}};
  while (true) {
    if (poll(fds, 3, -1) < 0 && errno != EINTR) break;
    const bool ended = (fds[0].revents & POLLIN) != 0;
    if (!ReadAvailable(&stdout_)) fds[1].fd = -1;
    if (!ReadAvailable(&stderr_)) fds[2].fd = -1;
    if (ended) break;
  }
}

// False once the pipe's other end is closed.
bool ServerProcess::ReadAvailable(Output* output) {
  char block[4096];
  while (true) {
    const ssize_t size = read(output->fd, block, sizeof(block));
    if (size == 0) return false;
    if (size < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      output->text.append(block, static_cast<size_t>(size));
    }
    changed_.notify_all();
  }
}

void ServerProcess::Reap() {
  // Wait for the end without reaping, then reap under the lock: Signal() holds it while it uses the
  // pid, which the kernel may give to a stranger afterwards.
  siginfo_t info;
  while (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
  std::lock_guard<std::mutex> lock(mutex_);
  int status = 0;
  waitpid(pid_, &status, 0);
  exit_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  changed_.notify_all();
}

absl::StatusOr<std::vector<std::string>> ServerProcess::WaitForLine(const std::string& pattern,
                                                                    absl::Duration timeout) {
  const std::regex regex(pattern);
  const auto deadline = Deadline(timeout);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const bool ended = exit_.has_value();
    for (const Output* output : {&stdout_, &stderr_}) {
      if (auto match = MatchLine(output->text, regex)) return *std::move(match);
    }
    if (ended) {
      return absl::FailedPreconditionError(
          absl::StrCat("ended before a line matched '", pattern, "'\n", DescribeLocked()));
    }
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
      return absl::DeadlineExceededError(absl::StrCat("no line matched '", pattern, "' in ",
                                                      absl::FormatDuration(timeout), "\n",
                                                      DescribeLocked()));
    }
  }
}

absl::Status ServerProcess::Signal(int signal_number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pid_ <= 0 || exit_.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(options_.path, " has already ended"));
  }
  if (kill(pid_, signal_number) != 0) {
    return absl::InternalError(absl::StrCat("kill: ", strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status ServerProcess::Terminate() { return Signal(SIGTERM); }

absl::Status ServerProcess::Kill() { return Signal(SIGKILL); }

absl::StatusOr<int> ServerProcess::Wait(absl::Duration timeout) {
  const auto deadline = Deadline(timeout);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [&] { return exit_.has_value(); })) {
    return absl::DeadlineExceededError(absl::StrCat(
        "still running after ", absl::FormatDuration(timeout), "\n", DescribeLocked()));
  }
  return *exit_;
}

std::string ServerProcess::Stdout() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stdout_.text;
}

std::string ServerProcess::Stderr() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stderr_.text;
}

std::string ServerProcess::DescribeLocked() const {
  return absl::StrCat("---- ", options_.path, " ", absl::StrJoin(options_.args, " "), " (pid ",
                      pid_, exit_.has_value() ? absl::StrCat(", ended with ", *exit_) : ", running",
                      ")\n---- its standard output ends:\n", Tail(stdout_.text),
                      "---- its standard error ends:\n", Tail(stderr_.text), "----");
}

FinishedProcess RunToEnd(ServerProcess::Options options, absl::Duration timeout) {
  FinishedProcess finished;
  const auto process = ServerProcess::Start(std::move(options));
  if (!process.ok()) {
    ADD_FAILURE() << process.status();
    return finished;
  }
  const absl::StatusOr<int> exit_code = (*process)->Wait(timeout);
  if (!exit_code.ok()) {
    ADD_FAILURE() << exit_code.status();
    return finished;
  }
  finished.exit_code = *exit_code;
  finished.out = (*process)->Stdout();
  finished.err = (*process)->Stderr();
  return finished;
}

}  // namespace expertmesh
