#include "tests/integration/golden_server.h"

namespace expertmesh {

ServerUnderTest::Options GoldenServer() { return {}; }

}  // namespace expertmesh
