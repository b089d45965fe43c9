#ifndef EXPERTMESH_KERNELS_BASE_PARALLEL_FOR_H_
#define EXPERTMESH_KERNELS_BASE_PARALLEL_FOR_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace expertmesh {

struct ParallelForOptions {
  int num_threads = 1;  // the caller included; at least 1
  // How long an idle worker spins before it parks. 0 on machines with no spare core: a spinner
  // holds the core that gRPC's poller or the client needs.
  int64_t spin_micros = 0;
};

// A fixed team of threads for one rank, which works for one caller at a time. Thread safe; calls
// must not be nested and tasks must not block. Which thread runs a task must never influence a
// result.
class ParallelFor {
 public:
  // std::system_error when the machine gives no more threads; those started have ended then.
  explicit ParallelFor(const ParallelForOptions& options);
  ~ParallelFor();
  ParallelFor(const ParallelFor&) = delete;
  ParallelFor& operator=(const ParallelFor&) = delete;

  int num_threads() const;

  // Calls task(i, worker) once for every i in [0, num_tasks), worker in [0, num_threads); returns
  // when all are done. Tasks start in ascending order. `estimated_micros` is the work of all tasks
  // on one thread: below kMinParallelMicros the caller runs everything, since waking a parked
  // thread costs as much. Otherwise waits while the team works for another caller.
  void Run(int64_t num_tasks, double estimated_micros,
           absl::FunctionRef<void(int64_t task, int worker)> task);

  // The same, but does not wait for a busy team: the caller runs everything (as worker 0). For
  // short work beside another caller's long one.
  void RunNow(int64_t num_tasks, double estimated_micros,
              absl::FunctionRef<void(int64_t task, int worker)> task);

  static constexpr double kMinParallelMicros = 250;

 private:
  struct State;
  bool IsForOne(int64_t num_tasks, double estimated_micros) const;
  static void RunAlone(int64_t num_tasks, absl::FunctionRef<void(int64_t task, int worker)> task);
  void RunByTeam(int64_t num_tasks, absl::FunctionRef<void(int64_t task, int worker)> task);

  std::unique_ptr<State> state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_PARALLEL_FOR_H_
