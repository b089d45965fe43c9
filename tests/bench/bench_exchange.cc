// Two ranks that are processes on this machine exchange payloads of one size both ways: the time of
// TcpCommunicator's AllToAllV, with its header and checksum, beside that of a bare Gloo exchange of
// the same bytes with buffers that are kept. Alternating rounds of one run; medians of rank 0.
//
// usage: bench_exchange [NUM_ROUNDS]
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/stream.h"
#include "server/comm/tcp_communicator.h"

namespace expertmesh {
namespace {

// Values between the two processes, in the order in which they are written.
class PairStore : public RendezvousStore {
 public:
  explicit PairStore(int fd) : fd_(fd) {}
  absl::Status Set(absl::string_view, absl::string_view value) override {
    const auto size = static_cast<uint32_t>(value.size());
    if (write(fd_, &size, sizeof(size)) != sizeof(size) ||
        write(fd_, value.data(), size) != static_cast<ssize_t>(size)) {
      return absl::UnavailableError("peer");
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(absl::string_view, absl::Time) override {
    uint32_t size = 0;
    if (read(fd_, &size, sizeof(size)) != sizeof(size)) return absl::UnavailableError("peer");
    std::string value(size, '\0');
    if (recv(fd_, value.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
      return absl::UnavailableError("peer");
    }
    return value;
  }

 private:
  int fd_;
};

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "bench_exchange: %s\n", status.ToString().c_str());
  std::exit(1);
}

class GlooExchange {
 public:
  GlooExchange(int rank, PairStore& store, std::vector<std::byte>& send,
               std::vector<std::byte>& receive)
      : peer_(1 - rank),
        device_(gloo::transport::tcp::CreateDevice("127.0.0.1")),
        context_(device_->createContext(rank, 2)) {
    context_->setTimeout(std::chrono::seconds(60));
    auto& pair = context_->createPair(peer_);
    const std::vector<char> own = pair->address().bytes();
    Require(store.Set("", absl::string_view(own.data(), own.size())));
    const absl::StatusOr<std::string> other = store.Get("", absl::InfiniteFuture());
    Require(other.status());
    pair->connect(std::vector<char>(other->begin(), other->end()));
    send_ = context_->createUnboundBuffer(send.data(), send.size());
    receive_ = context_->createUnboundBuffer(receive.data(), receive.size());
  }

  void Run(int64_t num_bytes) {
    receive_->recv(peer_, 1, 0, static_cast<size_t>(num_bytes));
    send_->send(peer_, 1, 0, static_cast<size_t>(num_bytes));
    receive_->waitRecv();
    send_->waitSend();
  }

 private:
  int peer_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::unique_ptr<gloo::transport::UnboundBuffer> send_, receive_;
};

class TcpExchangeRun {
 public:
  TcpExchangeRun(int rank, PairStore& store, std::vector<std::byte>& send,
                 std::vector<std::byte>& receive)
      : rank_(rank), send_(send), receive_(receive), stream_(NewInlineHostStream()) {
    TcpCommunicatorParams params;
    params.mesh.ep_rank = rank;
    params.mesh.ep_size = 2;
    params.mesh.bind_address = "127.0.0.1";
    params.mesh.store = &store;
    auto communicator = NewTcpCommunicator(params);
    Require(communicator.status());
    communicator_ = *std::move(communicator);
  }

  void Run(int64_t num_bytes) {
    std::vector<int64_t> counts(2, num_bytes);
    counts[rank_] = 0;
    AllToAllVParams params;
    params.tag.step = step_++;
    params.send = send_.data();
    params.send_bytes = counts;
    params.receive = receive_.data();
    params.receive_bytes = counts;
    Require(communicator_->AllToAllV(params, *stream_));
    Require(stream_->Wait(absl::InfiniteFuture()));
  }

 private:
  int rank_;
  std::vector<std::byte>& send_;
  std::vector<std::byte>& receive_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<Stream> stream_;
  uint64_t step_ = 0;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void RunRank(int rank, int fd, int num_rounds) {
  PairStore store(fd);
  const std::vector<int64_t> sizes = {int64_t{16} << 10, int64_t{256} << 10, int64_t{8} << 20};
  std::vector<std::byte> send(static_cast<size_t>(sizes.back()), std::byte{1});
  std::vector<std::byte> receive(send.size(), std::byte{2});
  GlooExchange bare(rank, store, send, receive);
  TcpExchangeRun ours(rank, store, send, receive);
  if (rank == 0) {
    std::printf("%10s %22s %22s %7s %s\n", "bytes", "bare Gloo, us", "TcpCommunicator, us", "ratio",
                "(limit 1.15)");
  }
  for (const int64_t size : sizes) {
    const int num_exchanges = size > (1 << 20) ? 5 : 50;
    std::vector<double> times[2];
    for (int round = 0; round < num_rounds; ++round) {
      for (int which = 0; which < 2; ++which) {
        for (int i = 0; i < num_exchanges; ++i) {
          const auto start = std::chrono::steady_clock::now();
          if (which == 0) {
            bare.Run(size);
          } else {
            ours.Run(size);
          }
          times[which].push_back(
              std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
                  .count());
        }
      }
    }
    if (rank == 0) {
      const double gloo_micros = Median(times[0]);
      const double our_micros = Median(times[1]);
      std::printf("%10lld %22.1f %22.1f %7.2f\n", static_cast<long long>(size), gloo_micros,
                  our_micros, our_micros / gloo_micros);
    }
  }
  // Neither leaves while the other may still be receiving.
  Require(store.Set("", "done"));
  Require(store.Get("", absl::InfiniteFuture()).status());
}

int Main(int argc, char** argv) {
  const int num_rounds = argc > 1 ? std::atoi(argv[1]) : 40;
  signal(SIGPIPE, SIG_IGN);  // Gloo's
  int fds[2];
  if (num_rounds < 1 || socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) return 2;
  const pid_t child = fork();
  if (child < 0) return 2;
  RunRank(child == 0 ? 1 : 0, fds[child == 0 ? 1 : 0], num_rounds);
  if (child == 0) return 0;
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) { return expertmesh::Main(argc, argv); }
