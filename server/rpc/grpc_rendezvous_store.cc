#include "server/rpc/grpc_rendezvous_store.h"

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kSetTimeout = absl::Seconds(5);

}  // namespace

GrpcRendezvousStore::GrpcRendezvousStore(v1::RankService::StubInterface* stub, uint64_t incarnation,
                                         uint64_t epoch)
    : stub_(stub), incarnation_(incarnation), epoch_(epoch) {}

absl::Status GrpcRendezvousStore::Begin(grpc::ClientContext* context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (cancelled_) return absl::CancelledError("the epoch has ended");
  context_ = context;
  return absl::OkStatus();
}

void GrpcRendezvousStore::End() {
  const std::lock_guard<std::mutex> lock(mutex_);
  context_ = nullptr;
}

void GrpcRendezvousStore::Cancel() {
  const std::lock_guard<std::mutex> lock(mutex_);
  cancelled_ = true;
  if (context_ != nullptr) context_->TryCancel();
}

absl::Status GrpcRendezvousStore::Set(absl::string_view key, absl::string_view value) {
  if (!absl::ConsumePrefix(&key, RendezvousPrefix(incarnation_, epoch_))) {
    return absl::InvalidArgumentError("the key is of another epoch");
  }
  v1::StoreSetRequest request;
  request.set_incarnation(incarnation_);
  request.set_epoch(epoch_);
  request.set_key(std::string(key));
  request.set_value(std::string(value));
  v1::StoreSetResponse response;
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(kSetTimeout));
  if (absl::Status status = Begin(&context); !status.ok()) return status;
  const absl::Status status = FromGrpcStatus(stub_->StoreSet(&context, request, &response));
  End();
  return status;
}

absl::StatusOr<std::string> GrpcRendezvousStore::Get(absl::string_view key, absl::Time deadline) {
  if (!absl::ConsumePrefix(&key, RendezvousPrefix(incarnation_, epoch_))) {
    return absl::InvalidArgumentError("the key is of another epoch");
  }
  v1::StoreGetRequest request;
  request.set_incarnation(incarnation_);
  request.set_epoch(epoch_);
  request.set_key(std::string(key));
  v1::StoreGetResponse response;
  grpc::ClientContext context;
  if (deadline != absl::InfiniteFuture()) context.set_deadline(ToGrpcDeadline(deadline));
  if (absl::Status status = Begin(&context); !status.ok()) return status;
  const absl::Status status = FromGrpcStatus(stub_->StoreGet(&context, request, &response));
  End();
  if (!status.ok()) return status;
  return std::move(*response.mutable_value());
}

}  // namespace expertmesh
