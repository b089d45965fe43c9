#ifndef EXPERTMESH_TESTS_SERVER_CONTROL_CONTROL_FIXTURE_H_
#define EXPERTMESH_TESTS_SERVER_CONTROL_CONTROL_FIXTURE_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "server/control/step_controller.h"
#include "server/ops/call_error.h"
#include "tests/server/control/fake_clock.h"
#include "tests/server/control/scripted_expert_group.h"

namespace expertmesh {

// hidden_size 8; layers 1 and 4 of 6 experts, top-2, float32.
ModelSpec SmallModel();

// Where a call's one answer arrives.
class Answer {
 public:
  void Set(absl::StatusOr<ForwardResult> result);
  bool is_set() const;
  // Blocks until it is there.
  const absl::StatusOr<ForwardResult>& Wait() const;
  absl::StatusCode WaitCode() const { return Wait().status().code(); }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable cv_;
  std::optional<absl::StatusOr<ForwardResult>> result_;
};

struct CallShape {
  int64_t num_tokens = 1;
  int32_t layer = 1;
  int32_t topk = 2;
  std::vector<int32_t> ids;  // [num_tokens, topk]; empty: random ones, -1 among them
};

struct TestCall {
  std::unique_ptr<ForwardCall> call;
  std::shared_ptr<Answer> answer = std::make_shared<Answer>();
  std::vector<float> expected;  // exact
  // Of the payload, which moves into the controller.
  const std::byte* hidden_begin = nullptr;
  const std::byte* hidden_end = nullptr;
};

std::vector<float> OutputFloats(const ForwardResult& result);
void ExpectExact(const TestCall& call);
ErrorReason ReasonOf(const absl::Status& status);
absl::Status LostStep();

class ControlFixture : public testing::Test {
 public:
  // Two ranks; nothing runs inline unless a test asks for it.
  explicit ControlFixture(int32_t ep_size = 2);
  ~ControlFixture() override;

  // With the options as they are now.
  StepController& Start();
  TestCall MakeCall(const CallShape& shape = {});
  // Keeps `call.answer` and what the test needs; the payload goes.
  ForwardCallId Submit(TestCall& call, bool may_run_inline = false);
  // A call whose step does not end before the gate opens; returns once its step runs.
  TestCall SubmitBlocker();
  // The gate must be open. Submits one more call.
  void ExpectNothingInFlight();

  ModelSpec model;
  ScriptedExpertGroup group;
  RouterTable routers;
  FakeClock clock;
  StepControllerOptions options;
  std::mt19937_64 random{42};
  Gate gate;  // opened by the destructor if the test does not
  Gate blocker_running;
  std::unique_ptr<StepController> controller;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_CONTROL_CONTROL_FIXTURE_H_
