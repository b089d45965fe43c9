#include "server/rpc/forward_response.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

#include "expertmesh/v1/expert_service.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/cluster/expert_group.h"

namespace expertmesh {
namespace {

// Its ranks are others in each epoch: of "sm_90" and fp8 in the first, of "avx2" after it.
class ChangingGroup : public ExpertGroup {
 public:
  explicit ChangingGroup(uint64_t epoch) : epoch_(epoch) {}
  int32_t ep_size() const override { return 2; }
  bool is_remote() const override { return true; }
  uint64_t incarnation() const override { return 77; }
  uint64_t epoch() const override { return epoch_; }
  std::string instruction_set() const override { return epoch_ == 1 ? "sm_90" : "avx2"; }
  DType weight_dtype(std::string_view) const override {
    return epoch_ == 1 ? DType::kFloat8E4M3 : DType::kBFloat16;
  }
  const Placement* placement(std::string_view, int32_t) const override { return nullptr; }
  Allocator* request_allocator() override { return nullptr; }
  absl::StatusOr<GroupStepResult> RunStep(GroupStep, bool, absl::Time) override {
    return absl::UnimplementedError("no step runs here");
  }

 private:
  const uint64_t epoch_;
};

v1::ServedBy ServedByOf(uint64_t step_epoch, uint64_t epoch_now) {
  ModelSpec model;
  model.name = "tiny";
  ForwardAnswerInfo info;
  info.model = &model;
  info.stats_only = true;
  ChangingGroup group(epoch_now);
  ServingBackend backend;
  backend.group = &group;
  backend.placement_fingerprints[&model] = "beef";
  ForwardResult result;
  result.incarnation = 77;
  result.epoch = step_epoch;
  result.stats.num_steps = 1;
  HostBufferPool pool;
  absl::StatusOr<grpc::ByteBuffer> answer =
      EncodeAnswer(info, backend, std::move(result), absl::ZeroDuration(), &pool);
  EXPECT_TRUE(answer.ok()) << answer.status();
  v1::ForwardResponse response;
  grpc::ProtoBufferReader reader(&*answer);
  EXPECT_TRUE(response.ParseFromZeroCopyStream(&reader));
  return response.served_by();
}

TEST(ForwardResponseTest, NamesTheRanksOfTheStepsEpochOrNone) {
  const v1::ServedBy same = ServedByOf(1, 1);
  EXPECT_EQ(same.epoch(), 1u);
  EXPECT_EQ(same.instruction_set(), "sm_90");
  EXPECT_EQ(same.weight_dtype(), v1::DATA_TYPE_FLOAT8_E4M3);
  for (const uint64_t now : {0, 2}) {
    const v1::ServedBy past = ServedByOf(1, now);
    EXPECT_EQ(past.epoch(), 1u);
    EXPECT_EQ(past.ep_size(), 2);
    EXPECT_EQ(past.instruction_set(), "");
    EXPECT_EQ(past.weight_dtype(), v1::DATA_TYPE_UNSPECIFIED);
  }
}

}  // namespace
}  // namespace expertmesh
