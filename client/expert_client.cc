#include "client/expert_client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/security/credentials.h>
#include <stdlib.h>

#include <algorithm>
#include <climits>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_error.h"
#include "client/forward_wire.h"
#include "client/retrying_call.h"

namespace expertmesh {
namespace {

int Millis(absl::Duration duration) {
  return static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, INT_MAX));
}

grpc::ChannelArguments ChannelArgs(const ExpertClientOptions& options) {
  const int max_bytes =
      static_cast<int>(std::clamp<int64_t>(options.max_message_bytes, 1, INT_MAX));
  grpc::ChannelArguments args;
  args.SetMaxSendMessageSize(max_bytes);
  args.SetMaxReceiveMessageSize(max_bytes);
  args.SetInt("grpc.experimental.tcp_read_chunk_size", 1 << 20);
  args.SetInt("grpc.experimental.tcp_min_read_chunk_size", 64 << 10);
  // Retries are RetryingCall's, which follows the server's advice; gRPC's own would keep a second
  // copy of each request.
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, Millis(options.keepalive_time));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Millis(options.keepalive_timeout));
  return args;
}

// Where a blocking call waits for its answer. Made of std's parts, for ThreadSanitizer does not see
// into Debian's build of absl::Notification.
template <typename T>
class AnswerSlot {
 public:
  void Put(absl::StatusOr<T> answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    answer_ = std::move(answer);
    // Under the mutex: the slot goes as soon as Take has seen the answer.
    answered_.notify_one();
  }
  absl::StatusOr<T> Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    answered_.wait(lock, [this] { return answer_.has_value(); });
    return *std::move(answer_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable answered_;
  std::optional<absl::StatusOr<T>> answer_;
};

}  // namespace

void TuneGrpcBeforeFirstUse() { setenv("GRPC_EXPERIMENTS", "-tcp_read_chunks", /*overwrite=*/0); }

// Shared with the running calls, so that the last one to end is the last to need it.
struct ExpertClient::Connection {
  std::shared_ptr<grpc::GenericStub> stub;
  RetryPolicy retry;

  std::mutex mutex;
  std::condition_variable idle;
  int64_t num_running = 0;

  void Begin() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++num_running;
  }
  void End() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (--num_running == 0) idle.notify_all();
  }
  void WaitUntilIdle() {
    std::unique_lock<std::mutex> lock(mutex);
    idle.wait(lock, [this] { return num_running == 0; });
  }

  // Blocking unary call in protobuf messages.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(const char* method, const Request& request,
                                const CallOptions& call) {
    grpc::ByteBuffer bytes;
    bool own_buffer = false;
    if (const grpc::Status status =
            grpc::SerializationTraits<Request>::Serialize(request, &bytes, &own_buffer);
        !status.ok()) {
      return StatusOfServer(status);
    }
    AnswerSlot<grpc::ByteBuffer> slot;
    RetryingCall::Start(
        stub, method, std::move(bytes), retry, absl::Now() + call.timeout,
        [&slot](absl::StatusOr<grpc::ByteBuffer> result) { slot.Put(std::move(result)); });
    absl::StatusOr<grpc::ByteBuffer> answer = slot.Take();
    if (!answer.ok()) return answer.status();
    Response response;
    if (const grpc::Status status =
            grpc::SerializationTraits<Response>::Deserialize(&*answer, &response);
        !status.ok()) {
      return absl::DataLossError(absl::StrCat("malformed answer to ", method));
    }
    return response;
  }
};

ExpertClient::ExpertClient(std::shared_ptr<Connection> connection)
    : connection_(std::move(connection)) {}

ExpertClient::~ExpertClient() {
  connection_->WaitUntilIdle();
  // Here, not on the gRPC thread that may still hold the connection (see RetryingCall).
  connection_->stub.reset();
}

absl::StatusOr<std::unique_ptr<ExpertClient>> ExpertClient::Create(
    const ExpertClientOptions& options) {
  if (options.tls_certificate.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("tls_certificate and tls_key: give both or none");
  }
  if (options.tls_ca.empty() && !options.tls_certificate.empty()) {
    return absl::InvalidArgumentError(
        "tls_certificate without tls_ca: the server would not be verified");
  }
  if (options.retry.max_attempts < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "retry.max_attempts is ", options.retry.max_attempts, "; it must be at least 1"));
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!options.tls_ca.empty()) {
    grpc::SslCredentialsOptions tls;
    tls.pem_root_certs = options.tls_ca;
    tls.pem_private_key = options.tls_key;
    tls.pem_cert_chain = options.tls_certificate;
    credentials = grpc::SslCredentials(tls);
  }
  auto connection = std::make_shared<Connection>();
  connection->stub = std::make_shared<grpc::GenericStub>(
      grpc::CreateCustomChannel(options.target, credentials, ChannelArgs(options)));
  connection->retry = options.retry;
  return std::unique_ptr<ExpertClient>(new ExpertClient(std::move(connection)));
}

void ExpertClient::ForwardAsync(const ForwardInput& input, const CallOptions& call,
                                ForwardDone done) {
  absl::StatusOr<grpc::ByteBuffer> bytes = EncodeForwardRequest(input);
  if (!bytes.ok()) return done(bytes.status());
  connection_->Begin();
  RetryingCall::Start(connection_->stub, "/expertmesh.v1.ExpertService/Forward", *std::move(bytes),
                      connection_->retry, absl::Now() + call.timeout,
                      [connection = connection_,
                       done = std::move(done)](absl::StatusOr<grpc::ByteBuffer> answer) mutable {
                        done(answer.ok() ? DecodeForwardResponse(*answer)
                                         : absl::StatusOr<ForwardOutput>(answer.status()));
                        connection->End();
                      });
}

absl::StatusOr<ForwardOutput> ExpertClient::Forward(const ForwardInput& input,
                                                    const CallOptions& call) {
  AnswerSlot<ForwardOutput> slot;
  ForwardAsync(input, call,
               [&slot](absl::StatusOr<ForwardOutput> result) { slot.Put(std::move(result)); });
  return slot.Take();
}

std::unique_ptr<ForwardStream> ExpertClient::OpenForwardStream(
    const ForwardStreamOptions& options) {
  return ForwardStream::Open(connection_->stub, options);
}

absl::StatusOr<v1::GetModelResponse> ExpertClient::GetModel(const std::string& model,
                                                            const CallOptions& call) {
  v1::GetModelRequest request;
  request.set_model(model);
  return connection_->Call<v1::GetModelRequest, v1::GetModelResponse>(
      "/expertmesh.v1.ExpertService/GetModel", request, call);
}

absl::StatusOr<v1::ListModelsResponse> ExpertClient::ListModels(const CallOptions& call) {
  return connection_->Call<v1::ListModelsRequest, v1::ListModelsResponse>(
      "/expertmesh.v1.ExpertService/ListModels", v1::ListModelsRequest(), call);
}

absl::StatusOr<v1::ExplainResponse> ExpertClient::Explain(const v1::ExplainRequest& request,
                                                          const CallOptions& call) {
  return connection_->Call<v1::ExplainRequest, v1::ExplainResponse>(
      "/expertmesh.v1.ExpertService/Explain", request, call);
}

absl::StatusOr<v1::GetStatusResponse> ExpertClient::GetStatus(const CallOptions& call) {
  return connection_->Call<v1::GetStatusRequest, v1::GetStatusResponse>(
      "/expertmesh.v1.AdminService/GetStatus", v1::GetStatusRequest(), call);
}

}  // namespace expertmesh
