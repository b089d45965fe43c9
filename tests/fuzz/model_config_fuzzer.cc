// Input: a config.json. If its last byte is neither '}' nor white space, that byte chooses an
// architecture by hand, and the rest is the text.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "server/model/architectures.h"
#include "server/model/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::string_view text(reinterpret_cast<const char*>(data), size);
  absl::string_view architecture;
  if (!text.empty() && absl::string_view("} \n").find(text.back()) == absl::string_view::npos) {
    const auto& known = expertmesh::KnownArchitectures();
    architecture = known[static_cast<uint8_t>(text.back()) % known.size()].name;
    text.remove_suffix(1);
  }
  const auto config = expertmesh::ParseModelConfig(text, architecture);
  if (!config.ok()) return 0;
  expertmesh::ModelSpec spec = config->spec;
  spec.weight_dtype = expertmesh::DType::kBFloat16;
  const absl::Status valid = expertmesh::ValidateModelSpec(spec);
  if (!valid.ok()) {
    std::fprintf(stderr, "accepted config gives a bad spec: %s\n", valid.ToString().c_str());
    std::abort();
  }
  return 0;
}
