// What of Hopper's kernels a CPU can check: CUTLASS's layouts are host functions too. No GPU is
// needed, and no kernel is compiled.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/sm90_grouped_gemm.cuh"

namespace expertmesh {
namespace {

using cute::_;
using cute::Int;
using cute::make_coord;
using cute::make_shape;
using cute::Underscore;

template <class Gemm>
class Sm90GroupedGemmTest : public testing::Test {};

using Gemms = testing::Types<Sm90Rows16<Sm90BFloat16>, Sm90Rows64<Sm90BFloat16>,
                             Sm90Rows128PingPong<Sm90BFloat16>, Sm90Rows256<Sm90BFloat16>,
                             Sm90Rows64<Sm90Float16>, Sm90Rows128PingPong<Sm90Float16>,
                             Sm90Rows16<Sm90Float8Operands>, Sm90Rows64<Sm90Float8Operands>,
                             Sm90Rows128<Sm90Float8Operands>>;
TYPED_TEST_SUITE(Sm90GroupedGemmTest, Gemms);

template <class Gemm>
inline constexpr int kTileRows = cute::size<1>(typename Gemm::TileShape{});
template <class Gemm>
inline constexpr int kTileK = cute::size<2>(typename Gemm::TileShape{});

// The epilogue's view of the accumulators: each output once, and the up's sum of an output two
// values behind the gate's.
TYPED_TEST(Sm90GroupedGemmTest, ThreadsHoldEachOutputOnceAndGateBesideUp) {
  constexpr int kRows = kTileRows<TypeParam>;
  constexpr int kWeightRows = kSm90TileWeightRows;
  typename TypeParam::Mainloop::TiledMma mma;
  const auto tile_shape = make_shape(Int<kWeightRows>{}, Int<kRows>{});
  const auto tile =
      cute::local_tile(cute::make_identity_tensor(make_shape(3 * kWeightRows - 16, 2 * kRows - 3)),
                       tile_shape, make_coord(1, 1));
  std::vector<int> times(static_cast<size_t>(kWeightRows * kRows), 0);
  for (int thread = 0; thread < cute::size(mma); ++thread) {
    const auto coords = mma.get_thread_slice(thread).partition_C(tile);
    for (int i = 0; i < cute::size(coords); ++i) {
      const int weight_row = cute::get<0>(coords(i)) - kWeightRows;
      const int row = cute::get<1>(coords(i)) - kRows;
      ASSERT_TRUE(weight_row >= 0 && weight_row < kWeightRows && row >= 0 && row < kRows);
      ++times[static_cast<size_t>(weight_row * kRows + row)];
      if (i % 4 >= 2) continue;
      EXPECT_EQ(weight_row, GateWeightRow(weight_row / 16 * 8 + weight_row % 8));
      EXPECT_EQ(cute::get<0>(coords(i + 2)) - kWeightRows,
                UpWeightRow(weight_row / 16 * 8 + weight_row % 8));
      EXPECT_EQ(cute::get<1>(coords(i + 2)) - kRows, row);
    }
  }
  EXPECT_EQ(times, std::vector<int>(times.size(), 1));
}

TYPED_TEST(Sm90GroupedGemmTest, OneStepOfKPerWeightForm) {
  const bool is_float8 = sizeof(typename TypeParam::Element) == 1;
  EXPECT_EQ(kTileK<TypeParam>, is_float8 ? 128 : 64);
  EXPECT_GE(TypeParam::Mainloop::DispatchPolicy::Stages, 4) << "too few loads in flight";
}

TYPED_TEST(Sm90GroupedGemmTest, ArgumentsNameTheWorkspacesArrays) {
  int64_t bytes = 0;
  std::vector<std::byte> memory(1 << 16);
  CudaGroupedGemmParams params;
  params.output = &bytes;
  params.fuse_silu_mul = true;
  const float bias = 0;
  params.bias = &bias;
  Sm90GemmLaunch launch;
  launch.arrays = GemmGroupArraysAt(memory.data(), 7, &bytes);
  launch.num_groups = 5;
  for (const int multiprocessors : {1, 2, 78, 131, 132, kSm90MaxMultiprocessors}) {
    for (const int64_t max_tiles : {int64_t{1}, int64_t{5}, int64_t{131}, int64_t{1} << 40}) {
      SCOPED_TRACE(std::to_string(multiprocessors) + " " + std::to_string(max_tiles));
      constexpr int kCluster = cute::size(typename TypeParam::ClusterShape{});
      if (multiprocessors < kCluster) continue;
      launch.max_tiles = max_tiles;
      const auto arguments = TypeParam::ArgumentsOf(params, launch, multiprocessors);
      EXPECT_EQ(arguments.problem_shape.num_groups, 5);
      EXPECT_EQ(static_cast<void*>(arguments.problem_shape.problem_shapes), launch.arrays.shapes);
      EXPECT_EQ(static_cast<void*>(arguments.mainloop.ptr_A), launch.arrays.weights);
      EXPECT_EQ(static_cast<void*>(arguments.mainloop.ptr_B), launch.arrays.rows);
      EXPECT_EQ(static_cast<void*>(arguments.mainloop.dA), launch.arrays.strides);
      EXPECT_EQ(static_cast<void*>(arguments.mainloop.dB), launch.arrays.strides);
      if constexpr (sizeof(typename TypeParam::Element) == 1) {
        EXPECT_EQ(arguments.mainloop.ptr_SFA, launch.arrays.weight_scales);
        EXPECT_EQ(arguments.mainloop.ptr_SFB, launch.arrays.row_scales);
      }
      EXPECT_EQ(arguments.epilogue.groups, launch.arrays.groups);
      EXPECT_EQ(arguments.epilogue.output, params.output);
      EXPECT_EQ(arguments.epilogue.bias, params.bias);
      EXPECT_TRUE(arguments.epilogue.fuse_silu_mul);
      const int blocks = arguments.hw_info.sm_count;
      EXPECT_GE(blocks, kCluster);
      EXPECT_LE(blocks, multiprocessors);
      EXPECT_EQ(blocks % kCluster, 0);
      EXPECT_LT(blocks, max_tiles + kCluster);
      EXPECT_TRUE(TypeParam::Kernel::can_implement(arguments));
      EXPECT_LE(static_cast<int64_t>(TypeParam::Kernel::get_workspace_size(arguments)),
                kSm90TensorMapBytes);
    }
  }
}

// A shape as CUTLASS reads what LaunchWriteGemmGroups writes.
TEST(Sm90GroupedGemmArraysTest, ShapesAndStridesHaveCutlassLayout) {
  GemmGroupShape shape = {3, 4, 5};
  const auto& as_cutlass = *reinterpret_cast<const cute::Shape<int, int, int>*>(&shape);
  EXPECT_EQ(cute::get<0>(as_cutlass), 3);
  EXPECT_EQ(cute::get<1>(as_cutlass), 4);
  EXPECT_EQ(cute::get<2>(as_cutlass), 5);
  const int64_t stride = int64_t{7} << 40;
  using Mainloop = Sm90Rows64<Sm90BFloat16>::Mainloop;
  EXPECT_EQ(cute::get<0>(*reinterpret_cast<const Mainloop::InternalStrideA*>(&stride)), stride);
  EXPECT_EQ(cute::get<0>(*reinterpret_cast<const Mainloop::InternalStrideB*>(&stride)), stride);
  // Both operands lie k by k.
  EXPECT_EQ(cute::get<1>(Mainloop::InternalStrideA{}), 1);
  EXPECT_EQ(cute::get<1>(Mainloop::InternalStrideB{}), 1);
}

// Scales from the tensors of CudaGroupedGemmParams to the values that the accumulators meet, by the
// steps of CUTLASS's mainloop (load_auxiliary and mma of its blockwise CollectiveMma).
template <class Gemm>
class Sm90ScalesTest : public testing::Test {};
using ScaledGemms = testing::Types<Sm90Rows16<Sm90Float8Operands>, Sm90Rows64<Sm90Float8Operands>,
                                   Sm90Rows128<Sm90Float8Operands>>;
TYPED_TEST_SUITE(Sm90ScalesTest, ScaledGemms);

TYPED_TEST(Sm90ScalesTest, EachAccumulatorMeetsItsRowsAndItsWeightsScale) {
  using Mainloop = typename TypeParam::Mainloop;
  using Scales = typename Mainloop::ScaleConfig;
  using TileShape = typename TypeParam::TileShape;
  using Step = cute::Step<Underscore, cute::_1, cute::_1>;
  constexpr int kRows = kTileRows<TypeParam>;
  constexpr int kBlocks = 5;
  constexpr int kNumWeightRows = 3 * 128 + 40;
  constexpr int kNumRows = kRows + kRows / 2 + 1;
  constexpr int kKTile = 2;
  constexpr int kStage = 1;
  const auto problem = make_shape(kNumWeightRows, kNumRows, kBlocks * 128, 1);
  const auto weight_layout = Scales::tile_atom_to_shape_SFA(problem);
  const auto row_layout = Scales::tile_atom_to_shape_SFB(problem);
  for (int k = 0; k < kBlocks * 128; k += 64) {
    for (int row = 0; row < kNumWeightRows; ++row) {
      ASSERT_EQ(weight_layout(row, k, 0), row / 128 * kBlocks + k / 128);
    }
    for (int row = 0; row < kNumRows; ++row) {
      ASSERT_EQ(row_layout(row, k, 0), row * kBlocks + k / 128);
    }
  }

  // Row scales of the second tile of rows, whose end does not exist, through one warp's copies.
  std::vector<float> global(static_cast<size_t>(kNumRows * kBlocks));
  for (size_t i = 0; i < global.size(); ++i) global[i] = static_cast<float>(i + 1);
  const typename Mainloop::SmemLayoutSFB shared_layout;
  std::vector<float> shared(static_cast<size_t>(cute::cosize(shared_layout)), -1.0f);
  const auto shared_tensor = cute::make_tensor(shared.data(), shared_layout);
  const auto source = cute::local_tile(cute::make_tensor(global.data(), row_layout), TileShape{},
                                       make_coord(_, _, _), Step{})(_, _, 1, _, 0);
  const auto coords = cute::local_tile(cute::make_identity_tensor(cute::shape(row_layout)),
                                       TileShape{}, make_coord(_, _, _), Step{})(_, _, 1, _, 0);
  const auto copy = cute::make_tiled_copy(cute::Copy_Atom<cute::UniversalCopy<float>, float>{},
                                          cute::Layout<cute::Shape<cute::_32>>{},
                                          cute::Layout<cute::Shape<cute::_1>>{});
  for (int lane = 0; lane < 32; ++lane) {
    if (lane >= Mainloop::ScaleNsPerTile) continue;
    const auto slice = copy.get_slice(lane);
    const auto from = cute::filter_zeros(slice.partition_S(source)(_, _, _, kKTile));
    const auto at = cute::filter_zeros(slice.partition_S(coords)(_, _, _, kKTile));
    const auto to = cute::filter_zeros(slice.partition_D(shared_tensor)(_, _, _, kStage));
    for (int i = 0; i < cute::size(to); ++i) {
      if (cute::elem_less(at(i), cute::shape(row_layout))) to(i) = from(i);
    }
  }

  // What each thread of the product reads back.
  const auto view = cute::make_tensor(
      shared.data(),
      cute::make_layout(
          make_shape(cute::get<0>(TileShape{}), cute::shape<0>(shared_layout),
                     make_shape(cute::shape<1>(shared_layout), cute::shape<2>(shared_layout))),
          cute::make_stride(
              cute::_0{}, cute::stride<0>(shared_layout),
              cute::make_stride(cute::stride<1>(shared_layout), cute::stride<2>(shared_layout)))));
  typename Mainloop::TiledMma mma;
  const auto tile =
      cute::make_identity_tensor(make_shape(Int<kSm90TileWeightRows>{}, Int<kRows>{}));
  for (int thread = 0; thread < cute::size(mma); ++thread) {
    const auto scales = mma.get_slice(thread).partition_C(view);
    auto in_registers = cute::make_tensor_like<float>(scales(_, _, _, cute::_0{}));
    cute::clear(in_registers);
    cute::copy(scales(_, _, _, make_coord(cute::_0{}, kStage)), in_registers);
    const auto outputs = mma.get_slice(thread).partition_C(tile);
    for (int i = 0; i < cute::size(outputs); ++i) {
      const int row = kRows + cute::get<1>(outputs(i));
      if (row < kNumRows) {
        ASSERT_EQ(in_registers(i), static_cast<float>(row * kBlocks + kKTile + 1));
      }
    }
  }
}

}  // namespace
}  // namespace expertmesh
