// LocalExpertGroup on the emulated GPU: what only a device can do to it.

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/steady_now.h"
#include "kernels/cuda/cuda_device.h"
#include "server/cluster/local_expert_group.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/server/cluster/random_moe.h"

namespace expertmesh {
namespace {

class LocalGroupOnGpuTest : public ::testing::Test {
 protected:
  LocalGroupOnGpuTest() { ResetEmulatedCuda(); }
  ~LocalGroupOnGpuTest() override {
    group_.reset();
    ResetEmulatedCuda();
  }

  void Load(int32_t num_ranks = 1) {
    LocalExpertGroupOptions options;
    options.num_ranks = num_ranks;
    options.device = OpenCudaDevice(0).value();
    options.on_device_lost = [this](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      ++num_lost_;
    };
    group_ = LoadGroup(moe_, options);
    ASSERT_NE(group_, nullptr);
  }

  const RandomMoe moe_{RandomMoeShape{24, 12, 9, 4}, 1};
  const RandomTokens tokens_{moe_, 30, DType::kFloat32, 2};
  const StepChoices choices_;
  std::unique_ptr<LocalExpertGroup> group_;
  int num_lost_ = 0;
};

TEST_F(LocalGroupOnGpuTest, ALostDeviceIsToldOf) {
  Load();
  ASSERT_TRUE(RunTokens(*group_, moe_, tokens_, choices_).ok());
  EXPECT_EQ(num_lost_, 0);
  FailEmulatedWork(cudaErrorIllegalAddress, 3);
  EXPECT_FALSE(RunTokens(*group_, moe_, tokens_, choices_).ok());
  EXPECT_EQ(num_lost_, 1);
}

// Whatever the device was at when it was lost: no rank waits for another one until the deadline.
TEST_F(LocalGroupOnGpuTest, ALostDeviceEndsTheStepOfAllRanksAtOnce) {
  constexpr absl::Duration kDeadline = absl::Hours(1);
  StepChoices choices;
  for (const bool on_caller : {true, false}) {
    for (const DispatchMode strategy :
         {DispatchMode::kAllToAll, DispatchMode::kAllGatherReduceScatter}) {
      choices.on_caller = on_caller;
      choices.strategy = strategy;
      bool failed = true;
      int64_t num_successes = 0;
      for (; failed; num_successes += on_caller ? 1 : 5) {
        SCOPED_TRACE(absl::StrCat(on_caller ? "on the caller, " : "on threads, ",
                                  std::string(DispatchModeName(strategy)), ", after ",
                                  num_successes));
        group_.reset();
        ResetEmulatedCuda({.seed = static_cast<uint64_t>(num_successes)});
        Load(2);
        std::vector<std::vector<std::byte>> memory;
        GroupStep step = MakeStep(*group_, moe_, tokens_, choices, &memory).value();
        FailEmulatedWork(cudaErrorIllegalAddress, num_successes);
        const absl::Status status =
            group_->RunStep(std::move(step), on_caller, SteadyNow() + kDeadline).status();
        failed = !status.ok();
        ASSERT_TRUE(!failed || absl::IsInternal(status)) << status;
      }
      EXPECT_GT(num_successes, 20);
    }
  }
}

// A GPU's buffers take more than was asked for, and weights are not all that it must hold.
TEST_F(LocalGroupOnGpuTest, PlansWithWhatBuffersTake) {
  LocalExpertGroupOptions options;
  options.device = OpenCudaDevice(0).value();
  group_ = LocalExpertGroup::Create(options).value();
  const WeightSource* const source = moe_.source.get();
  const int64_t need = group_->NeedBytes(absl::MakeConstSpan(&source, 1)).value()[0];
  EXPECT_EQ(group_->Load(absl::MakeConstSpan(&source, 1), nullptr, need).code(),
            absl::StatusCode::kResourceExhausted);
  const absl::Status status = group_->Load(absl::MakeConstSpan(&source, 1), nullptr, 2 * need);
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace expertmesh
