#ifndef EXPERTMESH_TESTS_SERVER_COMM_RANK_PROCESS_H_
#define EXPERTMESH_TESTS_SERVER_COMM_RANK_PROCESS_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/unique_fd.h"
#include "tests/integration/process.h"

namespace expertmesh {

// A comm_rank_worker process, which reads and writes `store` through this one.
class RankProcess {
 public:
  explicit RankProcess(InMemoryRendezvousStore& store);
  ~RankProcess();

  // A command of comm_rank_worker.cc. One at a time.
  void Command(const std::string& command);
  // Waits until the operation of the last command has been posted to its stream.
  void AwaitPosted();
  // Waits for the end of the last command: its status; UNAVAILABLE when the process has ended.
  absl::Status Result();

  void Signal(int signal_number);
  // The process's own end: minus the signal's number, if one ended it.
  int ExitCode();

 private:
  void ReadLines();
  void WriteLine(const std::string& line);

  InMemoryRendezvousStore& store_;
  std::unique_ptr<ServerProcess> process_;
  std::mutex write_mutex_;
  UniqueFd fd_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<absl::Status> results_;
  int num_posted_ = 0;
  bool ended_ = false;
  std::thread reader_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_RANK_PROCESS_H_
