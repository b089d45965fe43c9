#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cli/connection_flags.h"
#include "client/cli/json_output.h"

ABSL_DECLARE_FLAG(std::string, model);

namespace expertmesh {
namespace {

// DATA_TYPE_BFLOAT16 -> bfloat16.
std::string ShortName(const std::string& enum_name, const char* prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(enum_name, prefix));
}

template <typename Enums, typename Name>
std::string ShortNames(const Enums& values, const char* prefix, Name name) {
  return absl::StrJoin(values, ", ", [&](std::string* out, int value) {
    absl::StrAppend(out, ShortName(name(value), prefix));
  });
}

std::string DTypeText(int dtype) {
  return ShortName(v1::DataType_Name(static_cast<v1::DataType>(dtype)), "DATA_TYPE_");
}

// Layers with the same shape and rule stand on one line.
bool SameKind(const v1::LayerInfo& a, const v1::LayerInfo& b) {
  v1::LayerInfo copy = a;
  copy.set_index(b.index());
  return copy.SerializeAsString() == b.SerializeAsString();
}

void PrintLayers(const v1::GetModelResponse& model) {
  printf("\n  %-12s %8s %6s %13s %7s %5s  %s\n", "layers", "experts", "top-k", "intermediate",
         "shared", "gate", "router rule");
  for (int first = 0; first < model.layers_size();) {
    int last = first;
    while (last + 1 < model.layers_size() &&
           SameKind(model.layers(first), model.layers(last + 1)) &&
           model.layers(last + 1).index() == model.layers(last).index() + 1) {
      ++last;
    }
    const v1::LayerInfo& layer = model.layers(first);
    const std::string range = first == last
                                  ? absl::StrCat(layer.index())
                                  : absl::StrCat(layer.index(), "-", model.layers(last).index());
    printf("  %-12s %8d %6d %13lld %7d %5s  %s\n", range.c_str(), layer.num_experts(), layer.topk(),
           static_cast<long long>(layer.intermediate_size()), layer.num_shared_experts(),
           layer.has_gate() ? "yes" : "no", layer.router_rule().c_str());
    first = last + 1;
  }
}

void PrintModel(const v1::GetModelResponse& model) {
  const auto dtype_name = [](int value) {
    return v1::DataType_Name(static_cast<v1::DataType>(value));
  };
  const auto mode_name = [](int value) {
    return v1::DispatchMode_Name(static_cast<v1::DispatchMode>(value));
  };
  printf("%s\n", model.model().c_str());
  printf("  architecture  %s, hidden size %lld, %s\n", model.architecture().c_str(),
         static_cast<long long>(model.hidden_size()), model.activation().c_str());
  printf("  types         weights %s, activations %s (taken: %s)\n",
         DTypeText(model.weight_dtype()).c_str(), DTypeText(model.activation_dtype()).c_str(),
         ShortNames(model.hidden_states_dtypes(), "DATA_TYPE_", dtype_name).c_str());
  printf("  fingerprint   %s\n",
         model.fingerprint().empty() ? "not known yet" : model.fingerprint().c_str());
  printf("  served by     %d rank%s%s, %s, %s\n", model.ep_size(), model.ep_size() == 1 ? "" : "s",
         model.instruction_set().empty() ? ""
                                         : absl::StrCat(" (", model.instruction_set(), ")").c_str(),
         model.epoch() == 0 ? "no epoch stands" : absl::StrCat("epoch ", model.epoch()).c_str(),
         model.ready() ? "ready" : "not ready");
  printf("  strategies    %s\n",
         ShortNames(model.strategies(), "DISPATCH_MODE_", mode_name).c_str());
  const v1::Limits& limits = model.limits();
  printf(
      "  limits        %lld bytes and %lld tokens a request, %lld tokens a step, top-k %d, %s a "
      "call\n",
      static_cast<long long>(limits.max_request_bytes()),
      static_cast<long long>(limits.max_request_tokens()),
      static_cast<long long>(limits.max_step_tokens()), limits.max_topk(),
      absl::FormatDuration(absl::Microseconds(limits.max_deadline_micros())).c_str());
  PrintLayers(model);
}

absl::Status Run(const std::vector<std::string>& /*given*/) {
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ClientFromFlags();
  if (!client.ok()) return client.status();
  std::vector<std::string> names = {absl::GetFlag(FLAGS_model)};
  if (names[0].empty()) {
    const absl::StatusOr<v1::ListModelsResponse> list =
        (*client)->ListModels(CallOptionsFromFlags());
    if (!list.ok()) return list.status();
    names.clear();
    for (const v1::ModelSummary& summary : list->models()) names.push_back(summary.model());
    if (names.empty()) puts("this server serves no model");
  }
  for (const std::string& name : names) {
    const absl::StatusOr<v1::GetModelResponse> model =
        (*client)->GetModel(name, CallOptionsFromFlags());
    if (!model.ok()) return model.status();
    if (JsonWanted()) {
      if (absl::Status status = PrintJson(*model); !status.ok()) return status;
    } else {
      PrintModel(*model);
    }
  }
  return absl::OkStatus();
}

}  // namespace

const Command kModelCommand = {"model",
                               "what a server serves: models, types, limits, and a table of layers",
                               "  --model=NAME   only this one (default: all)\n"
                               "  --json         as JSON\n\n"
                               "  expertmesh model --target=127.0.0.1:50051\n",
                               "model json_output.cc connection_flags.cc", Run};

}  // namespace expertmesh
