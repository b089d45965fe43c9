#ifndef EXPERTMESH_SERVER_CONTROL_BATCH_QUEUE_H_
#define EXPERTMESH_SERVER_CONTROL_BATCH_QUEUE_H_

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <vector>

#include "absl/time/time.h"
#include "server/control/pending_call.h"

namespace expertmesh {

// What waits for the run token: batches to be repeated, which go first, and the calls that still
// have tokens outside any step, one first-in-first-out queue for each BatchKey. Not thread safe.
class BatchQueue {
 public:
  void Push(const CallPtr& call);
  // The batches stand before all others, in their order; their pieces stay pinned.
  void PushRepeats(std::vector<StepBatch> batches);
  bool empty() const { return queues_.empty() && repeats_.empty(); }

  // The first batch to repeat, or else candidates: the first calls of the queue in which one has
  // waited longest, as many as it takes to fill `max_tokens`, with all the tokens that they have
  // left. Pins the calls; candidates stay in their queue until Assign. Only when not empty.
  StepBatch Take(int64_t max_tokens);

  // What Take would return, without calls: nothing changes.
  struct Outlook {
    bool is_repeat = false;
    const BatchKey* key = nullptr;  // the rest only where it is no repeat
    int64_t num_tokens = 0;         // may be more than `max_tokens`
    int64_t num_pairs = 0;          // (token, k), those without an expert included
  };
  Outlook LookAhead(int64_t max_tokens) const;

  // The step takes the first `num_tokens` of the candidates. Calls whose last token that is leave
  // their queue; a call with a rest waits since `now`, behind other batches, and if it is the first
  // of the step, behind the others of its own queue: a long one must not make all small ones wait.
  // One that only fills the step up is its queue's first next time. Returns the calls that are not
  // in the step after all, which the caller must unpin.
  std::vector<CallPtr> Assign(StepBatch& batch, int64_t num_tokens, absl::Time now);

  // Forgets a call. True: it was in a batch to be repeated, and must be unpinned for it.
  bool Remove(const CallPtr& call);

  // In queues; repeats aside.
  int64_t num_calls() const { return num_calls_; }
  int64_t num_tokens() const { return num_tokens_; }
  // When the oldest call was submitted that waits, in a queue or to be repeated; InfiniteFuture
  // when none does. Looks at all of them.
  absl::Time oldest_submitted() const;

 private:
  void Dequeue(PendingCall& call);
  // The queue in which a call has waited longest. Only when there is one.
  const std::list<CallPtr>& Oldest() const;

  std::deque<StepBatch> repeats_;
  std::map<BatchKey, std::list<CallPtr>> queues_;  // none of them empty
  int64_t num_calls_ = 0;
  int64_t num_tokens_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_BATCH_QUEUE_H_
