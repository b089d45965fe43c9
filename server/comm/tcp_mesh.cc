#include "server/comm/tcp_mesh.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "kernels/base/steady_now.h"
#include "server/comm/socket_address.h"
#include "server/comm/tcp_hello.h"
#include "server/comm/tcp_mesh_listener.h"
#include "server/comm/unique_fd.h"
#include "server/ops/rank_text.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kCancelPollInterval = absl::Milliseconds(10);

struct Peer {
  std::string address;
  uint16_t port = 0;
  TcpSecret secret = {};
};

struct Outgoing {
  int32_t rank = 0;
  TcpChannel channel = TcpChannel::kData;
  UniqueFd fd;
  bool said_hello = false;
  TcpHelloReply reply;
  size_t num_received = 0;
};

class MeshConnector {
 public:
  explicit MeshConnector(const TcpMeshParams& params)
      : params_(params), links_(params.ep_size), listener_(params_, links_) {}

  absl::StatusOr<std::vector<TcpPeerSockets>> Connect() {
    absl::Status status = CheckParams();
    if (status.ok() && params_.ep_size > 1) {
      status = listener_.Listen();
      if (status.ok()) status = Publish();
      if (status.ok()) status = ReadPeers();
      for (int32_t rank = 0; status.ok() && rank < params_.ep_rank; ++rank) {
        for (const TcpChannel channel : {TcpChannel::kData, TcpChannel::kControl}) {
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

  absl::Status Publish() {
    const TcpSecret& secret = listener_.secret();
    return params_.store->Set(
        Key(params_.ep_rank),
        absl::StrCat(ReachedAt(), " ", listener_.port(), " ",
                     absl::BytesToHexString(absl::string_view(secret.data(), secret.size()))));
  }

  absl::Status ReadPeers() {
    peers_.resize(params_.ep_size);
    std::vector<TcpSecret> secrets(params_.ep_size);
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
      if (secret.size() != sizeof(TcpSecret)) {
        return absl::InvalidArgumentError(
            absl::StrCat("rank ", rank, " left no address in the rendezvous store"));
      }
      peers_[rank].address = parts[0];
      peers_[rank].port = static_cast<uint16_t>(port);
      std::copy(secret.begin(), secret.end(), peers_[rank].secret.begin());
      secrets[rank] = peers_[rank].secret;
    }
    listener_.ExpectPeers(std::move(secrets));
    return absl::OkStatus();
  }

  absl::Status StartConnecting(int32_t rank, TcpChannel channel) {
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

  std::vector<int32_t> Missing() const {
    std::vector<int32_t> missing;
    for (int32_t rank = 0; rank < params_.ep_size; ++rank) {
      if (rank != params_.ep_rank && !links_[rank].are_there()) missing.push_back(rank);
    }
    return missing;
  }

  absl::Status PollOnce() {
    std::vector<pollfd> polled;
    for (const Outgoing& outgoing : outgoing_) {
      polled.push_back({outgoing.fd.get(), short(outgoing.said_hello ? POLLIN : POLLOUT), 0});
    }
    const size_t num_outgoing = polled.size();
    listener_.AppendPolled(&polled);
    if (params_.cancelled != nullptr && *params_.cancelled) {
      return absl::CancelledError("the epoch was given up while it was formed");
    }
    absl::Duration longest = std::min(listener_.MaxWait(), absl::Minutes(1));
    if (params_.cancelled != nullptr) longest = std::min(longest, kCancelPollInterval);
    const absl::Duration remaining =
        std::clamp(params_.deadline - SteadyNow(), absl::ZeroDuration(), longest);
    const int num_ready = poll(polled.data(), polled.size(),
                               static_cast<int>(absl::ToInt64Milliseconds(remaining)) + 1);
    if (num_ready < 0 && errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("poll: ", strerror(errno)));
    }
    if (SteadyNow() >= params_.deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("no connection with ranks ", absl::StrJoin(Missing(), ", ")));
    }
    if (num_ready < 0) return absl::OkStatus();
    listener_.Serve(absl::MakeConstSpan(polled).subspan(num_outgoing));
    // Back to front, so that what is finished can be erased.
    for (size_t i = outgoing_.size(); i-- > 0;) {
      if (polled[i].revents == 0) continue;
      const absl::StatusOr<bool> finished = Advance(outgoing_[i]);
      if (!finished.ok()) return finished.status();
      if (*finished) outgoing_.erase(outgoing_.begin() + static_cast<ptrdiff_t>(i));
    }
    return absl::OkStatus();
  }

  // True when the peer has answered.
  absl::StatusOr<bool> Advance(Outgoing& outgoing) {
    const int fd = outgoing.fd.get();
    if (!outgoing.said_hello) {
      int error = 0;
      socklen_t error_size = sizeof(error);
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_size);
      if (error != 0) return Unreachable(outgoing.rank, strerror(error));
      TcpHello hello;
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
                               sizeof(outgoing.reply) - outgoing.num_received, 0);
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (moved <= 0) {
      return Unreachable(outgoing.rank, moved == 0 ? "it refused" : strerror(errno));
    }
    outgoing.num_received += static_cast<size_t>(moved);
    if (outgoing.num_received < sizeof(outgoing.reply)) return false;
    if (outgoing.reply.magic != TcpHello::kMagic || outgoing.reply.secret != listener_.secret()) {
      return Unreachable(outgoing.rank, "somebody else answers there");
    }
    links_[outgoing.rank].Adopt(std::move(outgoing.fd), outgoing.channel);
    return true;
  }

  const TcpMeshParams& params_;
  std::vector<TcpPeerSockets> links_;
  std::vector<Peer> peers_;
  TcpMeshListener listener_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace

absl::StatusOr<std::vector<TcpPeerSockets>> ConnectTcpMesh(const TcpMeshParams& params) {
  return MeshConnector(params).Connect();
}

}  // namespace expertmesh
