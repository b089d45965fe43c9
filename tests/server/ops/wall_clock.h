#ifndef EXPERTMESH_TESTS_SERVER_OPS_WALL_CLOCK_H_
#define EXPERTMESH_TESTS_SERVER_OPS_WALL_CLOCK_H_

#include "absl/time/time.h"

namespace expertmesh {

// Sets this process's wall clock, and no other's: for all that this program and its libraries ask
// the system for. The steady clock goes on. Back to the system's time with zero.
void SetWallClockOffset(absl::Duration offset);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_OPS_WALL_CLOCK_H_
