#ifndef EXPERTMESH_SERVER_RPC_GRPC_SERVER_H_
#define EXPERTMESH_SERVER_RPC_GRPC_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/rpc/tls_watch.h"

namespace grpc {
class Service;
}

namespace expertmesh {

// Settings of gRPC and of the allocator that must stand before gRPC's first use, so first thing in
// main once signals are blocked (gRPC starts threads here): reads above 128 KB are ten times slower
// with gRPC's default, and fresh pages cost more than the copy into them. GRPC_EXPERIMENTS in the
// environment wins. Messages of gRPC itself go to the log.
void TuneProcessForGrpc();
// Instead of a return from such a main: gRPC's threads run to the very end, since its last
// reference is never let go, and must not find the statics of gRPC and of OpenSSL destroyed under
// them. What is buffered for standard output and standard error is written.
[[noreturn]] void ExitWithoutTeardown(int exit_code);

struct GrpcServerOptions {
  // "host:port", "[v6]:port" or "unix:path". Port 0: the kernel's choice. Never shared with another
  // process.
  std::string listen;
  int64_t max_message_bytes = int64_t{64} << 20;  // received; what is sent is not limited
  // What gRPC may hold in buffers for all calls together; above it, it stops reading from sockets
  // and then sheds calls.
  int64_t max_transport_bytes = int64_t{1} << 30;
  // A connection that is silent for that long is asked for a sign of life, and closed when none
  // comes within the timeout: clients vanish without a word. A client may ask the same of the
  // server every 10 seconds; one that asks more often loses its connection.
  absl::Duration keepalive_time = absl::Minutes(1);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  std::shared_ptr<TlsWatch> tls;  // null: no TLS
};

// One listener with its services, gRPC's health service (NOT_SERVING until SetServing) and
// reflection. Thread safe.
class GrpcServer {
 public:
  // `services` with their full names outlive the server. UNAVAILABLE (the address is taken or not
  // ours), naming the address.
  struct NamedService {
    std::string name;
    grpc::Service* service = nullptr;
  };
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options,
                                                           std::vector<NamedService> services);
  ~GrpcServer();

  int port() const;
  // Health of "" and of every service.
  void SetServing(bool serving);
  // Takes no new calls; blocks until all have ended, or cancels them at `deadline`.
  void Shutdown(absl::Time deadline);
  // Blocks until clients' machines have all bytes that were written for them, or `deadline`. Before
  // Shutdown, which lets go of connections whose calls have ended: what their sockets still hold is
  // lost then if anything of the client's is unread.
  void AwaitSent(absl::Time deadline) const;
  // Before a Shutdown that is not to be polite: it tells clients that calls which it has not
  // answered are CANCELLED, for as long as they do not know that it goes. Those of a connection
  // that is no more are UNAVAILABLE. Not with a "unix:" address.
  void EndConnections();

 private:
  struct Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_GRPC_SERVER_H_
