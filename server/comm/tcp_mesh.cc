#include "server/comm/tcp_mesh.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/steady_now.h"
#include "server/comm/socket_address.h"
#include "server/ops/logging.h"
#include "server/ops/rank_text.h"

namespace expertmesh {
namespace {

using Secret = std::array<char, 16>;

enum Channel : uint32_t { kData = 0, kControl = 1 };
constexpr int kNumChannels = 2;

// The first bytes of a connection, from the rank that connects.
struct Hello {
  static constexpr uint64_t kMagic = 0x31686d7470784545;
  uint64_t magic = kMagic;
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  int32_t from_rank = 0;
  int32_t to_rank = 0;
  uint32_t channel = kData;
  uint32_t ep_size = 0;
  Secret secret = {};  // the listener's
};
static_assert(sizeof(Hello) == 56);

// The answer: the secret of the rank that connects.
struct Reply {
  uint64_t magic = Hello::kMagic;
  Secret secret = {};
};
static_assert(sizeof(Reply) == 24);

// Strangers may connect and say nothing: so many are waited for at once, each for so long that no
// rank is slower.
constexpr size_t kMaxSilentConnections = 128;
constexpr absl::Duration kPatienceForHello = absl::Seconds(1);
constexpr absl::Duration kCancelPollInterval = absl::Milliseconds(10);
// Lines in the log about strangers, so that they cannot fill it.
constexpr int kMaxRefusalsLogged = 32;

constexpr int kSendBufferBytes = 4 << 20;
constexpr int kKeepaliveIdleSeconds = 30;
constexpr int kKeepaliveIntervalSeconds = 5;
constexpr int kKeepaliveProbes = 3;

struct Peer {
  std::string address;
  uint16_t port = 0;
  Secret secret = {};
};

struct Outgoing {
  int32_t rank = 0;
  Channel channel = kData;
  UniqueFd fd;
  bool said_hello = false;
  Reply reply;
  size_t num_received = 0;
};

struct Incoming {
  UniqueFd fd;
  std::string from;
  absl::Time accepted_at;
  Hello hello;
  size_t num_received = 0;
};

absl::Status SocketError(const char* what, const std::string& where) {
  return absl::UnavailableError(absl::StrCat(what, " ", where, ": ", strerror(errno)));
}

class MeshConnector {
 public:
  explicit MeshConnector(const TcpMeshParams& params) : params_(params), links_(params.ep_size) {}

  absl::StatusOr<std::vector<TcpPeerSockets>> Connect() {
    absl::Status status = CheckParams();
    if (status.ok() && params_.ep_size > 1) {
      status = Listen();
      if (status.ok()) status = Publish();
      if (status.ok()) status = ReadPeers();
      for (int32_t rank = 0; status.ok() && rank < params_.ep_rank; ++rank) {
        for (const Channel channel : {kData, kControl}) {
          status.Update(StartConnecting(rank, channel));
        }
      }
      while (status.ok() && !Missing().empty()) status = PollOnce();
    }
    if (!status.ok()) return status;
    return std::move(links_);
  }

 private:
  absl::Status CheckParams() const {
    if (params_.ep_rank < 0 || params_.ep_rank >= params_.ep_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("ep_rank ", params_.ep_rank, " is not in [0, ", params_.ep_size, ")"));
    }
    const absl::Status status = SocketAddress::Parse(params_.bind_address, 0).status();
    return status.ok() ? SocketAddress::Parse(ReachedAt(), 0).status() : status;
  }

  const std::string& ReachedAt() const {
    return params_.advertise_address.empty() ? params_.bind_address : params_.advertise_address;
  }

  std::string Key(int32_t rank) const {
    return RendezvousKey(params_.incarnation, params_.epoch, absl::StrCat("rank/", rank));
  }

  absl::Status Listen() {
    const absl::StatusOr<SocketAddress> address = SocketAddress::Parse(params_.bind_address, 0);
    if (!address.ok()) return address.status();
    listener_.reset(socket(address->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!listener_.valid() || bind(listener_.get(), address->data(), address->size()) != 0 ||
        listen(listener_.get(), SOMAXCONN) != 0) {
      return SocketError("cannot listen on", params_.bind_address);
    }
    return absl::OkStatus();
  }

  absl::Status Publish() {
    if (getrandom(secret_.data(), secret_.size(), 0) != static_cast<ssize_t>(secret_.size())) {
      return absl::InternalError("getrandom");
    }
    return params_.store->Set(
        Key(params_.ep_rank),
        absl::StrCat(ReachedAt(), " ", SocketAddress::OfSocket(listener_.get()).port(), " ",
                     absl::BytesToHexString(absl::string_view(secret_.data(), secret_.size()))));
  }

  absl::Status ReadPeers() {
    peers_.resize(params_.ep_size);
    for (int32_t rank = 0; rank < params_.ep_size; ++rank) {
      if (rank == params_.ep_rank) continue;
      const absl::StatusOr<std::string> value = params_.store->Get(Key(rank), params_.deadline);
      if (!value.ok()) {
        return absl::Status(value.status().code(),
                            RankText(rank, "did not come", value.status().message()));
      }
      const std::vector<std::string> parts = absl::StrSplit(*value, ' ');
      int32_t port = 0;
      std::string secret;
      if (parts.size() == 3 && absl::SimpleAtoi(parts[1], &port) && port > 0 && port < 65536) {
        secret = absl::HexStringToBytes(parts[2]);
      }
      if (secret.size() != sizeof(Secret)) {
        return absl::InvalidArgumentError(
            absl::StrCat("rank ", rank, " left no address in the rendezvous store"));
      }
      peers_[rank].address = parts[0];
      peers_[rank].port = static_cast<uint16_t>(port);
      std::copy(secret.begin(), secret.end(), peers_[rank].secret.begin());
    }
    return absl::OkStatus();
  }

  absl::Status StartConnecting(int32_t rank, Channel channel) {
    const absl::StatusOr<SocketAddress> to =
        SocketAddress::Parse(peers_[rank].address, peers_[rank].port);
    if (!to.ok()) return to.status();
    const absl::StatusOr<SocketAddress> from = SocketAddress::Parse(params_.bind_address, 0);
    if (!from.ok()) return from.status();
    Outgoing& outgoing = outgoing_.emplace_back();
    outgoing.rank = rank;
    outgoing.channel = channel;
    outgoing.fd.reset(socket(to->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int fd = outgoing.fd.get();
    const int on = 1;
    // The port is chosen by connect, which knows more free ones than bind does.
    if (fd < 0 || setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on)) != 0 ||
        bind(fd, from->data(), from->size()) != 0 ||
        (connect(fd, to->data(), to->size()) != 0 && errno != EINPROGRESS)) {
      return Unreachable(rank, strerror(errno));
    }
    return absl::OkStatus();
  }

  absl::Status Unreachable(int32_t rank, absl::string_view why) const {
    return absl::UnavailableError(absl::StrCat("rank ", rank, " at ", peers_[rank].address, ":",
                                               peers_[rank].port, " cannot be reached: ", why));
  }

  UniqueFd& Link(int32_t rank, uint32_t channel) {
    return channel == kData ? links_[rank].data : links_[rank].control;
  }

  std::vector<int32_t> Missing() const {
    std::vector<int32_t> missing;
    for (int32_t rank = 0; rank < params_.ep_size; ++rank) {
      if (rank == params_.ep_rank) continue;
      if (!links_[rank].data.valid() || !links_[rank].control.valid()) missing.push_back(rank);
    }
    return missing;
  }

  absl::Status PollOnce() {
    const bool full = incoming_.size() >= kMaxSilentConnections;
    std::vector<pollfd> polled{{listener_.get(), short(full ? 0 : POLLIN), 0}};
    for (const Outgoing& outgoing : outgoing_) {
      polled.push_back({outgoing.fd.get(), short(outgoing.said_hello ? POLLIN : POLLOUT), 0});
    }
    for (const Incoming& incoming : incoming_) polled.push_back({incoming.fd.get(), POLLIN, 0});
    if (params_.cancelled != nullptr && *params_.cancelled) {
      return absl::CancelledError("the epoch was given up while it was formed");
    }
    absl::Duration longest = full ? kPatienceForHello : absl::Minutes(1);
    if (params_.cancelled != nullptr) longest = std::min(longest, kCancelPollInterval);
    const absl::Duration remaining =
        std::clamp(params_.deadline - SteadyNow(), absl::ZeroDuration(), longest);
    const int num_ready = poll(polled.data(), polled.size(),
                               static_cast<int>(absl::ToInt64Milliseconds(remaining)) + 1);
    if (num_ready < 0 && errno != EINTR) return SocketError("poll", "");
    if (SteadyNow() >= params_.deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("no connection with ranks ", absl::StrJoin(Missing(), ", ")));
    }
    if (num_ready < 0) return absl::OkStatus();
    // Back to front, so that what is finished can be erased.
    for (size_t i = incoming_.size(); i-- > 0;) {
      if (polled[1 + outgoing_.size() + i].revents != 0 && ReadHello(incoming_[i])) {
        incoming_.erase(incoming_.begin() + static_cast<ptrdiff_t>(i));
      }
    }
    for (size_t i = outgoing_.size(); i-- > 0;) {
      if (polled[1 + i].revents == 0) continue;
      const absl::StatusOr<bool> finished = Advance(outgoing_[i]);
      if (!finished.ok()) return finished.status();
      if (*finished) outgoing_.erase(outgoing_.begin() + static_cast<ptrdiff_t>(i));
    }
    if (polled[0].revents != 0) Accept();
    if (full) DropSilent();
    return absl::OkStatus();
  }

  void Accept() {
    while (incoming_.size() < kMaxSilentConnections) {
      SocketAddress from;
      Incoming incoming;
      incoming.fd.reset(
          accept4(listener_.get(), from.data(), from.mutable_size(), SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!incoming.fd.valid()) return;
      incoming.from = from.ToString();
      incoming.accepted_at = SteadyNow();
      if (!ReadHello(incoming)) incoming_.push_back(std::move(incoming));
    }
  }

  void DropSilent() {
    const absl::Time too_old = SteadyNow() - kPatienceForHello;
    while (!incoming_.empty() && incoming_.front().accepted_at <= too_old) {
      Refuse(incoming_.front(), "it says nothing, and others wait");
      incoming_.erase(incoming_.begin());
    }
  }

  void Refuse(const Incoming& incoming, absl::string_view why) {
    if (++num_refused_ > kMaxRefusalsLogged) return;
    LogWarning("refused a connection to the communicator", {{"from", incoming.from},
                                                            {"why", why},
                                                            {"ep_rank", params_.ep_rank},
                                                            {"epoch", params_.epoch},
                                                            {"num_refused", num_refused_}});
  }

  // True when this connection is done with: it is a link now, or was refused.
  bool ReadHello(Incoming& incoming) {
    const ssize_t moved =
        recv(incoming.fd.get(), reinterpret_cast<char*>(&incoming.hello) + incoming.num_received,
             sizeof(Hello) - incoming.num_received, 0);
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (moved <= 0) {
      Refuse(incoming, "it left without a word");
      return true;
    }
    incoming.num_received += static_cast<size_t>(moved);
    const Hello& hello = incoming.hello;
    if (incoming.num_received >= sizeof(hello.magic) && hello.magic != Hello::kMagic) {
      Refuse(incoming, "it is no rank");
      return true;
    }
    if (incoming.num_received < sizeof(Hello)) return false;
    if (hello.incarnation != params_.incarnation || hello.epoch != params_.epoch ||
        hello.to_rank != params_.ep_rank ||
        hello.ep_size != static_cast<uint32_t>(params_.ep_size)) {
      Refuse(incoming, absl::StrCat("it is for rank ", hello.to_rank, " of ", hello.ep_size,
                                    ", incarnation ", hello.incarnation, " epoch ", hello.epoch));
      return true;
    }
    if (hello.from_rank <= params_.ep_rank || hello.from_rank >= params_.ep_size ||
        hello.channel >= kNumChannels || hello.secret != secret_) {
      Refuse(incoming,
             absl::StrCat("it says that it is rank ", hello.from_rank, " but does not prove it"));
      return true;
    }
    UniqueFd& link = Link(hello.from_rank, hello.channel);
    if (link.valid()) {
      Refuse(incoming, absl::StrCat("rank ", hello.from_rank, " is connected already"));
      return true;
    }
    Reply reply;
    reply.secret = peers_[hello.from_rank].secret;
    if (send(incoming.fd.get(), &reply, sizeof(reply), MSG_NOSIGNAL) != sizeof(reply)) {
      Refuse(incoming, "it left before the answer");
      return true;
    }
    Adopt(std::move(incoming.fd), link, hello.channel);
    return true;
  }

  // True when the peer has answered.
  absl::StatusOr<bool> Advance(Outgoing& outgoing) {
    const int fd = outgoing.fd.get();
    if (!outgoing.said_hello) {
      int error = 0;
      socklen_t error_size = sizeof(error);
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_size);
      if (error != 0) return Unreachable(outgoing.rank, strerror(error));
      Hello hello;
      hello.incarnation = params_.incarnation;
      hello.epoch = params_.epoch;
      hello.from_rank = params_.ep_rank;
      hello.to_rank = outgoing.rank;
      hello.channel = outgoing.channel;
      hello.ep_size = static_cast<uint32_t>(params_.ep_size);
      hello.secret = peers_[outgoing.rank].secret;
      if (send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
        return Unreachable(outgoing.rank, strerror(errno));
      }
      outgoing.said_hello = true;
      return false;
    }
    const ssize_t moved = recv(fd, reinterpret_cast<char*>(&outgoing.reply) + outgoing.num_received,
                               sizeof(Reply) - outgoing.num_received, 0);
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (moved <= 0) {
      return Unreachable(outgoing.rank, moved == 0 ? "it refused" : strerror(errno));
    }
    outgoing.num_received += static_cast<size_t>(moved);
    if (outgoing.num_received < sizeof(Reply)) return false;
    if (outgoing.reply.magic != Hello::kMagic || outgoing.reply.secret != secret_) {
      return Unreachable(outgoing.rank, "somebody else answers there");
    }
    Adopt(std::move(outgoing.fd), Link(outgoing.rank, outgoing.channel), outgoing.channel);
    return true;
  }

  static void Adopt(UniqueFd from, UniqueFd& link, uint32_t channel) {
    const int on = 1;
    setsockopt(from.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    // A firewall between ranks may forget a connection on which nothing moves; and if it has, that
    // should be known before the next step needs it.
    setsockopt(from.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(from.get(), IPPROTO_TCP, TCP_KEEPIDLE, &kKeepaliveIdleSeconds,
               sizeof(kKeepaliveIdleSeconds));
    setsockopt(from.get(), IPPROTO_TCP, TCP_KEEPINTVL, &kKeepaliveIntervalSeconds,
               sizeof(kKeepaliveIntervalSeconds));
    setsockopt(from.get(), IPPROTO_TCP, TCP_KEEPCNT, &kKeepaliveProbes, sizeof(kKeepaliveProbes));
    // As large as the system lets it be: the fewer wake-ups a payload takes, the better.
    if (channel == kData) {
      setsockopt(from.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));
    }
    link = std::move(from);
  }

  const TcpMeshParams& params_;
  std::vector<TcpPeerSockets> links_;
  std::vector<Peer> peers_;
  Secret secret_ = {};
  UniqueFd listener_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;  // oldest first
  int64_t num_refused_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<TcpPeerSockets>> ConnectTcpMesh(const TcpMeshParams& params) {
  return MeshConnector(params).Connect();
}

}  // namespace expertmesh
