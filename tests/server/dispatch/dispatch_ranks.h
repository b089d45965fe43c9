#ifndef EXPERTMESH_TESTS_SERVER_DISPATCH_DISPATCH_RANKS_H_
#define EXPERTMESH_TESTS_SERVER_DISPATCH_DISPATCH_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/base/host_buffer_pool.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/stream.h"
#include "kernels/cpu/cpu_kernels.h"
#include "server/comm/communicator.h"
#include "server/dispatch/dispatch_strategy.h"
#include "server/model/placement.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// All ranks of a group, with an "FFN" that multiplies a row by (global expert id + 1). Memory that
// nothing was written to is NaN.
class DispatchRanks {
 public:
  // `hidden` float32 [num_tokens, hidden_size]. In process, driven in turn by the calling thread.
  DispatchRanks(const StepPlan& plan, const Placement& placement, int64_t hidden_size,
                const std::vector<float>& hidden);
  // By these communicators; every rank's stream has a thread of its own.
  DispatchRanks(const StepPlan& plan, const Placement& placement, int64_t hidden_size,
                const std::vector<float>& hidden,
                std::vector<std::unique_ptr<Communicator>> communicators);

  // For a plan that leaves the routing to the ranks; outlives them.
  void set_router(const Router* router) { router_ = router; }
  const Communicator& communicator(int32_t rank) const { return *communicators_[rank]; }

  // Output rows of all tokens, float32, by the plan's strategy.
  std::vector<float> Run();

 private:
  struct Rank;

  void Dispatch(int32_t ep_rank, Rank& rank);
  void Compute(int32_t ep_rank, Rank& rank);
  void Finish(int32_t ep_rank, Rank& rank, std::vector<float>* outputs);

  const StepPlan& plan_;
  const Placement& placement_;
  const int64_t hidden_size_;
  const std::vector<float>& hidden_;
  const std::function<std::unique_ptr<Stream>()> new_stream_;
  const Router* router_ = nullptr;
  HostBufferPool memory_{HostBufferPoolOptions{.poison_byte = 0xff}};
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_DISPATCH_DISPATCH_RANKS_H_
