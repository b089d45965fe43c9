#ifndef EXPERTMESH_KERNELS_BASE_STEADY_NOW_H_
#define EXPERTMESH_KERNELS_BASE_STEADY_NOW_H_

#include <chrono>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace expertmesh {

// What deadlines inside a process are made of and compared with: the wall clock's time of its first
// use, and from there on the steady clock. Nobody who sets the wall clock ends or prolongs
// anything. Thread safe.
inline absl::Time SteadyNow() {
  struct Start {
    absl::Time wall = absl::Now();
    std::chrono::steady_clock::time_point steady = std::chrono::steady_clock::now();
  };
  static const Start start;
  return start.wall + absl::FromChrono(std::chrono::steady_clock::now() - start.steady);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_STEADY_NOW_H_
