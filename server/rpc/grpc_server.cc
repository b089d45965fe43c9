#include "server/rpc/grpc_server.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <malloc.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/steady_now.h"
#include "server/ops/logging.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/server_sockets.h"
#include "server/rpc/tls_credentials.h"

// There in builds with AddressSanitizer, which looks for leaks where an exit would destroy statics.
extern "C" void __lsan_do_leak_check() __attribute__((weak));

namespace expertmesh {
namespace {

constexpr int kReadChunkBytes = 1 << 20;
constexpr int kMinReadChunkBytes = 64 << 10;
constexpr int kMaxStreamsPerConnection = 1024;
constexpr absl::Duration kMinClientPing = absl::Seconds(10);

// Since then gRPC's listeners are broken on purpose.
std::atomic<bool> has_ended_connections{false};

void LogOfGrpc(gpr_log_func_args* args) {
  const bool is_known = has_ended_connections.load(std::memory_order_relaxed) &&
                        absl::StrContains(args->message, "Failed accept4");
  const LogLevel level =
      args->severity == GPR_LOG_SEVERITY_ERROR && !is_known ? LogLevel::kWarning : LogLevel::kDebug;
  Log(level, "grpc", {{"file", args->file}, {"line", args->line}, {"text", args->message}});
}

int Millis(absl::Duration duration) {
  return static_cast<int>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, std::numeric_limits<int>::max()));
}

// Binds and lets go, without listening: nobody's connection is taken and dropped.
std::string BindProblemOf(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  std::string problem;
  if (fd < 0 || bind(fd, address.ai_addr, address.ai_addrlen) != 0) problem = std::strerror(errno);
  if (fd >= 0) close(fd);
  return problem;
}

// Why "host:port" cannot be bound, in the system's words; empty when it can, or nobody knows. gRPC
// itself says it in half a kilobyte.
std::string BindProblem(const std::string& listen) {
  if (absl::StartsWith(listen, "unix:")) return "";
  const size_t colon = listen.rfind(':');
  if (colon == std::string::npos) return "no port in it";
  std::string host = listen.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), listen.c_str() + colon + 1, &hints, &found);
  if (error != 0) return gai_strerror(error);
  std::string problem = BindProblemOf(*found);
  // One of a name's addresses is enough for gRPC.
  for (const addrinfo* other = found->ai_next; other != nullptr; other = other->ai_next) {
    if (!problem.empty() && BindProblemOf(*other).empty()) problem.clear();
  }
  freeaddrinfo(found);
  return problem;
}

}  // namespace

void TuneProcessForGrpc() {
  setenv("GRPC_EXPERIMENTS", "-tcp_read_chunks", /*overwrite=*/0);
  mallopt(M_MMAP_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
  gpr_set_log_function(LogOfGrpc);
  // Never let go: once a write had to wait, one of gRPC's threads polls in turns of 10 s, and
  // grpc_shutdown waits for it. Nothing is left for it to do when this process ends.
  grpc_init();
}

void ExitWithoutTeardown(int exit_code) {
  std::fflush(nullptr);
  if (__lsan_do_leak_check != nullptr) __lsan_do_leak_check();
  // Not std::_Exit: sanitizers look at this one.
  _exit(exit_code);
}

struct GrpcServer::Impl {
  std::vector<NamedService> services;
  std::shared_ptr<TlsWatch> tls;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
  std::mutex shutdown_mutex;
  bool is_shut_down = false;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GrpcServer::~GrpcServer() { Shutdown(SteadyNow()); }

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options,
                                                              std::vector<NamedService> services) {
  if (const std::string problem = BindProblem(options.listen); !problem.empty()) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options.listen, ": ", problem));
  }

  static std::once_flag plugins_once;
  std::call_once(plugins_once, [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::EnableDefaultHealthCheckService(true);
  });
  auto impl = std::make_unique<Impl>();
  impl->tls = options.tls;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.listen, NewServerCredentials(options.tls.get()), &impl->port);
  for (const NamedService& service : services) builder.RegisterService(service.service);
  builder.SetMaxReceiveMessageSize(static_cast<int>(
      std::min<int64_t>(options.max_message_bytes, std::numeric_limits<int>::max())));
  builder.SetMaxSendMessageSize(-1);
  grpc::ResourceQuota quota("expertmesh");
  quota.Resize(static_cast<size_t>(options.max_transport_bytes));
  builder.SetResourceQuota(quota);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_TCP_READ_CHUNK_SIZE, kReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, kMinReadChunkBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Millis(options.keepalive_time));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Millis(options.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             Millis(kMinClientPing));
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) {
    const std::string problem = BindProblem(options.listen);
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", options.listen, ": ",
                     problem.empty() ? "see the lines above" : problem.c_str()));
  }
  impl->services = std::move(services);
  auto server = std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
  server->SetServing(false);
  return server;
}

int GrpcServer::port() const { return impl_->port; }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = impl_->server->GetHealthCheckService();
  health->SetServingStatus("", serving);
  for (const NamedService& service : impl_->services) {
    health->SetServingStatus(service.name, serving);
  }
}

void GrpcServer::AwaitSent(absl::Time deadline) const {
  while (UnsentBytes(port()) > 0 && SteadyNow() < deadline) absl::SleepFor(absl::Milliseconds(2));
}

void GrpcServer::EndConnections() {
  has_ended_connections.store(true, std::memory_order_relaxed);
  StopTakingConnections(port());
  expertmesh::EndConnections(port());
}

void GrpcServer::Shutdown(absl::Time deadline) {
  const std::lock_guard<std::mutex> lock(impl_->shutdown_mutex);
  if (impl_->is_shut_down) return;
  impl_->is_shut_down = true;
  impl_->server->Shutdown(ToGrpcDeadline(deadline));
}

}  // namespace expertmesh
