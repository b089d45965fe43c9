#ifndef EXPERTMESH_SERVER_OPS_RANK_TEXT_H_
#define EXPERTMESH_SERVER_OPS_RANK_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// What is to be said of a rank: "rank 3: WHY"; with `what`, "rank 3 WHAT: WHY". Where WHY begins
// with the same rank, as errors that come from a rank often do, that is not said twice.
std::string RankText(int32_t ep_rank, absl::string_view why);
std::string RankText(int32_t ep_rank, absl::string_view what, absl::string_view why);

// Likewise, of an error whose code is part of what is to be known: "rank 3 WHAT: INTERNAL: WHY".
std::string RankText(int32_t ep_rank, absl::string_view what, const absl::Status& why);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_RANK_TEXT_H_
