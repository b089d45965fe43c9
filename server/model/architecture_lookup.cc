#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/model/architectures.h"
#include "server/model/printable.h"
#include "server/ops/command_line.h"
#include "server/ops/few_of.h"

namespace expertmesh {
namespace {

constexpr absl::string_view kHowToMap =
    "map another by hand with --architecture=KNOWN_NAME[,member=value...], for example "
    "--architecture=Qwen3MoeForCausalLM,keys.num_experts=n_experts,"
    "tensors.router=moe.gate.weight";

std::string KnownNames() {
  return absl::StrJoin(KnownArchitectures(), ", ",
                       [](std::string* out, const Architecture& row) { out->append(row.name); });
}

const Architecture* FindByName(absl::string_view name) {
  for (const Architecture& row : KnownArchitectures()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

using Member = std::pair<absl::string_view, std::string*>;

std::vector<Member> Members(Architecture& a) {
  ConfigKeys& k = a.keys;
  TensorNames& t = a.tensors;
  return {{"name", &a.name},
          {"config_section", &a.config_section},
          {"layer_prefix", &a.layer_prefix},
          {"keys.num_layers", &k.num_layers},
          {"keys.num_experts", &k.num_experts},
          {"keys.topk", &k.topk},
          {"keys.intermediate_size", &k.intermediate_size},
          {"keys.shared_intermediate_size", &k.shared_intermediate_size},
          {"keys.num_shared_experts", &k.num_shared_experts},
          {"keys.first_moe_layer", &k.first_moe_layer},
          {"keys.last_moe_layer", &k.last_moe_layer},
          {"keys.moe_layer_interval", &k.moe_layer_interval},
          {"keys.moe_layer_frequency", &k.moe_layer_frequency},
          {"keys.dense_layers", &k.dense_layers},
          {"keys.moe_layers", &k.moe_layers},
          {"keys.norm_topk_prob", &k.norm_topk_prob},
          {"keys.routed_scaling_factor", &k.routed_scaling_factor},
          {"keys.num_groups", &k.num_groups},
          {"keys.topk_groups", &k.topk_groups},
          {"keys.topk_method", &k.topk_method},
          {"keys.renormalize_min", &k.renormalize_min},
          {"keys.sparse_mixer_jitter", &k.sparse_mixer_jitter},
          {"keys.swiglu_limit", &k.swiglu_limit},
          {"tensors.gate", &t.gate},
          {"tensors.up", &t.up},
          {"tensors.gate_up", &t.gate_up},
          {"tensors.down", &t.down},
          {"tensors.gate_up_bias", &t.gate_up_bias},
          {"tensors.down_bias", &t.down_bias},
          {"tensors.router", &t.router},
          {"tensors.router_bias", &t.router_bias},
          {"tensors.correction_bias", &t.correction_bias},
          {"tensors.shared_gate", &t.shared_gate},
          {"tensors.shared_up", &t.shared_up},
          {"tensors.shared_gate_up", &t.shared_gate_up},
          {"tensors.shared_down", &t.shared_down},
          {"tensors.shared_expert_gate", &t.shared_expert_gate}};
}

}  // namespace

absl::StatusOr<Architecture> FindArchitecture(absl::string_view name,
                                              absl::string_view model_type) {
  if (!name.empty()) {
    if (const Architecture* row = FindByName(name)) return *row;
    return absl::NotFoundError(absl::StrCat("architecture ", Printable(name),
                                            " is unknown; known are ", KnownNames(), "; ",
                                            kHowToMap));
  }
  for (const Architecture& row : KnownArchitectures()) {
    if (row.model_type == model_type) return row;
  }
  return absl::NotFoundError(absl::StrCat("key 'architectures' is missing and model_type ",
                                          Printable(model_type), " is unknown; known are ",
                                          KnownNames(), "; ", kHowToMap));
}

absl::StatusOr<Architecture> ParseArchitecture(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  const Architecture* base = FindByName(parts[0]);
  if (base == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--architecture begins with ", Printable(parts[0]), "; expected one of ", KnownNames()));
  }
  Architecture architecture = *base;
  const std::vector<Member> members = Members(architecture);
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::pair<absl::string_view, absl::string_view> assignment =
        absl::StrSplit(parts[i], absl::MaxSplits('=', 1));
    std::string* member = nullptr;
    for (const Member& candidate : members) {
      if (candidate.first == assignment.first) member = candidate.second;
    }
    std::vector<std::string> names;
    for (const Member& candidate : members) names.emplace_back(candidate.first);
    const std::string closest = ClosestName(std::string(assignment.first), names);
    if (member == nullptr || parts[i].find('=') == absl::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--architecture has ", Printable(parts[i]), "; expected member=value, the member ",
          closest.empty() ? absl::StrCat("one of ", FewOf(names)) : closest,
          " (server/model/README.md says how it is done)"));
    }
    *member = std::string(assignment.second);
  }
  return architecture;
}

}  // namespace expertmesh
