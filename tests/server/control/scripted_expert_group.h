#ifndef EXPERTMESH_TESTS_SERVER_CONTROL_SCRIPTED_EXPERT_GROUP_H_
#define EXPERTMESH_TESTS_SERVER_CONTROL_SCRIPTED_EXPERT_GROUP_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/base/host_buffer_pool.h"
#include "kernels/base/step_arena.h"
#include "server/cluster/expert_group.h"
#include "server/model/model_spec.h"

namespace expertmesh {

// What one RunStep was given.
struct SeenStep {
  StepHeader header;
  int64_t num_tokens = 0;
  std::vector<int64_t> shard_tokens;
  std::vector<RowSpan> rows;
  int64_t max_rank_pairs = 0;
  bool on_caller = false;
  std::thread::id thread;
};

// ep_size ranks of float32 experts whose arithmetic is exact for small numbers, driven by the real
// plan: expert e gives (e + 1) * x. A script lets steps wait, fail or lose their epoch, which no
// real group does on demand.
class ScriptedExpertGroup : public ExpertGroup {
 public:
  ScriptedExpertGroup(const ModelSpec& model, int32_t ep_size);

  // Asked at the start of each RunStep, with its number from 0, on the thread that runs it; an
  // error is the step's. Set before the first step.
  std::function<absl::Status(const GroupStep& step, int number)> script;
  // Asked at the start of each StartStep; an error is its answer. Set before the first step.
  std::function<absl::Status()> start_script;
  // UNAVAILABLE and DEADLINE_EXCEEDED from the script form the next epoch at once.
  bool forms_epochs = true;
  // Set before there is none.
  std::string why_no_epoch = "not all ranks are there";
  // With more than one, steps run when they are finished, in their order; the script is asked then.
  int32_t lanes = 1;

  void SetEpoch(uint64_t epoch) { epoch_ = epoch; }
  std::vector<SeenStep> seen() const;
  HostBufferPool* pool() { return &pool_; }

  int32_t ep_size() const override { return ep_size_; }
  uint64_t incarnation() const override { return 77; }
  uint64_t epoch() const override { return epoch_; }
  const Placement* placement(std::string_view model, int32_t layer) const override;
  std::string WhyNoEpoch() const override { return why_no_epoch; }
  Allocator* request_allocator() override { return &pool_; }
  absl::StatusOr<GroupStepResult> RunStep(GroupStep step, bool on_caller,
                                          absl::Time step_deadline) override;
  int32_t max_lanes() const override { return lanes; }
  absl::StatusOr<std::unique_ptr<StepInFlight>> StartStep(
      GroupStep step, bool has_follower, absl::Time step_deadline,
      absl::AnyInvocable<void()> on_decided) override;
  void SkipFollower() override { open_promise_.reset(); }
  // Steps that were started while another was in flight.
  int64_t num_overlaps() const { return num_overlaps_; }

 private:
  class Flight;
  absl::StatusOr<GroupStepResult> Run(const GroupStep& step, bool on_caller);
  int Remember(const GroupStep& step, bool on_caller);
  GroupStepResult Compute(const GroupStep& step);

  const ModelSpec& model_;
  const int32_t ep_size_;
  HostBufferPool pool_;
  StepArenaPool arenas_{&pool_};
  std::map<int32_t, Placement> placements_;  // by layer
  std::atomic<uint64_t> epoch_{1};
  std::atomic<bool> running_{false};
  std::atomic<int64_t> num_in_flight_{0};
  std::atomic<int64_t> num_overlaps_{0};
  std::shared_ptr<bool> open_promise_;  // of the step that was started last
  mutable std::mutex mutex_;
  std::vector<SeenStep> seen_;
};

// A test's door: waits until it is opened.
class Gate {
 public:
  void Open();
  void Wait();

 private:
  std::mutex mutex_;
  std::condition_variable cv_;
  bool open_ = false;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_CONTROL_SCRIPTED_EXPERT_GROUP_H_
