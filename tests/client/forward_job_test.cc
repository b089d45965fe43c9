#include "client/cli/forward_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"

ABSL_DECLARE_FLAG(int, tokens);

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

class ForwardJobTest : public ::testing::Test {
 protected:
  ForwardJobTest() {
    model_.set_model("tiny");
    model_.set_hidden_size(8);
    model_.set_activation_dtype(v1::DATA_TYPE_BFLOAT16);
    v1::LayerInfo* layer = model_.add_layers();
    layer->set_num_experts(4);
    layer->set_topk(2);
  }

  absl::Status Fill(int num_tokens) {
    const absl::FlagSaver saver;
    absl::SetFlag(&FLAGS_tokens, num_tokens);
    ForwardJob job;
    absl::Status status = FillForwardJob(model_, job);
    EXPECT_EQ(job.hidden_states.shape.empty(), !status.ok());  // nothing drawn in vain
    return status;
  }

  v1::GetModelResponse model_;
};

TEST_F(ForwardJobTest, DrawsNoMoreTokensThanTheServerTakes) {
  model_.mutable_limits()->set_max_request_tokens(100);
  EXPECT_TRUE(Fill(100).ok());
  EXPECT_THAT(std::string(Fill(101).message()),
              HasSubstr("--tokens is 101; the server takes at most 100 in one request"));
}

TEST_F(ForwardJobTest, DrawsNoMoreBytesThanTheServerTakes) {
  model_.mutable_limits()->set_max_request_bytes(1600);
  EXPECT_TRUE(Fill(100).ok());
  EXPECT_THAT(std::string(Fill(101).message()),
              HasSubstr("--tokens is 101; so many of 8 values do not fit one request of 1600"));
}

// What a server of another version does not tell.
TEST_F(ForwardJobTest, NoLimitIsKnown) { EXPECT_TRUE(Fill(1000).ok()); }

}  // namespace
}  // namespace expertmesh
