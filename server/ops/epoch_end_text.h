#ifndef EXPERTMESH_SERVER_OPS_EPOCH_END_TEXT_H_
#define EXPERTMESH_SERVER_OPS_EPOCH_END_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// Reasons of an epoch's end that somebody wanted. A rank hears of a reason as text, and is to tell
// these apart from losses in its log.
inline constexpr char kControlPlaneStops[] = "the control plane is stopping";

inline std::string RankLeftText(int32_t ep_rank) { return absl::StrCat("rank ", ep_rank, " left"); }

inline bool IsWantedEpochEnd(absl::string_view reason) {
  return reason == kControlPlaneStops ||
         (absl::StartsWith(reason, "rank ") && absl::EndsWith(reason, " left"));
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_EPOCH_END_TEXT_H_
