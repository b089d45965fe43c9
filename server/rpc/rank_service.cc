#include "server/rpc/rank_service.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "expertmesh/v1/rank.grpc.pb.h"
#include "grpcpp/security/auth_context.h"
#include "grpcpp/server_context.h"
#include "server/ops/call_error.h"
#include "server/ops/shown_text.h"
#include "server/rpc/rank_stream.h"
#include "server/rpc/rendezvous_quota.h"
#include "server/rpc/status_mapping.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

constexpr int kHeartbeatsPerTimeout = 5;
constexpr size_t kMaxShownBytes = 128;  // of a text that people see

RankOffer OfferOf(const v1::JoinRequest& request) {
  RankOffer offer;
  offer.protocol_version = request.protocol_version();
  offer.ep_rank = request.ep_rank();
  offer.ep_size = request.ep_size();
  offer.instance = request.instance();
  offer.address = ShownText(request.comm_address(), kMaxShownBytes);
  offer.instruction_set = ShownText(request.instruction_set(), kMaxShownBytes);
  offer.weight_bytes = request.weight_bytes();
  offer.memory_limit_bytes = request.memory_limit_bytes();
  for (const v1::ModelManifest& model : request.models()) {
    ModelManifest& manifest = offer.models.emplace_back();
    manifest.model = model.model();
    manifest.fingerprint = model.fingerprint();
    manifest.weight_dtype = DTypeFromWire(model.weight_dtype());
    for (const v1::ExpertManifest& layer : model.layers()) {
      manifest.layers.push_back({layer.layer(),
                                 layer.num_experts(),
                                 {layer.expert_ids().begin(), layer.expert_ids().end()}});
    }
  }
  return offer;
}

RankAnnouncement AnnouncementOf(const v1::HeartbeatRequest& request) {
  RankAnnouncement announcement;
  announcement.ep_rank = request.ep_rank();
  announcement.ep_size = request.ep_size();
  announcement.address = ShownText(request.comm_address(), kMaxShownBytes);
  announcement.instruction_set = ShownText(request.instruction_set(), kMaxShownBytes);
  announcement.memory_used_bytes = request.memory_used_bytes();
  announcement.load_progress = request.load_progress();
  return announcement;
}

// Waits for a key until it is set, its epoch ends or the caller gives up.
class StoreGetReactor final : public grpc::ServerUnaryReactor {
 public:
  static StoreGetReactor* Start(RemoteExpertGroup* group, const v1::StoreGetRequest& request,
                                v1::StoreGetResponse* response) {
    auto reactor = std::make_shared<StoreGetReactor>();
    reactor->self_ = reactor;
    group->rendezvous().GetAsync(
        RendezvousKey(request.incarnation(), request.epoch(), request.key()),
        [reactor, response](absl::StatusOr<std::string> value) {
          if (reactor->finished_.exchange(true)) return;
          // Ours until Finish.
          if (value.ok()) response->set_value(*std::move(value));
          reactor->Finish(ToGrpcStatus(value.status()));
        });
    // The epoch may have ended before the store knew of this one.
    if (absl::Status status = group->CheckForming(request.incarnation(), request.epoch());
        !status.ok()) {
      reactor->FinishOnce(status);
    }
    return reactor.get();
  }

  void OnCancel() override { FinishOnce(absl::CancelledError("the rank gave up")); }
  void OnDone() override { const std::shared_ptr<StoreGetReactor> self = std::move(self_); }

 private:
  void FinishOnce(const absl::Status& status) {
    if (!finished_.exchange(true)) Finish(ToGrpcStatus(status));
  }

  std::shared_ptr<StoreGetReactor> self_;
  std::atomic<bool> finished_{false};
};

using RankServiceBase =
    v1::RankService::WithCallbackMethod_Join<v1::RankService::WithRawCallbackMethod_RunSteps<
        v1::RankService::WithCallbackMethod_Heartbeat<v1::RankService::WithCallbackMethod_StoreSet<
            v1::RankService::WithCallbackMethod_StoreGet<v1::RankService::Service>>>>>;

class RankServiceImpl final : public RankServiceBase {
 public:
  explicit RankServiceImpl(RankServiceOptions options)
      : options_(std::move(options)), quota_(options_.group->ep_size()) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context,
                                 const v1::JoinRequest* request,
                                 v1::JoinResponse* response) override {
    absl::Status status = CheckPeer(*context);
    if (!status.ok()) {
      group().NoteRefusal(request->ep_rank(), ShownText(request->comm_address(), kMaxShownBytes),
                          status);
    }
    if (status.ok()) {
      const absl::StatusOr<uint64_t> member_id = group().Join(OfferOf(*request));
      status = member_id.status();
      if (status.ok()) response->set_member_id(*member_id);
    }
    response->set_incarnation(group().incarnation());
    response->set_heartbeat_interval_micros(HeartbeatIntervalMicros());
    response->set_heartbeat_timeout_micros(absl::ToInt64Microseconds(group().heartbeat_timeout()));
    response->set_step_timeout_micros(absl::ToInt64Microseconds(group().step_timeout()));
    response->set_max_step_tokens(options_.max_step_tokens);
    return Answer(context, status);
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* RunSteps(
      grpc::CallbackServerContext* context) override {
    return RankStream::Start(&group(), &options_.hidden_sizes, context, CheckPeer(*context));
  }

  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context,
                                      const v1::HeartbeatRequest* request,
                                      v1::HeartbeatResponse* response) override {
    absl::Status status = CheckPeer(*context);
    if (status.ok()) {
      if (request->member_id() == 0) {
        status = group().Announce(AnnouncementOf(*request));
      } else {
        // Not being a member is an answer, not an error of the call.
        const absl::Status member = group().Heartbeat(request->incarnation(), request->member_id(),
                                                      request->memory_used_bytes());
        response->set_member(member.ok());
        response->set_why(ToRpcStatus(member).message());
      }
      response->set_heartbeat_interval_micros(HeartbeatIntervalMicros());
      response->set_incarnation(group().incarnation());
      response->set_epoch(group().epoch());
    }
    return Answer(context, status);
  }

  grpc::ServerUnaryReactor* StoreSet(grpc::CallbackServerContext* context,
                                     const v1::StoreSetRequest* request,
                                     v1::StoreSetResponse* /*response*/) override {
    absl::Status status = CheckPeer(*context);
    if (status.ok()) status = group().CheckForming(request->incarnation(), request->epoch());
    if (status.ok()) {
      status = quota_.AdmitSet(request->epoch(), request->key(), request->value());
    }
    if (status.ok()) {
      status = group().rendezvous().Set(
          RendezvousKey(request->incarnation(), request->epoch(), request->key()),
          request->value());
      if (absl::IsAlreadyExists(status)) {
        status = CallError(ErrorReason::kRankTaken,
                           absl::StrCat("key ", request->key(), " is set already"));
      }
    }
    return Answer(context, status);
  }

  grpc::ServerUnaryReactor* StoreGet(grpc::CallbackServerContext* context,
                                     const v1::StoreGetRequest* request,
                                     v1::StoreGetResponse* response) override {
    absl::Status status = CheckPeer(*context);
    if (status.ok()) status = group().CheckForming(request->incarnation(), request->epoch());
    if (status.ok()) status = quota_.AdmitGet(request->epoch(), request->key());
    if (!status.ok()) return Answer(context, status);
    return StoreGetReactor::Start(&group(), *request, response);
  }

 private:
  RemoteExpertGroup& group() const { return *options_.group; }

  int64_t HeartbeatIntervalMicros() const {
    return absl::ToInt64Microseconds(group().heartbeat_timeout() / kHeartbeatsPerTimeout);
  }

  static grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                          const absl::Status& status) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  absl::Status CheckPeer(const grpc::CallbackServerContext& context) const {
    const std::vector<std::string>& allowed = options_.allowed_names;
    if (allowed.empty() || std::find(allowed.begin(), allowed.end(), "*") != allowed.end()) {
      return absl::OkStatus();
    }
    std::string names;
    for (const grpc::string_ref& shown :
         context.auth_context()->FindPropertyValues("x509_subject_alternative_name")) {
      const std::string name(shown.data(), shown.size());
      if (std::find(allowed.begin(), allowed.end(), name) != allowed.end()) {
        return absl::OkStatus();
      }
      absl::StrAppend(&names, names.empty() ? "" : ", ", name);
    }
    return CallError(ErrorReason::kRankNotAllowed,
                     absl::StrCat("the certificate of ", context.peer(), " is for ",
                                  names.empty() ? "nobody" : ShownText(names, kMaxShownBytes),
                                  ", which --rank_tls_names does not allow"));
  }

  const RankServiceOptions options_;
  RendezvousQuota quota_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewRankService(RankServiceOptions options) {
  return std::make_unique<RankServiceImpl>(std::move(options));
}

}  // namespace expertmesh
