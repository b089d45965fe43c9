#ifndef EXPERTMESH_CLIENT_EXPERT_CLIENT_H_
#define EXPERTMESH_CLIENT_EXPERT_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/forward_input.h"
#include "client/forward_stream.h"
#include "expertmesh/v1/admin.pb.h"

namespace expertmesh {

// gRPC 1.51 reads messages above 128 KB ten times slower than it could. Call
// this first thing in main, before anything of gRPC runs; it sets GRPC_EXPERIMENTS unless the
// environment does so already.
void TuneGrpcBeforeFirstUse();

struct RetryPolicy {
  int max_attempts = 4;  // in all; 1 never retries
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Seconds(2);
  double backoff_multiplier = 2.0;
};

struct ExpertClientOptions {
  std::string target =
      "127.0.0.1:50051";  // anything that gRPC resolves, e.g. "dns:///experts:50051"
  // PEM text. With `tls_ca` the connection is TLS; certificate and key (both or none) make it
  // mutual.
  std::string tls_ca;
  std::string tls_certificate;
  std::string tls_key;
  // Also the answer's limit. Servers have one of their own, which their errors name.
  int64_t max_message_bytes = int64_t{256} << 20;
  RetryPolicy retry;
  // While calls run, a server that is silent for that long is asked for a sign of life, and taken
  // for dead (UNAVAILABLE) when none comes within the timeout. Servers refuse clients that ask more
  // than once in 10 seconds.
  absl::Duration keepalive_time = absl::Seconds(30);
  absl::Duration keepalive_timeout = absl::Seconds(10);
};

struct CallOptions {
  // For all attempts together.
  absl::Duration timeout = absl::Seconds(30);
};

// A connection to one ExpertMesh service. Thread safe; cheap to share, dear to make: keep one per
// target.
//
// Every call is retried with jittered exponential backoff while time and attempts last, when the
// server said UNAVAILABLE, or RESOURCE_EXHAUSTED with advice when to retry; advice is followed. The
// calls are idempotent, so a retry is always right. Errors have the server's code; client_error.h
// reads the details. What the input itself got wrong is INVALID_ARGUMENT without asking the server.
class ExpertClient {
 public:
  using ForwardDone = absl::AnyInvocable<void(absl::StatusOr<ForwardOutput>)>;

  // Does not wait for the connection. INVALID_ARGUMENT for a certificate without its key.
  static absl::StatusOr<std::unique_ptr<ExpertClient>> Create(const ExpertClientOptions& options);

  // Waits for the calls that are still running, all of which have deadlines.
  ~ExpertClient();
  ExpertClient(const ExpertClient&) = delete;
  ExpertClient& operator=(const ExpertClient&) = delete;

  // Blocking.
  absl::StatusOr<ForwardOutput> Forward(const ForwardInput& input, const CallOptions& call = {});

  // Returns at once; `done` runs once, on a gRPC thread, and must not block (it may start other
  // calls). An error in the input itself is reported before the function returns, on this thread.
  // Of `input` only TensorBytes with an owner are kept.
  void ForwardAsync(const ForwardInput& input, const CallOptions& call, ForwardDone done);

  // For many calls at a time (forward_stream.h). Does not wait for the connection. The stream may
  // outlive the client.
  std::unique_ptr<ForwardStream> OpenForwardStream(const ForwardStreamOptions& options = {});

  // Blocking.
  absl::StatusOr<v1::GetModelResponse> GetModel(const std::string& model,
                                                const CallOptions& call = {});
  absl::StatusOr<v1::ListModelsResponse> ListModels(const CallOptions& call = {});
  absl::StatusOr<v1::ExplainResponse> Explain(const v1::ExplainRequest& request,
                                              const CallOptions& call = {});
  // For operators; UNIMPLEMENTED where the server does not allow it on this port (--allow_admin).
  absl::StatusOr<v1::GetStatusResponse> GetStatus(const CallOptions& call = {});

 private:
  struct Connection;
  explicit ExpertClient(std::shared_ptr<Connection> connection);
  std::shared_ptr<Connection> connection_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_EXPERT_CLIENT_H_
