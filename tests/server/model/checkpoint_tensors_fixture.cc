#include "tests/server/model/checkpoint_tensors_fixture.h"

#include <nlohmann/json.hpp>

namespace expertmesh {

void CheckpointTensorsTest::EditConfig(const std::string& changes) {
  nlohmann::json config = nlohmann::json::parse(scratch_.Read("config.json"));
  config.update(nlohmann::json::parse(changes));
  scratch_.Write("config.json", config.dump());
}

}  // namespace expertmesh
