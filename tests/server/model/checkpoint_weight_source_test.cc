#include "server/model/checkpoint_weight_source.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/safetensors_writer.h"
#include "server/model/synthetic_checkpoint.h"
#include "tests/server/model/checkpoint_tensors_fixture.h"
#include "tests/server/model/scratch_directory.h"
#include "tests/server/model/weight_values.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kExpertDown[] = "model.layers.1.mlp.experts.2.down_proj.weight";
constexpr char kRouter[] = "model.layers.1.mlp.gate.weight";

using CheckpointWeightSourceTest = CheckpointTensorsTest;

TEST_F(CheckpointWeightSourceTest, NamesTheModelAfterItsDirectoryOrAsAsked) {
  Make();
  auto source = Open();
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->model().name, scratch_.path().substr(scratch_.path().rfind('/') + 1));
  source = CheckpointWeightSource::Open(scratch_.path() + "/./");
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->model().name, scratch_.path().substr(scratch_.path().rfind('/') + 1));
  source = Open({.model_name = "mine"});
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->model().name, "mine");
}

TEST_F(CheckpointWeightSourceTest, AMissingTensorIsNamedWithItsFile) {
  Make();
  tensors_.erase(kExpertDown);
  const auto source = Open();
  EXPECT_EQ(source.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(source.status().message()),
              AllOf(HasSubstr(scratch_.File("model.safetensors")), HasSubstr(kExpertDown),
                    HasSubstr("is missing")));
}

TEST_F(CheckpointWeightSourceTest, ASwappedShapeIsNamed) {
  Make();
  tensors_[kExpertDown].shape = {16, 24};
  EXPECT_THAT(OpenError(),
              AllOf(HasSubstr(scratch_.File("model.safetensors")), HasSubstr(kExpertDown),
                    HasSubstr("shape is [16, 24]; config.json makes it [24, 16]")));
}

TEST_F(CheckpointWeightSourceTest, ConfigAndTensorsMustAgree) {
  Make();
  EditConfig(R"({"moe_intermediate_size": 17})");
  EXPECT_THAT(OpenError(), HasSubstr("shape is [16, 24]; config.json makes it [17, 24]"));
  EditConfig(R"({"moe_intermediate_size": 16, "num_experts": 5})");
  EXPECT_THAT(OpenError(), HasSubstr("experts.4.gate_proj.weight' is missing"));
  EditConfig(R"({"num_experts": 3})");
  EXPECT_THAT(OpenError(), HasSubstr("shape is [4, 24]; config.json makes it [3, 24]"));
}

TEST_F(CheckpointWeightSourceTest, DTypesThatAreNoWeightsAreNamed) {
  for (const StoredDType dtype : {StoredDType::kI16, StoredDType::kU16}) {
    Make();
    tensors_[kExpertDown].dtype = dtype;
    EXPECT_THAT(OpenError(),
                AllOf(HasSubstr(kExpertDown), HasSubstr(std::string(StoredDTypeName(dtype))),
                      HasSubstr("expected F32, F16, BF16 or F8_E4M3")));
  }
  Make();
  tensors_[kRouter].dtype = StoredDType::kI16;
  EXPECT_THAT(OpenError(),
              AllOf(HasSubstr(kRouter), HasSubstr("dtype is I16; expected F32, F16 or BF16")));
}

TEST_F(CheckpointWeightSourceTest, ExpertsOfTwoDTypesAreRefused) {
  Make();
  tensors_[kExpertDown].dtype = StoredDType::kF16;
  EXPECT_THAT(OpenError(),
              HasSubstr("dtype is F16, loaded as float16; the experts before it load as bfloat16"));
}

TEST_F(CheckpointWeightSourceTest, TheRouterMayHaveADTypeOfItsOwn) {
  Make();
  const auto narrow = Open();
  ASSERT_TRUE(narrow.ok()) << narrow.status();
  const auto expected = (*narrow)->LoadGate(1);
  ASSERT_TRUE(expected.ok()) << expected.status();
  Tensor& router = tensors_[kRouter];
  router.dtype = StoredDType::kF32;
  router.bytes.resize(expected->weight.size() * sizeof(float));
  std::memcpy(router.bytes.data(), expected->weight.data(), router.bytes.size());
  const auto wide = Open();
  ASSERT_TRUE(wide.ok()) << wide.status();
  EXPECT_EQ((*wide)->LoadGate(1)->weight, expected->weight);
  EXPECT_EQ((*wide)->model().weight_dtype, DType::kBFloat16);
}

TEST_F(CheckpointWeightSourceTest, WithoutARouterTheServiceCannotRouteButServes) {
  Make();
  tensors_.erase(kRouter);
  const auto source = Open();
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_TRUE((*source)->model().FindLayer(0)->has_gate);
  EXPECT_FALSE((*source)->model().FindLayer(1)->has_gate);
  EXPECT_EQ((*source)->LoadGate(1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE((*source)->LoadExpert(1, 0).ok());
}

TEST_F(CheckpointWeightSourceTest, ARouterWithoutItsCorrectionBiasIsIncomplete) {
  Make("DeepseekV3ForCausalLM");
  tensors_.erase("model.layers.0.mlp.gate.e_score_correction_bias");
  EXPECT_THAT(OpenError(), HasSubstr("e_score_correction_bias' is missing"));
}

TEST_F(CheckpointWeightSourceTest, SharedExpertsAreCheckedToo) {
  Make("Qwen2MoeForCausalLM");
  tensors_["model.layers.0.mlp.shared_expert_gate.weight"].shape = {24, 1};
  EXPECT_THAT(OpenError(), AllOf(HasSubstr("shared_expert_gate"),
                                 HasSubstr("shape is [24, 1]; config.json makes it [1, 24] or")));
  Make("Qwen2MoeForCausalLM");
  tensors_.erase("model.layers.1.mlp.shared_expert.up_proj.weight");
  EXPECT_THAT(OpenError(), HasSubstr("shared_expert.up_proj.weight' is missing"));
}

TEST_F(CheckpointWeightSourceTest, BadArgumentsAreNamed) {
  Make();
  const auto source = Open();
  ASSERT_TRUE(source.ok()) << source.status();
  const auto code = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ((*source)->LoadExpert(2, 0).status().code(), code);
  EXPECT_EQ((*source)->LoadExpert(0, 4).status().code(), code);
  EXPECT_EQ((*source)->LoadExpert(0, -1).status().code(), code);
  EXPECT_EQ((*source)->LoadGate(-1).status().code(), code);
  EXPECT_EQ((*source)->LoadSharedExperts(7).status().code(), code);
  EXPECT_EQ((*source)->LoadSharedExperts(0).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(CheckpointWeightSourceTest, FingerprintIsOfTheRoutedExpertsAlone) {
  Make();
  const auto fingerprint = [this] {
    const auto source = Open();
    EXPECT_TRUE(source.ok()) << source.status();
    return (*source)->model().fingerprint;
  };
  const std::string base = fingerprint();
  tensors_["model.embed_tokens.weight"] = {StoredDType::kU8, {3}, std::vector<std::byte>(3)};
  EXPECT_EQ(fingerprint(), base);
  tensors_[kRouter].bytes[0] ^= std::byte{1};
  EXPECT_EQ(fingerprint(), base);
  tensors_[kExpertDown].bytes[5] ^= std::byte{1};
  EXPECT_NE(fingerprint(), base);
}

TEST_F(CheckpointWeightSourceTest, ACutOffFileIsRefusedAsAWhole) {
  Make();
  const std::string whole = scratch_.Read("model.safetensors");
  scratch_.Write("model.safetensors", whole.substr(0, whole.size() - 1));
  const auto source = CheckpointWeightSource::Open(scratch_.path());
  EXPECT_EQ(source.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(source.status().message()), HasSubstr("end after the file's"));
}

// Everything but one expert's pages is made unreadable: reading it must not raise SIGSEGV.
void ExpectReadsOnlyOneExpert(const std::string& architecture) {
  ScratchDirectory scratch;
  const auto summary = WriteSyntheticCheckpoint(scratch.path(), {.architecture = architecture,
                                                                 .hidden_size = 128,
                                                                 .intermediate_size = 256,
                                                                 .num_layers = 2,
                                                                 .num_experts = 8,
                                                                 .topk = 2,
                                                                 .dtype = DType::kFloat32});
  ASSERT_TRUE(summary.ok()) << summary.status();
  auto source = CheckpointWeightSource::Open(scratch.path());
  ASSERT_TRUE(source.ok()) << source.status();
  const auto loaded = (*source)->LoadExpert(1, 3);
  ASSERT_TRUE(loaded.ok()) << loaded.status();

  const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<uintptr_t> allowed;  // begin, end, ...
  for (const WeightMatrix& matrix :
       {loaded->weights.gate, loaded->weights.up, loaded->weights.down}) {
    // Gate and up may share their range, row for row.
    const bool down = matrix.data == loaded->weights.down.data;
    const int64_t rows = down ? 128 : 256, cols = down ? 256 : 128;
    const auto begin = reinterpret_cast<uintptr_t>(matrix.data);
    const int64_t last = (rows - 1) * matrix.row_stride + (cols - 1) * matrix.col_stride;
    allowed.push_back(begin / page * page);
    allowed.push_back((begin + (last + 1) * 4 + page - 1) / page * page);
  }
  int64_t num_closed = 0, num_open = 0;
  const SafetensorsFile& file = *(*source)->index().files()[0];
  const auto first = reinterpret_cast<uintptr_t>(file.Bytes(file.tensors().front()).data());
  const auto end_bytes = file.Bytes(file.tensors().back());
  const auto end = reinterpret_cast<uintptr_t>(end_bytes.data() + end_bytes.size());
  for (uintptr_t at = first / page * page; at < end; at += page) {
    bool open = false;
    for (size_t i = 0; i < allowed.size(); i += 2) open |= at >= allowed[i] && at < allowed[i + 1];
    ++(open ? num_open : num_closed);
    if (open) continue;
    ASSERT_EQ(mprotect(reinterpret_cast<void*>(at), page, PROT_NONE), 0);
  }
  // An expert is 3 * 128 * 256 * 4 bytes of 16 such: the test must close most of the file.
  EXPECT_LE(num_open, 3 * (128 * 256 * 4 / page + 2));
  EXPECT_GT(num_closed, 14 * num_open);

  const auto again = (*source)->LoadExpert(1, 3);
  ASSERT_TRUE(again.ok()) << again.status();
  double sum = 0;
  for (const double v : MatrixValues(again->weights.gate, DType::kFloat32, 256, 128)) sum += v;
  for (const double v : MatrixValues(again->weights.up, DType::kFloat32, 256, 128)) sum += v;
  for (const double v : MatrixValues(again->weights.down, DType::kFloat32, 128, 256)) sum += v;
  EXPECT_NE(sum, 0);
}

TEST(CheckpointPagesTest, PerExpertLayoutTouchesOneExpert) {
  ExpectReadsOnlyOneExpert("Qwen3MoeForCausalLM");
}

TEST(CheckpointPagesTest, FusedLayoutsTouchOneExpert) {
  ExpectReadsOnlyOneExpert("GraniteMoeForCausalLM");
  ExpectReadsOnlyOneExpert("Llama4ForCausalLM");
}

TEST(CheckpointPagesTest, OpeningMapsNoWeights) {
  // The fingerprint reads by pread: no page of the mapping may be resident in this process.
  ScratchDirectory scratch;
  ASSERT_TRUE(WriteSyntheticCheckpoint(scratch.path(), {.hidden_size = 256}).ok());
  const auto source = CheckpointWeightSource::Open(scratch.path());
  ASSERT_TRUE(source.ok()) << source.status();
  const std::string name = scratch.path().substr(scratch.path().rfind('/'));
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool in_mapping = false, seen = false;
  while (std::getline(maps, line)) {
    if (absl::StrContains(line, name)) in_mapping = seen = true;
    if (in_mapping && absl::StartsWith(line, "Rss:")) {
      EXPECT_THAT(line, HasSubstr(" 0 kB"));
      in_mapping = false;
    }
  }
  EXPECT_TRUE(seen);
}

}  // namespace
}  // namespace expertmesh
