#ifndef EXPERTMESH_SERVER_CONTROL_CALL_REGISTRY_H_
#define EXPERTMESH_SERVER_CONTROL_CALL_REGISTRY_H_

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/control/admission.h"
#include "server/control/pending_call.h"

namespace expertmesh {

// What is to be told, and let go, once no lock is held.
struct Aftermath {
  struct Completion {
    CallPtr call;
    absl::AnyInvocable<void(absl::StatusOr<ForwardResult>)> done;
    absl::StatusOr<ForwardResult> result;
  };
  std::vector<Completion> completions;
  std::vector<CallPtr> released;
};

// All calls that hold admission. A call is completed once and released once: when it is completed
// and no step reads its buffers any more (PendingCall::num_pins). Not thread safe.
class CallRegistry {
 public:
  explicit CallRegistry(const AdmissionLimits& limits) : admission_(limits) {}

  // Takes `call` on success alone. Errors of Admission::Admit.
  absl::StatusOr<CallPtr> Admit(std::unique_ptr<ForwardCall>& call, ForwardCallId id,
                                absl::Time now);
  // Null when the call does not exist any more.
  CallPtr Find(ForwardCallId id) const;
  std::vector<CallPtr> OpenCalls() const;

  // False, and nothing done, when it was completed before.
  bool Complete(const CallPtr& call, absl::StatusOr<ForwardResult> result, absl::Time now,
                Aftermath& after);
  void Unpin(const CallPtr& call, absl::Time now, Aftermath& after);

  int64_t num_open_calls() const { return num_open_calls_; }                 // not completed
  int64_t num_calls() const { return static_cast<int64_t>(calls_.size()); }  // not released
  const Admission& admission() const { return admission_; }

 private:
  void Release(const CallPtr& call, absl::Time now, Aftermath& after);

  Admission admission_;
  std::unordered_map<ForwardCallId, CallPtr> calls_;
  int64_t num_open_calls_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_CALL_REGISTRY_H_
