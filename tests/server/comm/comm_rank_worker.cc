// One rank of a TCP group as a process, driven by rank_process.h over a loopback connection: a line
// in is a command, a line out is its result or a question to the rendezvous store.
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/comm/socket_address.h"
#include "server/comm/tcp_communicator.h"
#include "server/comm/unique_fd.h"

namespace expertmesh {
namespace {

class Lines {
 public:
  explicit Lines(int fd) : fd_(fd) {}

  std::optional<std::string> Read() {
    size_t end;
    while ((end = buffer_.find('\n')) == std::string::npos) {
      char bytes[4096];
      const ssize_t moved = recv(fd_, bytes, sizeof(bytes), 0);
      if (moved <= 0) return std::nullopt;
      buffer_.append(bytes, static_cast<size_t>(moved));
    }
    std::string line = buffer_.substr(0, end);
    buffer_.erase(0, end + 1);
    return line;
  }
  void Write(const std::string& line) {
    const std::string bytes = line + "\n";
    send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

 private:
  int fd_;
  std::string buffer_;
};

class RemoteStore : public RendezvousStore {
 public:
  explicit RemoteStore(Lines& lines) : lines_(lines) {}
  absl::Status Set(absl::string_view key, absl::string_view value) override {
    lines_.Write(absl::StrCat("set ", key, " ", value));
    const std::optional<std::string> answer = lines_.Read();
    return answer == "ok" ? absl::OkStatus() : absl::AlreadyExistsError(key);
  }
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time) override {
    lines_.Write(absl::StrCat("get ", key));
    std::optional<std::string> answer = lines_.Read();
    if (!answer.has_value()) return absl::UnavailableError("no store");
    return *answer;
  }

 private:
  Lines& lines_;
};

void AppendPayload(int32_t source, int32_t destination, int64_t step, int64_t num_bytes,
                   std::vector<std::byte>& payload) {
  const size_t begin = payload.size();
  payload.resize(begin + static_cast<size_t>(num_bytes));
  const auto first = static_cast<uint32_t>(source * 31 + destination * 7 + step * 13);
  for (uint32_t i = 0; i < static_cast<uint32_t>(num_bytes); ++i) {
    payload[begin + i] = static_cast<std::byte>(first + i * 3 + (i >> 8));
  }
}

class Worker {
 public:
  explicit Worker(Lines& lines) : lines_(lines) {}

  absl::Status Do(const std::vector<std::string>& words) {
    std::vector<int64_t> numbers(words.size());
    for (size_t i = 1; i < words.size(); ++i) {
      if (!absl::SimpleAtoi(words[i], &numbers[i])) return absl::InvalidArgumentError(words[i]);
    }
    if (words[0] == "connect") {
      RemoteStore store(lines_);
      TcpCommunicatorParams params;
      params.mesh.ep_rank = static_cast<int32_t>(numbers[1]);
      params.mesh.ep_size = static_cast<int32_t>(numbers[2]);
      params.mesh.incarnation = 1;
      params.mesh.epoch = static_cast<uint64_t>(numbers[3]);
      params.operation_timeout = absl::Milliseconds(numbers[4]);
      params.mesh.bind_address = "127.0.0.1";
      params.mesh.store = &store;
      params.mesh.deadline = absl::Now() + absl::Seconds(60);
      communicator_.reset();
      absl::StatusOr<std::unique_ptr<Communicator>> made = NewTcpCommunicator(params);
      if (made.ok()) communicator_ = *std::move(made);
      return made.status();
    }
    if (words[0] == "leave") {
      communicator_.reset();
      return absl::OkStatus();
    }
    if (communicator_ == nullptr) return absl::FailedPreconditionError("not connected");
    if (words[0] == "abort") {
      communicator_->Abort(absl::InternalError("told to"));
      return absl::OkStatus();
    }
    if (words[0] == "all_to_all") {  // step, bytes for every pair
      return AllToAll(numbers[1], [&](int32_t from, int32_t to) {
        return from == to ? std::min(numbers[2], int64_t{1000}) : numbers[2];
      });
    }
    if (words[0] == "uneven") {  // step, most bytes: other counts for every pair, zeros among them
      return AllToAll(numbers[1], [&](int32_t from, int32_t to) {
        std::mt19937_64 random(static_cast<uint64_t>((numbers[1] * 64 + from) * 64 + to));
        return random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % numbers[2]);
      });
    }
    if (words[0] == "wrong") {  // step, bytes: one more than this rank tells the last one
      return AllToAll(numbers[1], [&](int32_t from, int32_t to) {
        return numbers[2] +
               (from == communicator_->ep_rank() && to == (from + 1) % communicator_->ep_size());
      });
    }
    return absl::UnimplementedError(words[0]);
  }

 private:
  template <typename Count>
  absl::Status AllToAll(int64_t step, Count count) {
    const int32_t self = communicator_->ep_rank();
    std::vector<int64_t> send_bytes, receive_bytes;
    std::vector<std::byte> send, expected;
    for (int32_t peer = 0; peer < communicator_->ep_size(); ++peer) {
      send_bytes.push_back(count(self, peer));
      receive_bytes.push_back(count(peer, self));
      AppendPayload(self, peer, step, send_bytes.back(), send);
      AppendPayload(peer, self, step, receive_bytes.back(), expected);
    }
    std::vector<std::byte> received(expected.size());
    AllToAllVParams params;
    params.tag.step = static_cast<uint64_t>(step);
    params.send = send.data();
    params.send_bytes = send_bytes;
    params.receive = received.data();
    params.receive_bytes = receive_bytes;
    const std::unique_ptr<Stream> stream = NewInlineHostStream();
    absl::Status status = communicator_->AllToAllV(params, *stream);
    lines_.Write("posted");
    status.Update(stream->Wait(absl::Now() + absl::Seconds(120)));
    if (status.ok() && received != expected) return absl::UnknownError("wrong bytes");
    return status;
  }

  Lines& lines_;
  std::unique_ptr<Communicator> communicator_;
};

int Main(int argc, char** argv) {
  int port = 0;
  if (argc != 2 || !absl::SimpleAtoi(argv[1], &port)) return 2;
  const auto address = SocketAddress::Parse("127.0.0.1", static_cast<uint16_t>(port));
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(fd.get(), address->data(), address->size()) != 0) return 3;
  Lines lines(fd.get());
  Worker worker(lines);
  while (const std::optional<std::string> line = lines.Read()) {
    const absl::Status status = worker.Do(absl::StrSplit(*line, ' '));
    lines.Write(absl::StrCat("result ", static_cast<int>(status.code()), " ",
                             absl::string_view(status.message())));
  }
  return 0;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) { return expertmesh::Main(argc, argv); }
