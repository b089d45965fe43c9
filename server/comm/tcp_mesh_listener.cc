#include "server/comm/tcp_mesh_listener.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "server/comm/socket_address.h"
#include "server/ops/logging.h"

namespace expertmesh {
namespace {

// Strangers may connect and say nothing: so many are waited for at once, each for so long that no
// rank is slower.
constexpr size_t kMaxSilentConnections = 128;
constexpr absl::Duration kPatienceForHello = absl::Seconds(1);
// Lines in the log about strangers, so that they cannot fill it.
constexpr int kMaxRefusalsLogged = 32;

}  // namespace

absl::Status TcpMeshListener::Listen() {
  const absl::StatusOr<SocketAddress> address = SocketAddress::Parse(params_.bind_address, 0);
  if (!address.ok()) return address.status();
  listener_.reset(socket(address->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener_.valid() || bind(listener_.get(), address->data(), address->size()) != 0 ||
      listen(listener_.get(), SOMAXCONN) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", params_.bind_address, ": ", strerror(errno)));
  }
  if (getrandom(secret_.data(), secret_.size(), 0) != static_cast<ssize_t>(secret_.size())) {
    return absl::InternalError("getrandom");
  }
  return absl::OkStatus();
}

uint16_t TcpMeshListener::port() const { return SocketAddress::OfSocket(listener_.get()).port(); }

bool TcpMeshListener::IsFull() const { return incoming_.size() >= kMaxSilentConnections; }

absl::Duration TcpMeshListener::MaxWait() const {
  return IsFull() ? kPatienceForHello : absl::InfiniteDuration();
}

void TcpMeshListener::AppendPolled(std::vector<pollfd>* polled) const {
  polled->push_back({listener_.get(), short(IsFull() ? 0 : POLLIN), 0});
  for (const Incoming& incoming : incoming_) polled->push_back({incoming.fd.get(), POLLIN, 0});
}

void TcpMeshListener::Serve(absl::Span<const pollfd> polled) {
  const bool was_full = IsFull();
  // Back to front, so that what is finished can be erased.
  for (size_t i = incoming_.size(); i-- > 0;) {
    if (polled[1 + i].revents != 0 && ReadHello(incoming_[i])) {
      incoming_.erase(incoming_.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  if (polled[0].revents != 0) Accept();
  if (was_full) DropSilent();
}

void TcpMeshListener::Accept() {
  while (!IsFull()) {
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

void TcpMeshListener::DropSilent() {
  const absl::Time too_old = SteadyNow() - kPatienceForHello;
  while (!incoming_.empty() && incoming_.front().accepted_at <= too_old) {
    Refuse(incoming_.front(), "it says nothing, and others wait");
    incoming_.erase(incoming_.begin());
  }
}

bool TcpMeshListener::ReadHello(Incoming& incoming) {
  TcpHello& hello = incoming.hello;
  const ssize_t moved =
      recv(incoming.fd.get(), reinterpret_cast<char*>(&hello) + incoming.num_received,
           sizeof(hello) - incoming.num_received, 0);
  if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (moved <= 0) {
    Refuse(incoming, "it left without a word");
    return true;
  }
  incoming.num_received += static_cast<size_t>(moved);
  if (incoming.num_received >= sizeof(hello.magic) && hello.magic != TcpHello::kMagic) {
    Refuse(incoming, "it is no rank");
    return true;
  }
  if (incoming.num_received < sizeof(hello)) return false;
  if (const std::string objection = Objection(hello); !objection.empty()) {
    Refuse(incoming, objection);
    return true;
  }
  TcpHelloReply reply;
  reply.secret = peer_secrets_[hello.from_rank];
  if (send(incoming.fd.get(), &reply, sizeof(reply), MSG_NOSIGNAL) != sizeof(reply)) {
    Refuse(incoming, "it left before the answer");
    return true;
  }
  links_[hello.from_rank].Adopt(std::move(incoming.fd), hello.channel);
  return true;
}

std::string TcpMeshListener::Objection(const TcpHello& hello) const {
  if (hello.incarnation != params_.incarnation || hello.epoch != params_.epoch ||
      hello.to_rank != params_.ep_rank || hello.ep_size != static_cast<uint32_t>(params_.ep_size)) {
    return absl::StrCat("it is for rank ", hello.to_rank, " of ", hello.ep_size, ", incarnation ",
                        hello.incarnation, " epoch ", hello.epoch);
  }
  if (hello.from_rank <= params_.ep_rank || hello.from_rank >= params_.ep_size ||
      static_cast<uint32_t>(hello.channel) >= kNumTcpChannels || hello.secret != secret_) {
    return absl::StrCat("it says that it is rank ", hello.from_rank, " but does not prove it");
  }
  if (links_[hello.from_rank].has(hello.channel)) {
    return absl::StrCat("rank ", hello.from_rank, " is connected already");
  }
  return "";
}

void TcpMeshListener::Refuse(const Incoming& incoming, absl::string_view why) {
  if (++num_refused_ > kMaxRefusalsLogged) return;
  LogWarning("refused a connection to the communicator", {{"from", incoming.from},
                                                          {"why", why},
                                                          {"ep_rank", params_.ep_rank},
                                                          {"epoch", params_.epoch},
                                                          {"num_refused", num_refused_}});
}

}  // namespace expertmesh
