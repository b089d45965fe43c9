#ifndef EXPERTMESH_TESTS_SERVER_RANK_FAKE_DEVICE_BACKEND_H_
#define EXPERTMESH_TESTS_SERVER_RANK_FAKE_DEVICE_BACKEND_H_

#include <memory>

#include "server/rank/rank_backend.h"
#include "tests/kernels/base/fake_device.h"

namespace expertmesh {

// The CPU's kernels on a FakeDevice: rows live in memory that faults when the host touches it
// outside the order of a stream, and work runs after the call that enqueued it, as on a GPU. Ranks
// that exchange rows in this process share the device.
std::unique_ptr<RankBackend> NewFakeDeviceBackend(std::shared_ptr<FakeDevice> device);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RANK_FAKE_DEVICE_BACKEND_H_
