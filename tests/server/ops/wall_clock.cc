#include "tests/server/ops/wall_clock.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

std::atomic<long> offset_seconds{0};

}  // namespace

// In the place of the C library's, for the dynamic linker takes the program's own first.
extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock,
                                                                    struct timespec* now) {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += offset_seconds.load();
  return result;
}

namespace expertmesh {

void SetWallClockOffset(absl::Duration offset) { offset_seconds = absl::ToInt64Seconds(offset); }

}  // namespace expertmesh
