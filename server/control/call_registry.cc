#include "server/control/call_registry.h"

#include <limits>
#include <optional>
#include <utility>

#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

// Payload, output and what a router chooses: what the call makes the server hold.
int64_t CallBytes(const ForwardCall& call) {
  std::optional<int64_t> bytes =
      CheckedSizeProduct({call.num_tokens, call.model->hidden_size, DTypeBytes(call.output_dtype)});
  for (const Buffer* buffer :
       {&call.hidden_states, &call.topk_ids, &call.topk_weights, &call.router_logits}) {
    if (bytes.has_value()) bytes = CheckedAdd(*bytes, buffer->size_bytes());
  }
  if (call.routing != RoutingKind::kTopK) {
    constexpr int64_t kPairBytes = sizeof(int32_t) + sizeof(float);
    const auto routed = CheckedSizeProduct({call.num_tokens, call.layer->topk, kPairBytes});
    if (bytes.has_value() && routed.has_value()) bytes = CheckedAdd(*bytes, *routed);
  }
  return bytes.value_or(std::numeric_limits<int64_t>::max());
}

}  // namespace

absl::StatusOr<CallPtr> CallRegistry::Admit(std::unique_ptr<ForwardCall>& call, ForwardCallId id,
                                            absl::Time now) {
  const int64_t bytes = CallBytes(*call);
  absl::Status status = admission_.Admit(bytes, call->num_tokens, now);
  if (!status.ok()) return status;
  auto pending = std::make_shared<PendingCall>(id, std::move(call));
  pending->bytes = bytes;
  pending->submitted = now;
  pending->waiting_since = now;
  calls_.emplace(id, pending);
  ++num_open_calls_;
  return pending;
}

CallPtr CallRegistry::Find(ForwardCallId id) const {
  const auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : found->second;
}

std::vector<CallPtr> CallRegistry::OpenCalls() const {
  std::vector<CallPtr> open;
  for (const auto& [id, call] : calls_) {
    if (!call->completed) open.push_back(call);
  }
  return open;
}

bool CallRegistry::Complete(const CallPtr& call, absl::StatusOr<ForwardResult> result,
                            absl::Time now, Aftermath& after) {
  if (call->completed) return false;
  call->completed = true;
  --num_open_calls_;
  after.completions.push_back({call, std::move(call->call->done), std::move(result)});
  if (call->num_pins == 0) Release(call, now, after);
  return true;
}

void CallRegistry::Unpin(const CallPtr& call, absl::Time now, Aftermath& after) {
  if (--call->num_pins == 0 && call->completed) Release(call, now, after);
}

void CallRegistry::Release(const CallPtr& call, absl::Time now, Aftermath& after) {
  admission_.Release(call->bytes, call->call->num_tokens, now);
  after.released.push_back(call);
  calls_.erase(call->id);
}

}  // namespace expertmesh
