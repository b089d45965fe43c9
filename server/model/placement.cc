#include "server/model/placement.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {

absl::StatusOr<Placement> Placement::Contiguous(int32_t num_experts, int32_t ep_size) {
  if (num_experts < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_experts is ", num_experts, "; expected at least 1"));
  }
  if (ep_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ep_size is ", ep_size, "; expected at least 1"));
  }
  std::vector<int32_t> owner_ranks;
  owner_ranks.reserve(num_experts);
  const int32_t num_each = num_experts / ep_size;
  const int32_t num_larger_ranks = num_experts % ep_size;
  for (int32_t rank = 0; rank < ep_size && static_cast<int32_t>(owner_ranks.size()) < num_experts;
       ++rank) {
    owner_ranks.insert(owner_ranks.end(), num_each + (rank < num_larger_ranks ? 1 : 0), rank);
  }
  return FromOwners(std::move(owner_ranks), ep_size);
}

absl::StatusOr<Placement> Placement::FromOwners(std::vector<int32_t> owner_ranks, int32_t ep_size) {
  if (owner_ranks.empty()) {
    return absl::InvalidArgumentError("owner_ranks is empty; expected at least 1 expert");
  }
  if (ep_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ep_size is ", ep_size, "; expected at least 1"));
  }
  Placement placement;
  placement.local_expert_ids_.reserve(owner_ranks.size());
  placement.local_experts_.resize(ep_size);
  for (size_t expert_id = 0; expert_id < owner_ranks.size(); ++expert_id) {
    const int32_t owner_rank = owner_ranks[expert_id];
    if (owner_rank < 0 || owner_rank >= ep_size) {
      return absl::InvalidArgumentError(absl::StrCat("owner_ranks[", expert_id, "] is ", owner_rank,
                                                     "; expected 0 to ", ep_size - 1));
    }
    std::vector<int32_t>& local_experts = placement.local_experts_[owner_rank];
    placement.local_expert_ids_.push_back(static_cast<int32_t>(local_experts.size()));
    local_experts.push_back(static_cast<int32_t>(expert_id));
  }
  placement.owner_ranks_ = std::move(owner_ranks);
  return placement;
}

}  // namespace expertmesh
