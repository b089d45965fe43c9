#include "kernels/cuda/grouped_gemm.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/random_gemm.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

void RunAndCheck(const GemmCase& c, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + " n " + std::to_string(c.n) + " k " +
               std::to_string(c.k) + " form " + std::to_string(static_cast<int>(c.form)) +
               " rows " + std::string(DTypeName(c.rows_dtype)) + " weights " +
               std::string(DTypeName(c.weight_dtype)) + " output " +
               std::string(DTypeName(c.output_dtype)));
  RandomGemm gemm(c, seed);
  const DeviceBytes output = gemm.Run();
  gemm.ExpectNearReference(output);
  gemm.ExpectPaddingUntouched(output);
}

TEST(GroupedGemmTest, EveryTypeAndForm) {
  uint64_t seed = 0;
  for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kBatched, GemmForm::kMasked}) {
    for (const DType rows_dtype : kDTypes) {
      for (const DType weight_dtype : kDTypes) {
        for (const DType output_dtype : kDTypes) {
          ++seed;
          const int64_t n = seed % 2 == 0 ? 72 : 5;
          const int64_t k = seed % 3 == 0 ? 40 : 33;
          RunAndCheck({rows_dtype, weight_dtype, output_dtype, n, k, {3, 0, 1}, form}, seed);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(GroupedGemmTest, TileEdges) {
  uint64_t seed = 100;
  for (const int64_t n : {1, 63, 64, 65, 130}) {
    for (const int64_t k : {1, 16, 17, 129}) {
      for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kMasked}) {
        RunAndCheck(
            {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, n, k, {0, 65, 0, 1, 64}, form},
            ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(GroupedGemmTest, Float8WithBlockScales) {
  uint64_t seed = 200;
  for (const int64_t n : {1, 128, 200}) {
    for (const int64_t k : {1, 127, 128, 300}) {
      for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kBatched, GemmForm::kMasked}) {
        RunAndCheck({DType::kFloat8E4M3,
                     DType::kFloat8E4M3,
                     seed % 2 == 0 ? DType::kFloat32 : DType::kBFloat16,
                     n,
                     k,
                     {2, 0, 17},
                     form},
                    ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(GroupedGemmTest, Bias) {
  uint64_t seed = 230;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kBatched, GemmForm::kMasked}) {
      GemmCase c = {dtype, dtype, DType::kFloat32, 200, 128, {3, 0, 17}, form};
      c.with_bias = true;
      RunAndCheck(c, ++seed);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(GroupedGemmTest, FusedSiluMul) {
  uint64_t seed = 250;
  for (const DType dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kBatched, GemmForm::kMasked}) {
        const int64_t n = seed % 2 == 0 ? 16 : 208;
        GemmCase c = {dtype, dtype, output_dtype, n, 40, {3, 0, 17}, form};
        c.fuse_silu_mul = true;
        c.with_bias = seed % 3 == 0;
        RunAndCheck(c, ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// More experts than one launch of kernel parameters holds.
TEST(GroupedGemmTest, ManyExperts) {
  std::vector<int32_t> tokens;
  for (int e = 0; e < 500; ++e) tokens.push_back(e % 5 == 0 ? 0 : 1);
  for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kMasked}) {
    RunAndCheck({DType::kBFloat16, DType::kBFloat16, DType::kFloat32, 3, 8, tokens, form}, 300);
  }
}

TEST(GroupedGemmTest, BytesOfARowDoNotDependOnItsNeighbours) {
  uint64_t seed = 400;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
    SCOPED_TRACE("seed " + std::to_string(++seed));
    RandomGemm all({dtype, dtype, DType::kFloat32, 136, 264, {70, 1, 0, 9}}, seed);
    const DeviceBytes output = all.Run();
    for (const int32_t count : {1, 8, 66}) {
      RandomGemm few = all.WithLastRows(count);
      const DeviceBytes few_output = few.Run();
      for (size_t e = 0; e < few.gemm_case().tokens.size(); ++e) {
        const int64_t kept = few.gemm_case().tokens[e] * few.row_bytes();
        const int64_t first =
            (all.FirstRow(e) + all.gemm_case().tokens[e]) * all.row_bytes() - kept;
        EXPECT_TRUE(std::equal(output.data() + first, output.data() + first + kept,
                               few_output.data() + few.FirstRow(e) * few.row_bytes()))
            << "expert " << e << " with " << count << " rows";
      }
    }
  }
}

// On a GPU of sm_90 each is a kernel of its own; elsewhere no tile is chosen.
std::vector<GemmTile> TilesOf(DType dtype) {
  std::vector<GemmTile> tiles = {GemmTile::kRows64, GemmTile::kRows128};
  if (dtype != DType::kFloat16) tiles.push_back(GemmTile::kRows16);
  if (dtype == DType::kBFloat16) tiles.push_back(GemmTile::kRows256);
  return tiles;
}

TEST(GroupedGemmTest, EveryTileGivesTheSameBytes) {
  uint64_t seed = 500;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kBatched, GemmForm::kMasked}) {
      SCOPED_TRACE("seed " + std::to_string(++seed));
      const bool is_fused = form == GemmForm::kBatched && dtype != DType::kFloat8E4M3;
      GemmCase c = {dtype, dtype, is_fused ? dtype : DType::kFloat32, 144, 384, {0, 70, 1, 0, 9},
                    form};
      c.fuse_silu_mul = is_fused;
      std::vector<std::byte> first;
      for (const GemmTile tile : TilesOf(dtype)) {
        c.tile = tile;
        RandomGemm gemm(c, seed);
        const DeviceBytes output = gemm.Run();
        gemm.ExpectNearReference(output);
        gemm.ExpectPaddingUntouched(output);
        if (first.empty()) first = output.bytes();
        EXPECT_EQ(output.bytes(), first) << DTypeName(dtype) << " " << GemmTileRows(tile);
        if (!gemm.uses_tensor_cores()) break;
      }
    }
  }
}

// What a tile could add up otherwise than another: long sums of values of many sizes, and of values
// that cancel, where one bit cut off elsewhere is all of the result.
TEST(GroupedGemmTest, EveryTileGivesTheSameBytesForHardSums) {
  uint64_t seed = 600;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    for (const GemmValues values :
         {GemmValues::kEven, GemmValues::kSpread, GemmValues::kCancelling}) {
      for (const bool is_fused : {false, true}) {
        if (is_fused && dtype == DType::kFloat8E4M3) continue;
        for (const int64_t k : {256, 2048, 7168}) {
          SCOPED_TRACE("seed " + std::to_string(++seed) + " k " + std::to_string(k) + " values " +
                       std::to_string(static_cast<int>(values)) + (is_fused ? " fused" : ""));
          GemmCase c = {dtype, dtype, is_fused ? dtype : DType::kFloat32, 144, k, {70, 9}};
          c.fuse_silu_mul = is_fused;
          c.values = values;
          RandomGemm gemm(c, seed);
          std::vector<std::byte> first;
          for (const GemmTile tile : TilesOf(dtype)) {
            gemm.set_tile(tile);
            const DeviceBytes output = gemm.Run();
            if (first.empty()) {
              gemm.ExpectNearReference(output, 23);
              first = output.bytes();
            }
            EXPECT_TRUE(output.bytes() == first) << DTypeName(dtype) << " " << GemmTileRows(tile);
            if (!gemm.uses_tensor_cores()) break;
          }
          if (testing::Test::HasFatalFailure()) return;
          if (!gemm.uses_tensor_cores()) break;  // one kernel, and on a CPU a slow one
        }
      }
    }
  }
}

// Never on the tensor cores: what compute-sanitizer has the time to watch.
TEST(SimtGroupedGemmTest, TileEdgesOfMixedTypes) {
  uint64_t seed = 700;
  for (const int64_t n : {1, 65}) {
    for (const int64_t k : {1, 17}) {
      for (const GemmForm form : {GemmForm::kContiguous, GemmForm::kBatched, GemmForm::kMasked}) {
        RunAndCheck({DType::kFloat32, DType::kBFloat16, DType::kFloat32, n, k, {0, 65, 1}, form},
                    ++seed);
        RunAndCheck({DType::kFloat8E4M3, DType::kFloat8E4M3, DType::kBFloat16, n, k, {3, 0}, form},
                    ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
  GemmCase fused = {DType::kFloat32, DType::kFloat16, DType::kFloat16, 80, 33, {3, 0, 17}};
  fused.fuse_silu_mul = true;
  fused.with_bias = true;
  RunAndCheck(fused, ++seed);
}

TEST(GroupedGemmTest, MaskedCountsAreHeldToTheBatch) {
  const std::vector<int32_t> tokens = {-5, 7};
  const DeviceBytes device_tokens = DeviceCopy(tokens);
  const DeviceBytes rows = DeviceCopy(std::vector<float>{1, 2, 3, 4});
  const DeviceBytes weights = DeviceCopy(std::vector<float>{10, 100});
  const GemmWorkspace workspace(2);
  CudaGroupedGemmParams params;
  params.num_experts = 2;
  params.max_rows_per_expert = 2;
  params.expert_num_tokens = device_tokens.As<int32_t>();
  params.rows = rows.data();
  params.weights = weights.data();
  params.rows_dtype = params.weight_dtype = params.output_dtype = DType::kFloat32;
  params.n = params.k = 1;
  workspace.GiveTo(params);
  const DeviceBytes output = RunRepeatedly(4 * 4, 0, [&](std::byte* out) {
    params.output = out;
    return LaunchMaskedGroupedGemm(params, nullptr);
  });
  EXPECT_TRUE(output.IsPoison(0, 8));
  EXPECT_EQ(output.As<float>()[2], 300);
  EXPECT_EQ(output.As<float>()[3], 400);
}

TEST(GroupedGemmTest, ZeroRowsLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  const DeviceBytes memory(1024);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  const std::vector<int64_t> no_rows = {0, 0, 0};
  const std::vector<int64_t> one_row = {0, 0, 1};
  CudaGroupedGemmParams params;
  params.num_experts = 2;
  params.rows_dtype = params.weight_dtype = params.output_dtype = DType::kBFloat16;
  params.n = params.k = 8;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorInvalidValue) << "whose rows?";
  params.expert_offsets = no_rows.data();
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchMaskedGroupedGemm(params, nullptr), cudaErrorInvalidValue);
  params.expert_offsets = one_row.data();
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorInvalidValue) << "no memory";
  params.rows = params.weights = params.output = memory.data();
  params.workspace = memory.data() + (256 - address % 256) % 256;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorInvalidValue) << "no workspace";
  params.workspace_bytes = GroupedGemmWorkspaceBytes(2);
  params.workspace = static_cast<std::byte*>(params.workspace) + 8;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorMisalignedAddress);

  const auto refused = [&](auto change) {
    CudaGroupedGemmParams bad = params;
    change(bad);
    EXPECT_EQ(LaunchGroupedGemm(bad, nullptr), cudaErrorInvalidValue);
  };
  const std::vector<int64_t> descending = {0, 2, 1};
  const std::vector<int64_t> too_many = {0, 0, int64_t{1} << 31};
  const std::vector<int32_t> above_max = {0, 3};
  refused([&](auto& bad) { bad.expert_offsets = descending.data(); });
  refused([&](auto& bad) { bad.expert_offsets = too_many.data(); });
  refused([&](auto& bad) { bad.max_rows_per_expert = 2; });
  refused([&](auto& bad) {
    bad.max_rows_per_expert = 2;
    bad.expert_num_tokens = above_max.data();
  });
  refused([](auto& bad) { bad.rows_dtype = DType::kFloat8E4M3; });
  refused([](auto& bad) { bad.weight_dtype = DType::kFloat8E4M3; });
  refused([](auto& bad) { bad.rows_dtype = bad.weight_dtype = DType::kFloat8E4M3; });
  refused([](auto& bad) { bad.output_dtype = DType::kInt8; });
  refused([](auto& bad) { bad.n = 0; });
  refused([](auto& bad) { bad.k = int64_t{1} << 31; });
  refused([](auto& bad) { bad.num_experts = 0; });
  refused([](auto& bad) { bad.fuse_silu_mul = true; });
  params.rows_dtype = params.weight_dtype = DType::kFloat8E4M3;
  params.row_scales = params.weight_scales = memory.As<float>();
  params.n = 256;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorMisalignedAddress);
  refused([](auto& bad) { bad.fuse_silu_mul = true; });  // its gate and up would share scales
  EXPECT_EQ(NumLaunches(), launches);
}

}  // namespace
}  // namespace expertmesh
