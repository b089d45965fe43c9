#include "server/cluster/rank_offer.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/ops/call_error.h"

namespace expertmesh {

absl::Status WrongModel(int32_t ep_rank, const std::string& what) {
  return CallError(ErrorReason::kWrongModel, absl::StrCat("rank ", ep_rank, ": ", what));
}

namespace {

constexpr size_t kMaxNameBytes = 64;  // of a name that a rank sent

// "6 experts in layer 1 instead of 5, " of a checkpoint that is plainly another; or nothing.
std::string VisibleDifference(const ModelManifest& manifest, const ExpectedModel& expected) {
  if (manifest.layers.size() != expected.layers.size()) {
    return absl::StrCat(manifest.layers.size(), " MoE layers instead of ", expected.layers.size(),
                        ", ");
  }
  for (const LayerManifest& layer : manifest.layers) {
    const auto found = expected.layers.find(layer.layer);
    if (found == expected.layers.end() || layer.num_experts == found->second->num_experts()) {
      continue;
    }
    return absl::StrCat(layer.num_experts, " experts in layer ", layer.layer, " instead of ",
                        found->second->num_experts(), ", ");
  }
  return "";
}

absl::Status CheckModel(const RankOffer& offer, const ModelManifest& manifest,
                        const ExpectedModel& expected) {
  if (manifest.fingerprint != expected.fingerprint) {
    return WrongModel(
        offer.ep_rank,
        absl::StrCat("model ", expected.name, " has ", VisibleDifference(manifest, expected),
                     "fingerprint ", manifest.fingerprint.substr(0, 64), ", this group serves ",
                     expected.fingerprint,
                     ": another checkpoint, or another version of it; start the rank with the "
                     "group's"));
  }
  if (manifest.layers.size() != expected.layers.size()) {
    return WrongModel(offer.ep_rank,
                      absl::StrCat("model ", expected.name, " comes with ", manifest.layers.size(),
                                   " MoE layers instead of ", expected.layers.size()));
  }
  std::vector<int32_t> seen;
  for (const LayerManifest& layer : manifest.layers) {
    const auto found = expected.layers.find(layer.layer);
    if (found == expected.layers.end() ||
        std::find(seen.begin(), seen.end(), layer.layer) != seen.end()) {
      return WrongModel(offer.ep_rank,
                        absl::StrCat("model ", expected.name, " comes with layer ", layer.layer,
                                     ", which is unknown or named twice"));
    }
    seen.push_back(layer.layer);
    const absl::Span<const int32_t> held = found->second->local_experts(offer.ep_rank);
    if (layer.num_experts != found->second->num_experts() ||
        !std::equal(held.begin(), held.end(), layer.expert_ids.begin(), layer.expert_ids.end())) {
      return WrongModel(offer.ep_rank,
                        absl::StrCat("holds ", layer.expert_ids.size(), " of ", layer.num_experts,
                                     " experts of layer ", layer.layer, " of model ", expected.name,
                                     ", which are not the ", held.size(), " of ",
                                     found->second->num_experts(), " that the placement gives it"));
    }
  }
  return absl::OkStatus();
}

// For who has to find out why names differ.
std::string WhoHasWhat(const RankOffer& offer, const ExpectedGroup& group) {
  const auto names = [](const auto& models, auto name_of) {
    std::string text;
    for (const auto& model : models) {
      absl::StrAppend(&text, text.empty() ? "" : ", ", name_of(model).substr(0, kMaxNameBytes));
    }
    return text.empty() ? std::string("none") : text.substr(0, 4 * kMaxNameBytes);
  };
  return absl::StrCat(
      "it holds ", names(offer.models, [](const ModelManifest& model) { return model.model; }),
      ", this group serves ",
      names(group.models, [](const ExpectedModel& model) { return model.name; }),
      " (a model has its folder's name unless --model_name gives it one: the same for the control "
      "plane and all ranks, and what clients send as the model)");
}

}  // namespace

absl::Status CheckPlace(int32_t ep_rank, int32_t ep_size, const ExpectedGroup& group) {
  if (ep_size != group.ep_size) {
    return CallError(
        ErrorReason::kWrongEpSize,
        absl::StrCat("rank ", ep_rank, " was started for ", ep_size,
                     ep_size == 1 ? " rank" : " ranks", ", this group has ", group.ep_size));
  }
  if (ep_rank < 0 || ep_rank >= group.ep_size) {
    return InvalidFieldError("ep_rank", ep_rank, absl::StrCat("0 to ", group.ep_size - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckOffer(const RankOffer& offer, const ExpectedGroup& group) {
  if (offer.protocol_version != group.protocol_version) {
    return CallError(
        ErrorReason::kProtocolMismatch,
        absl::StrCat("the rank speaks version ", offer.protocol_version,
                     " of the rank protocol, the control plane ", group.protocol_version));
  }
  if (absl::Status status = CheckPlace(offer.ep_rank, offer.ep_size, group); !status.ok())
    return status;
  if (offer.models.size() != group.models.size()) {
    return WrongModel(offer.ep_rank,
                      absl::StrCat("brings ", offer.models.size(),
                                   offer.models.size() == 1 ? " model" : " models", " instead of ",
                                   group.models.size(), "; ", WhoHasWhat(offer, group)));
  }
  for (const ExpectedModel& expected : group.models) {
    const auto manifest = std::find_if(
        offer.models.begin(), offer.models.end(),
        [&expected](const ModelManifest& model) { return model.model == expected.name; });
    if (manifest == offer.models.end()) {
      return WrongModel(offer.ep_rank, absl::StrCat("does not hold model ", expected.name, "; ",
                                                    WhoHasWhat(offer, group)));
    }
    if (absl::Status status = CheckModel(offer, *manifest, expected); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
