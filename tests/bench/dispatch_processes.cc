#include "tests/bench/dispatch_processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/comm/tcp_communicator.h"
#include "server/model/synthetic_weight_source.h"
#include "server/rank/rank_backend.h"
#include "server/rank/rank_engine.h"
#include "tests/bench/bench_figures.h"

namespace expertmesh {
namespace {

absl::Status PeerError() { return absl::UnavailableError("the other process is gone"); }

// A stream socket between two processes; also what ranks find each other by: values come in the
// order in which they are set.
class Pipe : public RendezvousStore {
 public:
  explicit Pipe(int fd) : fd_(fd) {}
  absl::Status Set(absl::string_view, absl::string_view value) override {
    const auto size = static_cast<uint32_t>(value.size());
    if (write(fd_, &size, sizeof(size)) != sizeof(size) ||
        write(fd_, value.data(), size) != static_cast<ssize_t>(size)) {
      return PeerError();
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(absl::string_view, absl::Time) override {
    uint32_t size = 0;
    if (recv(fd_, &size, sizeof(size), MSG_WAITALL) != sizeof(size)) return PeerError();
    std::string value(size, '\0');
    if (size > 0 && recv(fd_, value.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
      return PeerError();
    }
    return value;
  }
  void Meet() {
    Require(Set("", "."));
    Require(Get("", absl::InfiniteFuture()).status());
  }

 private:
  const int fd_;
};

// Runs `child` in another process, with its end of a socket; gives the other end.
int Fork(const std::function<void(int fd)>& child, std::vector<pid_t>& children) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) Require(PeerError());
  std::fflush(stdout);  // else the child would print it again
  const pid_t pid = fork();
  if (pid < 0) Require(PeerError());
  if (pid == 0) {
    close(fds[0]);
    child(fds[1]);
    std::fflush(stdout);
    _exit(0);
  }
  close(fds[1]);
  children.push_back(pid);
  return fds[0];
}

void Join(const std::vector<pid_t>& children) {
  for (const pid_t pid : children) waitpid(pid, nullptr, 0);
}

// A connected TCP socket over loopback, as the communicator's are.
int ConnectTcp(int rank, Pipe& pipe) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (rank == 0) {
    const int listener = fd;
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener, 1) != 0 ||
        getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      Require(PeerError());
    }
    Require(pipe.Set("", absl::StrCat(address.sin_port)));
    fd = accept(listener, nullptr, nullptr);
    close(listener);
  } else {
    const auto port = pipe.Get("", absl::InfiniteFuture());
    Require(port.status());
    address.sin_port = static_cast<in_port_t>(std::stoi(*port));
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) != 0) Require(PeerError());
  }
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  fcntl(fd, F_SETFL, O_NONBLOCK);
  return fd;
}

void SwapBare(int fd, const std::vector<std::byte>& send_buffer,
              std::vector<std::byte>& receive_buffer, size_t num_bytes) {
  size_t sent = 0;
  size_t received = 0;
  while (sent < num_bytes || received < num_bytes) {
    bool moved = false;
    if (sent < num_bytes) {
      const ssize_t n = send(fd, send_buffer.data() + sent, num_bytes - sent, MSG_NOSIGNAL);
      if (n > 0) sent += static_cast<size_t>(n);
      moved |= n > 0;
    }
    if (received < num_bytes) {
      const ssize_t n = recv(fd, receive_buffer.data() + received, num_bytes - received, 0);
      if (n == 0) Require(PeerError());
      if (n > 0) received += static_cast<size_t>(n);
      moved |= n > 0;
    }
    if (moved) continue;
    pollfd waiting = {fd, static_cast<int16_t>(POLLIN | (sent < num_bytes ? POLLOUT : 0)), 0};
    poll(&waiting, 1, -1);
  }
}

// A thread that moves bytes while its caller may do something else, as a communicator must; the
// caller waits for it.
class Mover {
 public:
  explicit Mover(std::function<void(size_t num_bytes)> move)
      : move_(std::move(move)), thread_([this] { Work(); }) {}
  ~Mover() {
    Give(0);
    thread_.join();
  }
  void Run(size_t num_bytes) {
    Give(num_bytes);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !given_; });
  }

 private:
  void Give(size_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_bytes_ = num_bytes;
    given_ = true;
    changed_.notify_all();
  }
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return given_; });
      if (num_bytes_ == 0) return;
      lock.unlock();
      move_(num_bytes_);
      lock.lock();
      given_ = false;
      changed_.notify_all();
    }
  }

  const std::function<void(size_t num_bytes)> move_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t num_bytes_ = 0;
  bool given_ = false;
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<Communicator>> Connect(int rank, Pipe& pipe) {
  TcpCommunicatorParams params;
  params.mesh.ep_rank = rank;
  params.mesh.ep_size = 2;
  params.mesh.incarnation = 1;
  params.mesh.epoch = 1;
  params.mesh.bind_address = "127.0.0.1";
  params.mesh.store = &pipe;
  return NewTcpCommunicator(params);
}

constexpr size_t kExchangeBytes[] = {size_t{16} << 10, size_t{256} << 10, size_t{1} << 20,
                                     size_t{8} << 20};

// The time of AllToAllV over that of a bare exchange, by size, of all rounds.
struct ExchangeRatios {
  std::vector<double> to_thread[std::size(kExchangeBytes)];  // by a thread of its own
  std::vector<double> to_caller[std::size(kExchangeBytes)];  // by the caller itself
};

void ExchangeAsRank(int rank, int fd, ExchangeRatios& ratios) {
  Pipe pipe(fd);
  const int bare = ConnectTcp(rank, pipe);
  auto communicator = Connect(rank, pipe);
  Require(communicator.status());
  const std::unique_ptr<Stream> stream = NewInlineHostStream();
  std::vector<std::byte> send(*std::rbegin(kExchangeBytes), std::byte{1});
  std::vector<std::byte> receive(send.size(), std::byte{2});
  uint64_t step = 0;
  Mover mover([&](size_t num_bytes) { SwapBare(bare, send, receive, num_bytes); });
  for (size_t i = 0; i < std::size(kExchangeBytes); ++i) {
    const size_t size = kExchangeBytes[i];
    const int repeats = size > (1 << 20) ? 4 : 20;
    const auto seconds_of = [&](const std::function<void()>& exchange) {
      pipe.Meet();
      return Seconds([&] {
        for (int repeat = 0; repeat < repeats; ++repeat) exchange();
      });
    };
    for (int round = 0; round < 15; ++round) {
      const double by_caller = seconds_of([&] { SwapBare(bare, send, receive, size); });
      const double by_thread = seconds_of([&] { mover.Run(size); });
      const double ours = seconds_of([&] {
        std::vector<int64_t> counts(2, static_cast<int64_t>(size));
        counts[rank] = 0;
        AllToAllVParams params;
        params.tag.step = ++step;
        params.send = send.data();
        params.send_bytes = counts;
        params.receive = receive.data();
        params.receive_bytes = counts;
        Require((*communicator)->AllToAllV(params, *stream));
        Require(stream->Wait(absl::InfiniteFuture()));
      });
      ratios.to_thread[i].push_back(ours / by_thread);
      ratios.to_caller[i].push_back(ours / by_caller);
    }
  }
  pipe.Meet();
  close(bare);
}

constexpr int64_t kTokens = 512;
constexpr int64_t kHidden = 2048;
constexpr int32_t kExperts = 128;
constexpr int32_t kTopk = 8;

ModelSpec BenchModel() {
  ModelSpec model;
  model.name = "bench";
  model.architecture = "Bench";
  model.hidden_size = kHidden;
  model.weight_dtype = DType::kBFloat16;
  LayerSpec& layer = model.layers.emplace_back();
  layer.num_experts = kExperts;
  layer.topk = kTopk;
  layer.intermediate_size = 768;
  return model;
}

// One rank: for each message of the parent a step, answered by its seconds.
void RunRank(int rank, int ep_size, int num_threads, int to_parent, int to_peer) {
  if (ep_size > 1) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(rank, &core);
    sched_setaffinity(0, sizeof(core), &core);
  }
  auto pool = std::make_shared<HostBufferPool>();
  CpuRankBackendOptions backend_options;
  backend_options.isa = SupportedCpuIsas().back();
  backend_options.threads.num_threads = num_threads;
  backend_options.allocator = pool;
  auto backend = NewCpuRankBackend(backend_options);
  Require(backend.status());
  RankEngineOptions options;
  options.ep_rank = rank;
  options.ep_size = ep_size;
  options.backend = *std::move(backend);
  RankEngine engine(std::move(options));
  const auto source = SyntheticWeightSource::Create(BenchModel(), 1);
  Require(source.status());
  const ModelSpec& model = (*source)->model();
  const auto placement = Placement::Contiguous(kExperts, ep_size);
  Require(engine.LoadLayer(**source, model.layers[0], *placement, [](int64_t) {}));
  std::unique_ptr<Communicator> communicator;
  if (ep_size > 1) {
    Pipe peer(to_peer);
    auto connected = Connect(rank, peer);
    Require(connected.status());
    communicator = *std::move(connected);
  }
  engine.EnterEpoch(1, 1, std::move(communicator));

  const std::vector<int32_t> ids = RandomTopk(kTokens, kTopk, kExperts);
  const std::vector<float> weights(ids.size(), 0.125f);
  std::vector<std::byte> hidden(kTokens * kHidden * 2);
  for (int64_t i = 0; i < kTokens * kHidden; ++i) {
    StoreFloat(hidden.data(), DType::kBFloat16, i, static_cast<float>(i % 17) / 17 - 0.5f);
  }
  const RoutingSegment segment{ids.data(), weights.data(), kTokens, kTopk};
  StepPlanParams params;
  params.header.incarnation = 1;
  params.header.epoch = 1;
  params.header.model = model.name;
  params.header.strategy = ep_size > 1 ? DispatchMode::kAllToAll : DispatchMode::kPassthrough;
  params.header.activation_dtype = DType::kBFloat16;
  params.header.combine_dtype = DType::kBFloat16;
  params.header.output_dtype = DType::kBFloat16;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &*placement;
  Pipe parent(to_parent);
  int64_t held_bytes = 0;
  for (int step = 0;; ++step) {
    params.header.step = static_cast<uint64_t>(step);
    absl::StatusOr<StepPlan> plan = PlanStep(params);
    Require(plan.status());
    const int64_t first = plan->shard_offsets[rank];
    TokenShard shard;
    shard.rows.push_back(
        {hidden.data() + first * kHidden * 2, plan->shard_offsets[rank + 1] - first});
    // The parent has gone: done.
    const auto command = parent.Get("", absl::InfiniteFuture());
    if (!command.ok()) break;
    const double seconds = Seconds([&] {
      Require(
          engine.RunStep(std::move(plan->slices[rank]), std::move(shard), absl::InfiniteFuture())
              .status());
    });
    Require(parent.Set("", absl::StrCat(seconds)));
    const int64_t bytes = pool->allocated_bytes() + pool->cached_bytes();
    if (step > 5 && bytes != held_bytes) {
      std::printf("rank %d took new memory in step %d: NOT REACHED\n", rank, step);
    }
    held_bytes = bytes;
  }
}

}  // namespace

void BenchExchange() {
  // Where a pair of processes and its sockets' pages come to lie makes a factor of two, either way:
  // several pairs.
  ExchangeRatios ratios;
  for (int pair = 0; pair < 9; ++pair) {
    std::vector<pid_t> children;
    const int fd = Fork(
        [](int child_fd) {
          ExchangeRatios unused;
          ExchangeAsRank(1, child_fd, unused);
        },
        children);
    ExchangeAsRank(0, fd, ratios);
    close(fd);
    Join(children);
  }
  for (size_t i = 0; i < std::size(kExchangeBytes); ++i) {
    PrintAtMost(absl::StrCat("AllToAllV against a bare exchange, ", kExchangeBytes[i] >> 10,
                             " KiB each way"),
                Median(ratios.to_thread[i]), "x", 1.15);
    std::printf("%-66s %10.3f x\n", "  and one that nobody can work beside, by the caller itself",
                Median(ratios.to_caller[i]));
  }
}

void BenchRankProcesses() {
  std::vector<pid_t> children;
  int peers[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, peers) != 0) Require(PeerError());
  std::vector<int> fds;
  const auto start = [&](int rank, int ep_size, int num_threads) {
    fds.push_back(Fork(
        [&, rank, ep_size, num_threads](int to_parent) {
          for (const int fd : fds) close(fd);  // else the parent's end would never be gone
          RunRank(rank, ep_size, num_threads, to_parent, peers[rank]);
        },
        children));
  };
  start(0, 1, 2);
  start(0, 2, 1);
  start(1, 2, 1);
  close(peers[0]);
  close(peers[1]);
  std::vector<Pipe> pipes(fds.begin(), fds.end());
  const auto run = [&](int first, int last) {
    double seconds = 0;
    for (int i = first; i < last; ++i) Require(pipes[i].Set("", "."));
    for (int i = first; i < last; ++i) {
      const auto answer = pipes[i].Get("", absl::InfiniteFuture());
      Require(answer.status());
      seconds = std::max(seconds, std::stod(*answer));
    }
    return seconds;
  };
  for (int warm_up = 0; warm_up < 6; ++warm_up) {
    run(0, 1);
    run(1, 3);
  }
  std::vector<double> ratios;
  std::vector<double> one;
  for (int round = 0; round < 41; ++round) {
    one.push_back(run(0, 1));
    ratios.push_back(one.back() / run(1, 3));
  }
  PrintAtLeast(absl::StrCat("two rank processes against one with both cores (",
                            static_cast<int>(Median(one) * 1e6), " us)"),
               Median(ratios), "x", 0.88);
  for (const int fd : fds) close(fd);
  Join(children);
}

}  // namespace expertmesh
