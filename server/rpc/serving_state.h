#ifndef EXPERTMESH_SERVER_RPC_SERVING_STATE_H_
#define EXPERTMESH_SERVER_RPC_SERVING_STATE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/cluster/expert_group.h"
#include "server/control/forward_controller.h"
#include "server/routing/router_table.h"
#include "server/rpc/forward_validation.h"

namespace expertmesh {

// What stands behind the services once everything is loaded. All of it outlives the services.
struct ServingBackend {
  ForwardController* controller = nullptr;
  ExpertGroup* group = nullptr;
  const ForwardValidator* validator = nullptr;
  const RouterTable* routers = nullptr;
  int64_t max_step_tokens = 0;
  int64_t max_rank_pairs = 0;
  int64_t max_num_tokens = 0;                                      // of kAllToAllFixedCapacity
  std::map<const ModelSpec*, std::string> placement_fingerprints;  // of each model served
};

// Loading, serving, draining: in that order, never back. Calls that arrive while loading wait here,
// in bounded number and bytes. Thread safe.
class ServingState {
 public:
  using Waiter = absl::AnyInvocable<void(absl::StatusOr<const ServingBackend*>)>;
  using WaitId = uint64_t;  // 0: nothing waits

  explicit ServingState(int64_t max_waiting_bytes);
  ~ServingState();

  // Calls `waiter` once: at once while serving (on this thread) or draining (UNAVAILABLE,
  // DRAINING), or later, on another thread, when one of these begins; RESOURCE_EXHAUSTED
  // (QUEUE_FULL) when too much waits already, UNAVAILABLE (NO_EPOCH) shortly before `deadline`,
  // CANCELLED after CancelWait. It must not block.
  WaitId Wait(absl::Time deadline, int64_t bytes, Waiter waiter);
  // Unknown ids, and those that were called already, are ignored.
  void CancelWait(WaitId id);

  // Null while loading.
  const ServingBackend* backend() const;
  bool draining() const;

  void StartServing(const ServingBackend& backend);
  void StartDraining();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_SERVING_STATE_H_
