#ifndef EXPERTMESH_SERVER_COMM_RENDEZVOUS_STORE_H_
#define EXPERTMESH_SERVER_COMM_RENDEZVOUS_STORE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace expertmesh {

// Where the ranks of an epoch leave what the others need to reach them. A key is written once:
// every epoch has keys of its own (RendezvousKey), so nobody meets a rank of the past. Thread safe.
//
// Whoever can read the store can join the group: ranks prove themselves to each other by secrets
// that they exchange through it.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;
  // ALREADY_EXISTS when the key has a value: two ranks with one number, or an epoch used twice.
  virtual absl::Status Set(absl::string_view key, absl::string_view value) = 0;
  // Blocks until the key has a value; DEADLINE_EXCEEDED when it has none at `deadline`, CANCELLED
  // when its epoch was given up.
  virtual absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) = 0;
};

inline std::string RendezvousPrefix(uint64_t incarnation, uint64_t epoch) {
  return absl::StrCat(incarnation, "/", epoch, "/");
}
inline std::string RendezvousKey(uint64_t incarnation, uint64_t epoch, absl::string_view name) {
  return absl::StrCat(RendezvousPrefix(incarnation, epoch), name);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_RENDEZVOUS_STORE_H_
