#ifndef EXPERTMESH_TESTS_INTEGRATION_PROCESS_USAGE_H_
#define EXPERTMESH_TESTS_INTEGRATION_PROCESS_USAGE_H_

#include <sys/types.h>

#include <cstdint>
#include <iosfwd>

#include "absl/time/time.h"

namespace expertmesh {

// What a running process holds, from /proc. All -1 when it is gone.
struct ProcessUsage {
  int64_t resident_bytes = -1;
  int64_t max_resident_bytes = -1;  // since its start
  int64_t num_threads = -1;
  int64_t num_fds = -1;
};
ProcessUsage UsageOf(pid_t pid);
// What all its threads have computed since its start, which does not grow with what else the
// machine does; to 10 ms. Zero when it is gone.
absl::Duration CpuTimeOf(pid_t pid);
// All its threads are: SIGSTOP takes effect some time after kill has returned.
bool IsStopped(pid_t pid);
// False when a minute has not been enough.
bool WaitUntilStopped(pid_t pid);
std::ostream& operator<<(std::ostream& out, const ProcessUsage& usage);

// Sanitizers' shadow memory and quarantine make resident bytes say nothing.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kResidentBytesMeanSomething = false;
#else
inline constexpr bool kResidentBytesMeanSomething = true;
#endif

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_PROCESS_USAGE_H_
