#ifndef EXPERTMESH_SERVER_CONTROL_PENDING_CALL_H_
#define EXPERTMESH_SERVER_CONTROL_PENDING_CALL_H_

#include <chrono>
#include <compare>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/control/forward_call.h"
#include "server/control/forward_controller.h"

namespace expertmesh {

// Calls with equal keys may share a step; topk may differ between them.
struct BatchKey {
  explicit BatchKey(const ForwardCall& call);

  const LayerSpec* layer;
  const ModelSpec* model;
  DType activation_dtype;
  DType output_dtype;
  DType combine_dtype;
  CombineMode combine;
  DispatchMode dispatch;
  // Routing done by the service follows the model's own habit.
  bool apply_router_weight_on_input;
  bool include_shared_experts;

  friend auto operator<=>(const BatchKey&, const BatchKey&) = default;
};

// An admitted call on its way through control/.
struct PendingCall {
  PendingCall(ForwardCallId call_id, std::unique_ptr<ForwardCall> forward_call)
      : id(call_id), call(std::move(forward_call)), key(*call) {}

  // Fixed by Submit.
  const ForwardCallId id;
  const std::unique_ptr<ForwardCall> call;  // `done` is guarded by the controller's mutex
  const BatchKey key;
  int64_t bytes = 0;  // what admission counts
  absl::Time submitted;
  absl::Time deadline;
  absl::Time no_epoch_at;  // when to give up waiting for an epoch

  // Touched only by the holder of the run token.
  bool was_started = false;
  int64_t num_routed_tokens = 0;        // the first ones
  const int32_t* topk_ids = nullptr;    // [num_tokens, topk], of the call or below
  const float* topk_weights = nullptr;  // [num_tokens, topk]
  int32_t topk = 0;
  std::vector<int32_t> routed_ids;
  std::vector<float> routed_weights;
  int64_t num_done_tokens = 0;
  int32_t num_running_steps = 0;                        // of its own
  std::chrono::steady_clock::time_point counted_until;  // end of the last one, which is in `result`
  ForwardResult result;

  // Guarded by the controller's mutex.
  bool completed = false;           // `done` is taken
  int32_t num_pins = 0;             // batches, running or to be replayed, that read its buffers
  bool was_lost = false;            // one of its steps was
  int64_t num_assigned_tokens = 0;  // the first ones, in steps or done
  absl::Time waiting_since;         // for its turn among the batches
  bool is_queued = false;
  std::list<std::shared_ptr<PendingCall>>::iterator queue_position;

  int64_t num_unassigned_tokens() const { return call->num_tokens - num_assigned_tokens; }
};

using CallPtr = std::shared_ptr<PendingCall>;

// Consecutive tokens of one call in one step.
struct StepPiece {
  CallPtr call;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  absl::Time waiting_since;  // until the step started
};

// Pieces that run as one step; all of one BatchKey.
struct StepBatch {
  std::vector<StepPiece> pieces;
  // Candidates: the pieces are what the calls have left, not yet what the step takes.
  bool is_assigned = false;
  int32_t attempt = 0;  // 0 first; 1 replayed; 2 replayed alone
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_PENDING_CALL_H_
