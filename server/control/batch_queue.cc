#include "server/control/batch_queue.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <tuple>
#include <utility>

namespace expertmesh {
namespace {

bool WaitsLonger(const PendingCall& a, const PendingCall& b) {
  return std::tie(a.waiting_since, a.id) < std::tie(b.waiting_since, b.id);
}

// Only the first of a queue may have come after the second: see Assign.
const PendingCall& LongestWaiting(const std::list<CallPtr>& queue) {
  const PendingCall& first = *queue.front();
  if (queue.size() == 1) return first;
  const PendingCall& second = **std::next(queue.begin());
  return WaitsLonger(second, first) ? second : first;
}

}  // namespace

void BatchQueue::Push(const CallPtr& call) {
  std::list<CallPtr>& queue = queues_[call->key];
  queue.push_back(call);
  call->queue_position = std::prev(queue.end());
  call->is_queued = true;
  ++num_calls_;
  num_tokens_ += call->num_unassigned_tokens();
}

void BatchQueue::PushRepeats(std::vector<StepBatch> batches) {
  repeats_.insert(repeats_.begin(), std::make_move_iterator(batches.begin()),
                  std::make_move_iterator(batches.end()));
}

void BatchQueue::Dequeue(PendingCall& call) {
  if (!call.is_queued) return;
  call.is_queued = false;
  --num_calls_;
  num_tokens_ -= call.num_unassigned_tokens();
  const auto found = queues_.find(call.key);
  found->second.erase(call.queue_position);
  if (found->second.empty()) queues_.erase(found);
}

bool BatchQueue::Remove(const CallPtr& call) {
  Dequeue(*call);
  bool was_repeated = false;
  for (StepBatch& batch : repeats_) {
    const size_t num_erased =
        std::erase_if(batch.pieces, [&](const StepPiece& piece) { return piece.call == call; });
    was_repeated = was_repeated || num_erased > 0;
  }
  std::erase_if(repeats_, [](const StepBatch& batch) { return batch.pieces.empty(); });
  return was_repeated;
}

absl::Time BatchQueue::oldest_submitted() const {
  absl::Time oldest = absl::InfiniteFuture();
  for (const auto& [key, queue] : queues_) {
    for (const CallPtr& call : queue) oldest = std::min(oldest, call->submitted);
  }
  for (const StepBatch& batch : repeats_) {
    for (const StepPiece& piece : batch.pieces) oldest = std::min(oldest, piece.call->submitted);
  }
  return oldest;
}

StepBatch BatchQueue::Take(int64_t max_tokens) {
  StepBatch batch;
  if (!repeats_.empty()) {
    batch = std::move(repeats_.front());
    repeats_.pop_front();
    return batch;
  }
  int64_t num_tokens = 0;
  for (const CallPtr& call : Oldest()) {
    if (num_tokens >= max_tokens) break;
    ++call->num_pins;
    num_tokens += call->num_unassigned_tokens();
    batch.pieces.push_back(
        {call, call->num_assigned_tokens, call->num_unassigned_tokens(), call->waiting_since});
  }
  return batch;
}

const std::list<CallPtr>& BatchQueue::Oldest() const {
  const std::list<CallPtr>* oldest = nullptr;
  for (const auto& [key, queue] : queues_) {
    if (oldest == nullptr || WaitsLonger(LongestWaiting(queue), LongestWaiting(*oldest))) {
      oldest = &queue;
    }
  }
  assert(oldest != nullptr);
  return *oldest;
}

BatchQueue::Outlook BatchQueue::LookAhead(int64_t max_tokens) const {
  Outlook outlook;
  outlook.is_repeat = !repeats_.empty();
  if (outlook.is_repeat) return outlook;
  for (const CallPtr& call : Oldest()) {
    if (outlook.num_tokens >= max_tokens) break;
    outlook.key = &call->key;
    const int32_t topk =
        call->call->routing == RoutingKind::kTopK ? call->call->topk : call->key.layer->topk;
    outlook.num_tokens += call->num_unassigned_tokens();
    outlook.num_pairs += call->num_unassigned_tokens() * topk;
  }
  return outlook;
}

std::vector<CallPtr> BatchQueue::Assign(StepBatch& batch, int64_t num_tokens, absl::Time now) {
  std::vector<CallPtr> let_go;
  std::vector<StepPiece> assigned;
  for (StepPiece& piece : batch.pieces) {
    piece.num_tokens = std::min(piece.num_tokens, num_tokens);
    num_tokens -= piece.num_tokens;
    // What was completed meanwhile leaves no gap: tokens are independent.
    if (piece.num_tokens == 0 || piece.call->completed) {
      let_go.push_back(std::move(piece.call));
      continue;
    }
    PendingCall& call = *piece.call;
    call.num_assigned_tokens += piece.num_tokens;
    call.waiting_since = now;
    if (call.is_queued) {
      num_tokens_ -= piece.num_tokens;
      if (call.num_unassigned_tokens() == 0) {
        Dequeue(call);
      } else if (assigned.empty()) {
        std::list<CallPtr>& queue = queues_.find(call.key)->second;
        queue.splice(queue.end(), queue, call.queue_position);
      }
    } else if (call.num_unassigned_tokens() > 0) {
      // Taken without a queue, by the thread that submitted it.
      Push(piece.call);
    }
    assigned.push_back(std::move(piece));
  }
  batch.pieces = std::move(assigned);
  batch.is_assigned = true;
  return let_go;
}

}  // namespace expertmesh
