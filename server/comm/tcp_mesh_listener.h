#ifndef EXPERTMESH_SERVER_COMM_TCP_MESH_LISTENER_H_
#define EXPERTMESH_SERVER_COMM_TCP_MESH_LISTENER_H_

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/comm/tcp_hello.h"
#include "server/comm/tcp_mesh.h"
#include "server/comm/tcp_peer_sockets.h"
#include "server/comm/unique_fd.h"

namespace expertmesh {

// Where the ranks above this one connect, while the mesh is formed. Whoever cannot show that it is
// one of them is refused with a line in the log. Not thread safe; nothing blocks.
class TcpMeshListener {
 public:
  // Both must outlive it. `links` [ep_size] get what is accepted.
  TcpMeshListener(const TcpMeshParams& params, std::vector<TcpPeerSockets>& links)
      : params_(params), links_(links) {}

  // UNAVAILABLE when the address cannot be bound, INTERNAL without randomness.
  absl::Status Listen();
  // After Listen: what the others need to know.
  uint16_t port() const;
  const TcpSecret& secret() const { return secret_; }

  // Before Serve: what each rank's listener left in the store, [ep_size].
  void ExpectPeers(std::vector<TcpSecret> secrets) { peer_secrets_ = std::move(secrets); }

  // What to wait for, and how long at most.
  void AppendPolled(std::vector<pollfd>* polled) const;
  absl::Duration MaxWait() const;
  // Those that were appended, after the wait.
  void Serve(absl::Span<const pollfd> polled);

 private:
  struct Incoming {
    UniqueFd fd;
    std::string from;
    absl::Time accepted_at;
    TcpHello hello;
    size_t num_received = 0;
  };

  bool IsFull() const;
  void Accept();
  void DropSilent();
  // True when the connection is done with: it is a link now, or was refused.
  bool ReadHello(Incoming& incoming);
  // Why the hello, which has come whole, is refused; empty if it is not.
  std::string Objection(const TcpHello& hello) const;
  void Refuse(const Incoming& incoming, absl::string_view why);

  const TcpMeshParams& params_;
  std::vector<TcpPeerSockets>& links_;
  std::vector<TcpSecret> peer_secrets_;
  TcpSecret secret_ = {};
  UniqueFd listener_;
  std::vector<Incoming> incoming_;  // oldest first
  int64_t num_refused_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_MESH_LISTENER_H_
