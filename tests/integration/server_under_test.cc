#include "tests/integration/server_under_test.h"

#include <arpa/inet.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <mutex>
#include <ostream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "expertmesh/v1/admin.grpc.pb.h"
#include "expertmesh/v1/expert_service.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "kernels/base/dtype.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);

void SetTimeout(grpc::ClientContext* context, absl::Duration timeout) {
  if (timeout == absl::InfiniteDuration()) return;
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

CallOutcome OutcomeOf(const grpc::Status& status) {
  CallOutcome outcome;
  outcome.code = static_cast<absl::StatusCode>(status.error_code());
  outcome.message = status.error_message();
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const google::protobuf::Any& any : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&info)) {
      outcome.reason = info.reason();
      EXPECT_EQ(info.domain(), "expertmesh");
      const auto find = [&info](const char* key) {
        const auto found = info.metadata().find(key);
        return found == info.metadata().end() ? std::string() : found->second;
      };
      outcome.field = find("field");
      outcome.value = find("value");
      outcome.limit = find("limit");
    } else if (any.UnpackTo(&bad)) {
      outcome.bad_request_field = bad.field_violations(0).field();
    } else if (any.UnpackTo(&retry)) {
      outcome.retry_after = absl::Seconds(retry.retry_delay().seconds()) +
                            absl::Nanoseconds(retry.retry_delay().nanos());
    }
  }
  return outcome;
}

template <typename Response>
absl::StatusOr<Response> ToStatusOr(const grpc::Status& status, Response response) {
  if (status.ok()) return response;
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::string CheckHealth(grpc::health::v1::Health::Stub* stub, const std::string& service) {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, request, &response);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) return "NOT_FOUND";
  if (!status.ok()) return status.error_message();
  return grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status());
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const CallOutcome& outcome) {
  return out << absl::StatusCodeToString(outcome.code) << ' ' << outcome.reason << ": "
             << outcome.message;
}

struct PendingForward::State {
  std::mutex mutex;
  std::unique_ptr<grpc::ClientContext> context = std::make_unique<grpc::ClientContext>();
  v1::ForwardRequest request;
  v1::ForwardResponse response;
  std::promise<CallOutcome> promise;
  std::shared_future<CallOutcome> outcome = promise.get_future().share();
};

void PendingForward::Cancel() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->context != nullptr) state_->context->TryCancel();
}

bool PendingForward::IsDone() const {
  return state_->outcome.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

CallOutcome PendingForward::Wait() { return state_->outcome.get(); }

struct ServerUnderTest::Stubs {
  explicit Stubs(const std::shared_ptr<grpc::Channel>& channel)
      : service(channel), admin(channel), health(channel), reflection(channel) {}
  v1::ExpertService::Stub service;
  v1::AdminService::Stub admin;
  grpc::health::v1::Health::Stub health;
  grpc::reflection::v1alpha::ServerReflection::Stub reflection;
};

ServerUnderTest::~ServerUnderTest() = default;

std::string ServerUnderTest::address() const { return absl::StrCat("127.0.0.1:", port_); }

std::unique_ptr<ServerUnderTest> ServerUnderTest::Start(const Options& options) {
  ServerProcess::Options process;
  process.path = SiblingBinary(options.program);
  process.args = {absl::StrCat("--checkpoint=", options.checkpoint), "--listen=127.0.0.1:0",
                  "--metrics_listen=127.0.0.1:0"};
  process.args.insert(process.args.end(), options.args.begin(), options.args.end());
  process.environment = options.environment;
  auto started = ServerProcess::Start(std::move(process));
  if (!started.ok()) {
    ADD_FAILURE() << started.status();
    return nullptr;
  }
  auto server = std::unique_ptr<ServerUnderTest>(new ServerUnderTest());
  server->process_ = *std::move(started);
  auto metrics =
      server->process_->WaitForLine("metrics on http://[^:]*:([0-9]+)/metrics", kStartTimeout);
  auto port = server->process_->WaitForLine("listening on 127\\.0\\.0\\.1:([0-9]+)", kStartTimeout);
  if (port.ok() && options.wait_until_serving) {
    auto ready =
        server->process_->WaitForLine("serving .* on 127\\.0\\.0\\.1:([0-9]+)", kStartTimeout);
    if (!ready.ok()) port = ready.status();
  }
  if (!port.ok() || !metrics.ok()) {
    ADD_FAILURE() << port.status() << "\n" << metrics.status();
    return nullptr;
  }
  EXPECT_TRUE(absl::SimpleAtoi((*port)[1], &server->port_));
  EXPECT_TRUE(absl::SimpleAtoi((*metrics)[1], &server->metrics_port_));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  server->stubs_ = std::make_unique<Stubs>(
      grpc::CreateCustomChannel(server->address(), grpc::InsecureChannelCredentials(), arguments));
  return server;
}

PendingForward ServerUnderTest::StartForward(const v1::ForwardRequest& request,
                                             absl::Duration timeout) {
  auto state = std::make_shared<PendingForward::State>();
  state->request = request;
  SetTimeout(state->context.get(), timeout);
  stubs_->service.async()->Forward(state->context.get(), &state->request, &state->response,
                                   [state](const grpc::Status& status) {
                                     CallOutcome outcome = OutcomeOf(status);
                                     outcome.response = std::move(state->response);
                                     {
                                       // It holds the channel. gRPC 1.51 aborts when a channel's
                                       // last reference goes on one of its own threads, as it could
                                       // after the answer is known.
                                       const std::lock_guard<std::mutex> lock(state->mutex);
                                       state->context.reset();
                                     }
                                     state->promise.set_value(std::move(outcome));
                                   });
  return PendingForward(state);
}

CallOutcome ServerUnderTest::Forward(const v1::ForwardRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetTimeout(&context, timeout);
  v1::ForwardResponse response;
  const grpc::Status status = stubs_->service.Forward(&context, request, &response);
  CallOutcome outcome = OutcomeOf(status);
  outcome.response = std::move(response);
  return outcome;
}

absl::StatusOr<v1::GetModelResponse> ServerUnderTest::GetModel(const std::string& model) {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  v1::GetModelRequest request;
  request.set_model(model);
  v1::GetModelResponse response;
  const grpc::Status status = stubs_->service.GetModel(&context, request, &response);
  return ToStatusOr(status, std::move(response));
}

absl::StatusOr<v1::ListModelsResponse> ServerUnderTest::ListModels() {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  v1::ListModelsResponse response;
  const grpc::Status status = stubs_->service.ListModels(&context, {}, &response);
  return ToStatusOr(status, std::move(response));
}

absl::StatusOr<v1::ExplainResponse> ServerUnderTest::Explain(const v1::ExplainRequest& request) {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  v1::ExplainResponse response;
  const grpc::Status status = stubs_->service.Explain(&context, request, &response);
  return ToStatusOr(status, std::move(response));
}

absl::StatusOr<v1::GetStatusResponse> ServerUnderTest::GetStatus() {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  v1::GetStatusResponse response;
  const grpc::Status status = stubs_->admin.GetStatus(&context, {}, &response);
  return ToStatusOr(status, std::move(response));
}

absl::StatusOr<v1::DrainResponse> ServerUnderTest::Drain(absl::Duration timeout) {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(60));
  v1::DrainRequest request;
  request.set_timeout_micros(absl::ToInt64Microseconds(timeout));
  v1::DrainResponse response;
  const grpc::Status status = stubs_->admin.Drain(&context, request, &response);
  return ToStatusOr(status, std::move(response));
}

std::string ServerUnderTest::Health(const std::string& service) {
  return CheckHealth(&stubs_->health, service);
}

std::string ServerUnderTest::HealthOverNewConnection() {
  grpc::ChannelArguments arguments;
  // Not one that another channel has opened.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  grpc::health::v1::Health::Stub stub(
      grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments));
  return CheckHealth(&stub, "");
}

std::vector<std::string> ServerUnderTest::ReflectedServices() {
  grpc::ClientContext context;
  SetTimeout(&context, absl::Seconds(30));
  auto stream = stubs_->reflection.ServerReflectionInfo(&context);
  grpc::reflection::v1alpha::ServerReflectionRequest request;
  request.set_list_services("");
  stream->Write(request);
  grpc::reflection::v1alpha::ServerReflectionResponse response;
  std::vector<std::string> names;
  if (stream->Read(&response)) {
    for (const auto& service : response.list_services_response().service()) {
      names.push_back(service.name());
    }
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  return names;
}

std::string ServerUnderTest::Metrics() { return HttpGet(metrics_port_, "/metrics"); }

double ServerUnderTest::Metric(const std::string& series) {
  const std::string text = Metrics();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const size_t space = line.rfind(' ');
    double value = 0;
    if (space != absl::string_view::npos && line.substr(0, space) == series &&
        absl::SimpleAtod(line.substr(space + 1), &value)) {
      return value;
    }
  }
  return -1;
}

std::vector<double> OutputValues(const v1::Tensor& tensor) {
  if (tensor.values_size() > 0) return {tensor.values().begin(), tensor.values().end()};
  const DType dtype = tensor.dtype() == v1::DATA_TYPE_FLOAT32   ? DType::kFloat32
                      : tensor.dtype() == v1::DATA_TYPE_FLOAT16 ? DType::kFloat16
                                                                : DType::kBFloat16;
  std::vector<double> values(tensor.data().size() / static_cast<size_t>(DTypeBytes(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = LoadFloat(tensor.data().data(), dtype, static_cast<int64_t>(i));
  }
  return values;
}

std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval limit{.tv_sec = 30, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request =
        absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    char chunk[16384];
    for (ssize_t n = read(fd, chunk, sizeof(chunk)); n > 0; n = read(fd, chunk, sizeof(chunk))) {
      answer.append(chunk, static_cast<size_t>(n));
    }
  }
  close(fd);
  return answer;
}

}  // namespace expertmesh
