#ifndef EXPERTMESH_SERVER_COMM_IN_MEMORY_RENDEZVOUS_STORE_H_
#define EXPERTMESH_SERVER_COMM_IN_MEMORY_RENDEZVOUS_STORE_H_

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "server/comm/rendezvous_store.h"

namespace expertmesh {

// The store of one process: of ranks that are its threads, and what a control plane serves to ranks
// elsewhere.
class InMemoryRendezvousStore : public RendezvousStore {
 public:
  using Callback = absl::AnyInvocable<void(absl::StatusOr<std::string>)>;

  ~InMemoryRendezvousStore() override;  // callbacks that still wait get CANCELLED

  absl::Status Set(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override;

  // Get without a thread that waits: calls back once, at once on this thread when the key has a
  // value, else on the thread that sets it or removes its prefix. `callback` must not block.
  void GetAsync(absl::string_view key, Callback callback);

  // Forgets an epoch (RendezvousPrefix); whoever waits for one of its keys gets CANCELLED.
  void RemovePrefix(absl::string_view prefix);

 private:
  struct Entry {
    bool set = false;
    std::string value;
    std::vector<Callback> waiting;
  };

  std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;  // guarded by mutex_
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_IN_MEMORY_RENDEZVOUS_STORE_H_
