#include "tests/integration/golden_server.h"

namespace expertmesh {

ServerUnderTest::Options GoldenServer() {
  ServerUnderTest::Options options;
  options.program = "expertmesh-control-plane-emulated-gpu";
  options.args = {"--device=cuda:0"};
  return options;
}

}  // namespace expertmesh
