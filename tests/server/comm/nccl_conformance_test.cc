// What every communicator must do, over a fake NCCL.
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/comm/in_process_communicator.h"
#include "tests/conformance/communicator_conformance.h"
#include "tests/server/comm/fake_nccl.h"
#include "tests/server/comm/fake_nccl_group.h"
#include "tests/server/comm/tcp_group.h"

namespace expertmesh {
namespace {

// Holds the communicator's group until it is gone.
class CheckedCommunicator : public Communicator {
 public:
  CheckedCommunicator(std::unique_ptr<Communicator> real, std::shared_ptr<FakeNccl> nccl)
      : real_(std::move(real)), nccl_(std::move(nccl)) {}
  ~CheckedCommunicator() override {
    real_.reset();
    EXPECT_EQ(nccl_->misuses(), "");
  }
  int32_t ep_rank() const override { return real_->ep_rank(); }
  int32_t ep_size() const override { return real_->ep_size(); }
  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) override {
    return real_->AllToAllV(params, stream);
  }
  absl::Status AllGatherV(const AllGatherVParams& params, Stream& stream) override {
    return real_->AllGatherV(params, stream);
  }
  absl::Status Barrier(const CollectiveTag& tag, Stream& stream) override {
    return real_->Barrier(tag, stream);
  }
  void CloseOrder(int64_t order) override { real_->CloseOrder(order); }
  void Abort(const absl::Status& reason) override { real_->Abort(reason); }
  void Break(const absl::Status& reason) override { real_->Break(reason); }
  absl::Status status() const override { return real_->status(); }
  std::vector<int64_t> bytes_sent() const override { return real_->bytes_sent(); }
  std::vector<int64_t> wait_nanos() const override { return real_->wait_nanos(); }

 private:
  std::unique_ptr<Communicator> real_;
  const std::shared_ptr<FakeNccl> nccl_;
};

enum class Control : uint8_t { kInProcess, kTcp };

auto Maker(Control control, bool has_all_to_all, bool device_streams) {
  return [=](int32_t ep_size) {
    FakeNcclGroup group;
    group.nccl = std::make_shared<FakeNccl>(has_all_to_all);
    if (device_streams) group.nccl->TreatCallersAsDeviceStreams();
    group.controls =
        control == Control::kTcp ? NewTcpGroup(ep_size) : NewInProcessCommunicators(ep_size);
    std::vector<std::unique_ptr<Communicator>> checked;
    for (auto& communicator : group.Connect(ep_size)) {
      checked.push_back(std::make_unique<CheckedCommunicator>(std::move(communicator), group.nccl));
    }
    return checked;
  };
}

// Not the other drives: an operation moves on by the communicator's thread, not the caller's, and
// one caller's inline stream would wait for what another has to run.
const std::vector<CommunicatorDrive> kDrives = {CommunicatorDrive::kThreadedStreams};

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "nccl", Maker(Control::kInProcess, true, false), kDrives)),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(NcclOverTcp, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "nccl_tcp", Maker(Control::kTcp, false, false), kDrives)),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(NcclDeviceStreams, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "nccl_device", Maker(Control::kInProcess, true, true), kDrives)),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace expertmesh
