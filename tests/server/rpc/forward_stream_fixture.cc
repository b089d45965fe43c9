#include "tests/server/rpc/forward_stream_fixture.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

ModelSpec TinyModel(const RequestTarget& target) {
  ModelSpec model;
  model.name = target.model;
  model.hidden_size = target.hidden_size;
  model.weight_dtype = DType::kBFloat16;
  model.fingerprint = "abcd";
  LayerSpec layer;
  layer.index = target.layer;
  layer.num_experts = target.num_experts;
  layer.topk = 2;
  layer.intermediate_size = 4;
  model.layers = {layer};
  return model;
}

ForwardLimits TinyLimits() {
  ForwardLimits limits;
  limits.activation_dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  limits.strategies = {DispatchMode::kPassthrough};
  return limits;
}

}  // namespace

HeldController::~HeldController() { AnswerAtOnce(); }

// Keeps nothing of the call when it tells its end.
void HeldController::Complete(std::unique_ptr<ForwardCall> call, absl::Status error) {
  absl::StatusOr<ForwardResult> result = ForwardResult();
  if (!error.ok()) {
    result = std::move(error);
  } else {
    result->stats.num_steps = 1;
    auto owner = std::make_shared<Buffer>(std::move(call->hidden_states));
    const std::byte* const data = owner->data();
    const int64_t size_bytes = owner->size_bytes();
    result->output.push_back({data, size_bytes, std::move(owner)});
  }
  auto done = std::move(call->done);
  call.reset();
  done(std::move(result));
}

ForwardCallId HeldController::Submit(std::unique_ptr<ForwardCall> call, bool may_run_inline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const ForwardCallId id = next_id_++;
  if (may_run_inline) ++num_inline_;
  if (at_once_) {
    lock.unlock();
    Complete(std::move(call));
    return id;
  }
  held_.emplace(id, std::move(call));
  max_held_ = std::max(max_held_, held_.size());
  lock.unlock();
  changed_.notify_all();
  return id;
}

void HeldController::Cancel(ForwardCallId id) {
  std::unique_ptr<ForwardCall> call;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = held_.find(id);
    if (found == held_.end()) return;
    call = std::move(found->second);
    held_.erase(found);
    ++num_cancelled_;
  }
  changed_.notify_all();
  Complete(std::move(call),
           CallError(ErrorReason::kCallCancelled, "the client cancelled the call"));
}

void HeldController::AnswerAtOnce() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    at_once_ = true;
  }
  while (AnswerOldest()) {
  }
}

void HeldController::AwaitHeld(size_t num_calls) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return held_.size() >= num_calls; });
}

std::unique_ptr<ForwardCall> HeldController::Take(const std::string& request_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto position = held_.begin(); position != held_.end(); ++position) {
    if (!request_id.empty() && position->second->request_id != request_id) continue;
    std::unique_ptr<ForwardCall> call = std::move(position->second);
    held_.erase(position);
    return call;
  }
  return nullptr;
}

bool HeldController::Answer(const std::string& request_id) {
  std::unique_ptr<ForwardCall> call = Take(request_id);
  if (call == nullptr) return false;
  Complete(std::move(call));
  return true;
}

bool HeldController::Fail(const std::string& request_id, absl::Status status) {
  std::unique_ptr<ForwardCall> call = Take(request_id);
  if (call == nullptr) return false;
  Complete(std::move(call), std::move(status));
  return true;
}

bool HeldController::AnswerOldest() { return Answer(""); }

size_t HeldController::num_held() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_.size();
}

size_t HeldController::max_held() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return max_held_;
}

absl::Time HeldController::deadline(const std::string& request_id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, call] : held_) {
    if (call->request_id == request_id) return call->deadline;
  }
  return absl::InfinitePast();
}

int HeldController::num_cancelled() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_cancelled_;
}

int HeldController::num_inline() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_inline_;
}

StreamServer::StreamServer(StreamServerOptions options)
    : model_(TinyModel(target_)),
      validator_({&model_}, TinyLimits(), &pool_),
      streams_(options.limits) {
  ExpertServiceOptions service_options;
  service_options.state = &state_;
  service_options.metrics = &metrics_;
  service_options.streams = &streams_;
  service_options.open_calls = &open_calls_;
  service_ = NewExpertService(std::move(service_options));
  GrpcServerOptions server_options;
  server_options.listen = "127.0.0.1:0";
  absl::StatusOr<std::unique_ptr<GrpcServer>> server =
      GrpcServer::Start(server_options, {{kExpertServiceName, service_.get()}});
  absl::StatusOr<std::unique_ptr<Router>> router = NewRouter(model_, model_.layers[0], nullptr);
  if (!server.ok() || !router.ok()) abort();  // no test can go on
  if (options.router != nullptr) router = std::move(options.router);
  routers_.Add(model_.name, *std::move(router));
  server_ = *std::move(server);
  if (options.serving) Serve();
}

StreamServer::~StreamServer() {
  state_.StartDraining();
  controller_.AnswerAtOnce();
  server_->Shutdown(absl::Now());
}

void StreamServer::Serve() {
  ServingBackend backend;
  backend.controller = &controller_;
  backend.group = &group_;
  backend.validator = &validator_;
  backend.routers = &routers_;
  backend.placement_fingerprints[&model_] = "here";
  state_.StartServing(backend);
}

int64_t StreamServer::CallsTotal(const std::string& labels) const {
  const std::string series = absl::StrCat("expertmesh_calls_total", labels, " ");
  const std::string text = registry_.Serialize();
  const size_t at = text.find(series);
  return at == std::string::npos ? 0 : atoll(text.c_str() + at + series.size());
}

std::string StreamServer::target() const { return absl::StrCat("127.0.0.1:", server_->port()); }

std::unique_ptr<v1::ExpertService::Stub> StreamServer::NewStub() const {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  return v1::ExpertService::NewStub(
      grpc::CreateCustomChannel(target(), grpc::InsecureChannelCredentials(), args));
}

v1::ForwardStreamRequest StreamServer::Message(uint64_t stream_seq, int64_t num_tokens) const {
  v1::ForwardStreamRequest message;
  message.set_stream_seq(stream_seq);
  *message.mutable_request() = GoodRequest(target_, num_tokens, 2);
  message.mutable_request()->set_request_id(absl::StrCat(stream_seq));
  // Small bit patterns of bfloat16 are finite.
  std::string* data = message.mutable_request()->mutable_hidden_states()->mutable_data();
  for (size_t i = 0; i + 1 < data->size(); i += 2) {
    const auto bits = static_cast<uint16_t>((stream_seq * 31 + i) & 0x3fff);
    std::memcpy(data->data() + i, &bits, 2);
  }
  return message;
}

}  // namespace expertmesh
