#ifndef EXPERTMESH_SERVER_MODEL_PLACEMENT_H_
#define EXPERTMESH_SERVER_MODEL_PLACEMENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace expertmesh {

// Which rank owns which expert of a layer; every expert has exactly one owner.
// Immutable, cheap to read.
class Placement {
 public:
  // Contiguous blocks; the first num_experts mod ep_size ranks hold one more.
  // INVALID_ARGUMENT unless both >= 1.
  static absl::StatusOr<Placement> Contiguous(int32_t num_experts, int32_t ep_size);
  // owner_ranks[e] in [0, ep_size).
  static absl::StatusOr<Placement> FromOwners(std::vector<int32_t> owner_ranks, int32_t ep_size);

  int32_t num_experts() const { return static_cast<int32_t>(owner_ranks_.size()); }
  int32_t ep_size() const { return static_cast<int32_t>(local_experts_.size()); }
  int32_t owner_rank(int32_t expert_id) const { return owner_ranks_[expert_id]; }
  int32_t local_expert_id(int32_t expert_id) const { return local_expert_ids_[expert_id]; }
  // Global ids, ascending; the position is the local id.
  absl::Span<const int32_t> local_experts(int32_t ep_rank) const { return local_experts_[ep_rank]; }

 private:
  Placement() = default;
  std::vector<int32_t> owner_ranks_;                 // [num_experts]
  std::vector<int32_t> local_expert_ids_;            // [num_experts]
  std::vector<std::vector<int32_t>> local_experts_;  // [ep_size][num_local_experts]
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_PLACEMENT_H_
