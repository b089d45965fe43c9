#include "server/model/weight_source.h"

#include "absl/strings/str_cat.h"

namespace expertmesh {

absl::StatusOr<LoadedSharedExperts> WeightSource::LoadSharedExperts(int32_t layer_index) const {
  return absl::FailedPreconditionError(
      absl::StrCat("layer ", layer_index, " of model '", model().name, "' has no shared experts"));
}

}  // namespace expertmesh
