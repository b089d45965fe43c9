#ifndef EXPERTMESH_TESTS_INTEGRATION_GOLDEN_REQUEST_H_
#define EXPERTMESH_TESTS_INTEGRATION_GOLDEN_REQUEST_H_

#include "expertmesh/v1/expert_service.pb.h"
#include "tests/golden/golden_fixture.h"

namespace expertmesh {

// The fixture's own case for `layer`, of a bfloat16 model, with its top-k.
v1::ForwardRequest GoldenRequest(const GoldenLayer& layer);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_GOLDEN_REQUEST_H_
