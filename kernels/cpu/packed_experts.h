#ifndef EXPERTMESH_KERNELS_CPU_PACKED_EXPERTS_H_
#define EXPERTMESH_KERNELS_CPU_PACKED_EXPERTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/expert_kernels.h"

namespace expertmesh {

// The experts of one layer in the order that the products of isa_table_plain.h read them. Different
// experts may be loaded from different threads; reading is thread safe.
class PackedExperts {
 public:
  // Maps the memory; pages are touched when their expert is loaded. INVALID_ARGUMENT or
  // RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<PackedExperts>> Create(const ExpertLayerShape& shape);
  ~PackedExperts();
  PackedExperts(const PackedExperts&) = delete;
  PackedExperts& operator=(const PackedExperts&) = delete;

  // Packs expert `local_expert_id`; both as CheckExpertWeights.
  absl::Status Load(int32_t local_expert_id, const ExpertWeights& weights);

  // Bytes of all experts, padding included.
  int64_t size_bytes() const { return size_bytes_; }
  // Bytes that one expert's product reads.
  int64_t expert_bytes() const { return expert_bytes_; }

  int64_t num_gate_up_panels() const { return num_gate_up_panels_; }
  int64_t gate_up_panel_bytes() const { return gate_up_panel_bytes_; }
  int64_t num_down_panels() const { return num_down_panels_; }
  int64_t down_panel_bytes() const { return down_panel_bytes_; }
  const std::byte* gate_up(int32_t local_expert_id) const {
    return data_ + local_expert_id * expert_bytes_;
  }
  const std::byte* down(int32_t local_expert_id) const {
    return gate_up(local_expert_id) + num_gate_up_panels_ * gate_up_panel_bytes_;
  }
  // Padded with zeros to whole panels; null without a bias.
  const float* gate_bias(int32_t local_expert_id) const {
    return BiasOrNull(biases_[static_cast<size_t>(local_expert_id)].gate);
  }
  const float* up_bias(int32_t local_expert_id) const {
    return BiasOrNull(biases_[static_cast<size_t>(local_expert_id)].up);
  }
  const float* down_bias(int32_t local_expert_id) const {
    return BiasOrNull(biases_[static_cast<size_t>(local_expert_id)].down);
  }

 private:
  struct Biases {
    std::vector<float> gate, up, down;
  };
  explicit PackedExperts(const ExpertLayerShape& shape) : shape_(shape) {}
  static const float* BiasOrNull(const std::vector<float>& bias) {
    return bias.empty() ? nullptr : bias.data();
  }

  const ExpertLayerShape shape_;
  int64_t num_gate_up_panels_ = 0;
  int64_t gate_up_panel_bytes_ = 0;
  int64_t num_down_panels_ = 0;
  int64_t down_panel_bytes_ = 0;
  int64_t expert_bytes_ = 0;
  int64_t size_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::vector<Biases> biases_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_PACKED_EXPERTS_H_
