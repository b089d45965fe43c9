#include "server/rpc/placement_fingerprint.h"

#include <cstdint>

#include "absl/strings/str_format.h"

namespace expertmesh {
namespace {

// FNV-1a: it tells placements apart, it does not defend against anybody.
class Hash {
 public:
  void Add(int32_t value) {
    for (int shift = 0; shift < 32; shift += 8) {
      state_ ^= static_cast<uint8_t>(static_cast<uint32_t>(value) >> shift);
      state_ *= 0x100000001b3;
    }
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace

std::string PlacementFingerprint(const ModelSpec& model, const ExpertGroup& group) {
  Hash hash;
  hash.Add(group.ep_size());
  for (const LayerSpec& layer : model.layers) {
    const Placement* placement = group.placement(model.name, layer.index);
    if (placement == nullptr) continue;
    hash.Add(layer.index);
    for (int32_t expert = 0; expert < placement->num_experts(); ++expert) {
      hash.Add(placement->owner_rank(expert));
    }
  }
  return absl::StrFormat("%016x", hash.value());
}

}  // namespace expertmesh
