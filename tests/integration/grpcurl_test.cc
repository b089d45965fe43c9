// The real grpcurl against the real server: what a person does at three in the morning. There is no
// skipping: where grpcurl is missing the test fails and says how to get it.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/integration/process.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

constexpr char kCheckpoint[] = "tests/golden/qwen3_moe_float32";
constexpr char kService[] = "expertmesh.v1.ExpertService";

std::string FindGrpcurl() {
  const std::string path = getenv("PATH") == nullptr ? "" : getenv("PATH");
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string candidate = absl::StrCat(path.substr(begin, end - begin), "/grpcurl");
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
    begin = end + 1;
  }
  return "";
}

class GrpcurlTest : public testing::Test {
 protected:
  void SetUp() override {
    grpcurl_ = FindGrpcurl();
    ASSERT_FALSE(grpcurl_.empty())
        << "grpcurl is not on the PATH: run deploy/install_deps.sh --test";
    server_ = ServerUnderTest::Start({.checkpoint = kCheckpoint, .args = {"--local_ranks=2"}});
    ASSERT_NE(server_, nullptr);
    const auto model = server_->GetModel("");
    ASSERT_TRUE(model.ok()) << model.status();
    hidden_size_ = model->hidden_size();
    layer_ = model->layers(0).index();
  }

  // grpcurl -plaintext [-d data] address words...
  FinishedProcess Run(const std::string& data, const std::vector<std::string>& words) {
    ServerProcess::Options options{.path = grpcurl_, .args = {"-plaintext"}};
    if (!data.empty()) options.args.insert(options.args.end(), {"-d", data});
    options.args.push_back(server_->address());
    options.args.insert(options.args.end(), words.begin(), words.end());
    return RunToEnd(std::move(options));
  }

  // Two tokens as a person writes them; `ids` is a JSON array's inside.
  std::string ForwardJson(const std::string& ids) const {
    std::vector<double> values;
    for (int64_t i = 0; i < 2 * hidden_size_; ++i)
      values.push_back(static_cast<double>(i % 7) * 0.25 - 0.5);
    return absl::StrCat(R"({"layer": )", layer_, R"(, "topk": {"topk": 2, "ids": [)", ids,
                        R"(], "weights": [0.75, 0.25, 1, 0.5]}, "hidden_states": {"shape": [2, )",
                        hidden_size_, R"(], "values": [)", absl::StrJoin(values, ", "), "]}}");
  }

  std::string grpcurl_;
  std::unique_ptr<ServerUnderTest> server_;
  int64_t hidden_size_ = 0;
  int32_t layer_ = 0;
};

TEST_F(GrpcurlTest, ListsAndDescribes) {
  const FinishedProcess list = Run("", {"list"});
  EXPECT_EQ(list.exit_code, 0) << list.err;
  for (const char* service : {kService, "grpc.health.v1.Health"}) {
    EXPECT_NE(list.out.find(absl::StrCat(service, "\n")), std::string::npos) << list.out;
  }
  const FinishedProcess service = Run("", {"describe", kService});
  EXPECT_EQ(service.exit_code, 0) << service.err;
  for (const char* method : {"Forward", "ForwardStream", "GetModel", "ListModels", "Explain"}) {
    EXPECT_NE(service.out.find(absl::StrCat("rpc ", method, " ")), std::string::npos)
        << service.out;
  }
  const FinishedProcess message = Run("", {"describe", "expertmesh.v1.ForwardRequest"});
  EXPECT_NE(message.out.find("hidden_states = 15"), std::string::npos)
      << message.out << message.err;
  const FinishedProcess health = Run("", {"describe", "grpc.health.v1.HealthCheckRequest"});
  EXPECT_EQ(health.exit_code, 0) << health.err;
}

TEST_F(GrpcurlTest, ForwardsValuesAndExplainsTheSameJson) {
  const std::string json = ForwardJson("0, 1, 2, -1");
  const FinishedProcess forward = Run(json, {absl::StrCat(kService, "/Forward")});
  ASSERT_EQ(forward.exit_code, 0) << forward.err;
  const nlohmann::json answer = nlohmann::json::parse(forward.out);
  ASSERT_EQ(answer["output"]["values"].size(), static_cast<size_t>(2 * hidden_size_));
  EXPECT_FALSE(answer["output"].contains("data"));
  EXPECT_EQ(answer["served_by"]["ep_size"], 2);

  // The same request from a program, in bytes, has the same numbers.
  v1::ForwardRequest request;
  request.set_layer(layer_);
  request.mutable_topk()->set_topk(2);
  for (const int id : {0, 1, 2, -1}) request.mutable_topk()->add_ids(id);
  for (const float weight : {0.75f, 0.25f, 1.0f, 0.5f}) request.mutable_topk()->add_weights(weight);
  std::string data;
  for (int64_t i = 0; i < 2 * hidden_size_; ++i) {
    const float value = static_cast<float>(i % 7) * 0.25f - 0.5f;
    data.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  request.mutable_hidden_states()->set_dtype(v1::DATA_TYPE_FLOAT32);
  request.mutable_hidden_states()->add_shape(2);
  request.mutable_hidden_states()->add_shape(hidden_size_);
  request.mutable_hidden_states()->set_data(data);
  const CallOutcome outcome = server_->Forward(request);
  ASSERT_TRUE(outcome.ok()) << outcome;
  const std::vector<double> expected = OutputValues(outcome.response.output());
  for (size_t i = 0; i < expected.size(); ++i) {
    // JSON keeps a float32 exactly: its shortest decimal form reads back as the same float.
    EXPECT_EQ(answer["output"]["values"][i].get<float>(), static_cast<float>(expected[i])) << i;
  }

  const FinishedProcess explain =
      Run(absl::StrCat(R"({"request": )", json, "}"), {absl::StrCat(kService, "/Explain")});
  ASSERT_EQ(explain.exit_code, 0) << explain.err;
  const nlohmann::json explanation = nlohmann::json::parse(explain.out);
  EXPECT_EQ(explanation["ep_size"], 2);
  EXPECT_EQ(explanation["tokens"].size(), 2u);
  EXPECT_EQ(explanation["tokens"][1]["experts"][0]["expert_id"], 2);
  EXPECT_EQ(explanation["tokens"][1]["experts"][1]["expert_id"], -1);
}

TEST_F(GrpcurlTest, ABadRequestSaysWhatIsWrong) {
  const FinishedProcess bad =
      Run(ForwardJson("0, 1, 2, 4000"), {absl::StrCat(kService, "/Forward")});
  EXPECT_NE(bad.exit_code, 0);
  for (const char* part :
       {"InvalidArgument", "topk.ids[3] is 4000", "INVALID_FIELD", "google.rpc.BadRequest"}) {
    EXPECT_NE(bad.err.find(part), std::string::npos) << part << "\n" << bad.err;
  }
  const FinishedProcess good = Run(ForwardJson("0, 1, 2, 3"), {absl::StrCat(kService, "/Forward")});
  EXPECT_EQ(good.exit_code, 0) << good.err;
}

}  // namespace
}  // namespace expertmesh
