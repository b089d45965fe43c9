#ifndef EXPERTMESH_SERVER_CLUSTER_RANK_OFFER_H_
#define EXPERTMESH_SERVER_CLUSTER_RANK_OFFER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/dtype.h"
#include "server/model/placement.h"

namespace expertmesh {

// Raised when a control plane and a rank that differ in it could misunderstand each other.
inline constexpr int32_t kRankProtocolVersion = 5;

struct LayerManifest {
  int32_t layer = 0;  // the checkpoint's own index
  int32_t num_experts = 0;
  std::vector<int32_t> expert_ids;  // held ones, ascending
};

struct ModelManifest {
  std::string model;
  std::string fingerprint;
  std::vector<LayerManifest> layers;
  DType weight_dtype = DType::kInvalid;  // as loaded
};

// What a rank brings.
struct RankOffer {
  int32_t protocol_version = 0;
  int32_t ep_rank = 0;
  int32_t ep_size = 0;
  uint64_t instance = 0;  // random per rank process: its next join replaces its last one
  std::vector<ModelManifest> models;
  std::string address;  // for people
  std::string instruction_set;
  int64_t weight_bytes = 0;
  int64_t memory_limit_bytes = 0;
};

struct ExpectedModel {
  std::string name;
  std::string fingerprint;
  std::map<int32_t, const Placement*> layers;  // the placements outlive whoever uses this
};

// What the ranks of a group must be.
struct ExpectedGroup {
  int32_t protocol_version = kRankProtocolVersion;
  int32_t ep_size = 1;
  std::vector<ExpectedModel> models;
};

// WRONG_MODEL, "rank N: <what>".
absl::Status WrongModel(int32_t ep_rank, const std::string& what);
// WRONG_EP_SIZE, INVALID_FIELD (ep_rank).
absl::Status CheckPlace(int32_t ep_rank, int32_t ep_size, const ExpectedGroup& group);
// These, PROTOCOL_MISMATCH, WRONG_MODEL (models, fingerprints, experts).
absl::Status CheckOffer(const RankOffer& offer, const ExpectedGroup& group);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_RANK_OFFER_H_
