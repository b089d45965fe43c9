#include "tests/server/comm/rank_process.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "server/comm/socket_address.h"

namespace expertmesh {
namespace {

constexpr std::chrono::seconds kPatience{120};

}  // namespace

RankProcess::RankProcess(InMemoryRendezvousStore& store) : store_(store) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const absl::StatusOr<SocketAddress> any = SocketAddress::Parse("127.0.0.1", 0);
  EXPECT_EQ(bind(listener.get(), any->data(), any->size()), 0);
  EXPECT_EQ(listen(listener.get(), 1), 0);
  auto process = ServerProcess::Start(
      {.path = SiblingBinary("comm_rank_worker"),
       .args = {absl::StrCat(SocketAddress::OfSocket(listener.get()).port())}});
  EXPECT_TRUE(process.ok()) << process.status();
  process_ = *std::move(process);
  pollfd polled = {listener.get(), POLLIN, 0};
  EXPECT_EQ(poll(&polled, 1, 60000), 1) << "the worker did not come";
  fd_.reset(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  reader_ = std::thread([this] { ReadLines(); });
}

RankProcess::~RankProcess() {
  process_->Kill().IgnoreError();
  process_->Wait(absl::Seconds(60)).IgnoreError();
  shutdown(fd_.get(), SHUT_RDWR);
  reader_.join();
}

void RankProcess::WriteLine(const std::string& line) {
  const std::lock_guard<std::mutex> lock(write_mutex_);
  const std::string bytes = line + "\n";
  send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

void RankProcess::ReadLines() {
  std::string buffer;
  char bytes[4096];
  ssize_t moved;
  while ((moved = recv(fd_.get(), bytes, sizeof(bytes), 0)) > 0) {
    buffer.append(bytes, static_cast<size_t>(moved));
    for (size_t end; (end = buffer.find('\n')) != std::string::npos; buffer.erase(0, end + 1)) {
      const std::string line = buffer.substr(0, end);
      const std::vector<std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 2));
      if (words[0] == "set") {
        WriteLine(store_.Set(words[1], words[2]).ok() ? "ok" : "exists");
      } else if (words[0] == "get") {
        // Tests end a group's connecting before its processes, so this outlives the callback.
        store_.GetAsync(words[1], [this](absl::StatusOr<std::string> value) {
          WriteLine(value.ok() ? *value : "gone");
        });
      } else {
        const std::lock_guard<std::mutex> lock(mutex_);
        int code = 0;
        if (words[0] == "posted") {
          ++num_posted_;
        } else if (words[0] == "result" && absl::SimpleAtoi(words[1], &code)) {
          results_.emplace_back(static_cast<absl::StatusCode>(code), words[2]);
        } else {
          ADD_FAILURE() << line;
        }
        changed_.notify_all();
      }
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void RankProcess::Command(const std::string& command) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_posted_ = 0;
  }
  WriteLine(command);
}

void RankProcess::AwaitPosted() {
  std::unique_lock<std::mutex> lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, kPatience, [this] { return num_posted_ > 0 || ended_; }));
}

absl::Status RankProcess::Result() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, kPatience, [this] { return !results_.empty() || ended_; })) {
    return absl::UnknownError("the worker does not answer");
  }
  if (results_.empty()) return absl::UnavailableError("the worker has ended");
  absl::Status result = std::move(results_.front());
  results_.pop_front();
  return result;
}

void RankProcess::Signal(int signal_number) { EXPECT_TRUE(process_->Signal(signal_number).ok()); }

int RankProcess::ExitCode() {
  shutdown(fd_.get(), SHUT_WR);
  const absl::StatusOr<int> code = process_->Wait(absl::Seconds(60));
  EXPECT_TRUE(code.ok()) << code.status();
  return code.value_or(-1);
}

}  // namespace expertmesh
