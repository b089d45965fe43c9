#ifndef EXPERTMESH_TESTS_INTEGRATION_GOLDEN_SERVER_H_
#define EXPERTMESH_TESTS_INTEGRATION_GOLDEN_SERVER_H_

#include "tests/integration/server_under_test.h"

namespace expertmesh {

// What golden_forward_test.cc serves its checkpoints by; one of golden_server_*.cc is linked.
ServerUnderTest::Options GoldenServer();

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_GOLDEN_SERVER_H_
