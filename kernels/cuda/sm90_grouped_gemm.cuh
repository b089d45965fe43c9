#ifndef EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_CUH_
#define EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_CUH_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/device_kernel.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/numeric_types.h"
#include "kernels/cuda/sm90_grouped_gemm.h"
#include "kernels/cuda/sm90_row_epilogue.cuh"

namespace expertmesh {

// 16-bit operands: k in tiles of 64, the widest that shared memory's swizzle takes.
template <class Element_, class FusedOutput_>
struct Sm90PlainOperands {
  using Element = Element_;
  using FusedOutput = FusedOutput_;
  static constexpr int kTileK = 64;
  using WeightLayout = cutlass::layout::RowMajor*;
  using RowLayout = cutlass::layout::ColumnMajor*;
  using Cooperative = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using PingPong = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  static constexpr bool kScaled = false;
};

// float8 with a scale per 128 x 128 of the weights and 1 x 128 of the rows, both as their tensors
// lie: k fastest.
struct Sm90Float8Operands {
  using Element = cutlass::float_e4m3_t;
  using FusedOutput = void;  // none
  static constexpr int kTileK = 128;
  using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<128, 1, 128, cute::GMMA::Major::K,
                                                           cute::GMMA::Major::K>;
  using WeightScaleLayout = decltype(Scales::deduce_layoutSFA());
  using RowScaleLayout = decltype(Scales::deduce_layoutSFB());
  using WeightLayout = cute::tuple<cutlass::layout::RowMajor*, WeightScaleLayout*>;
  using RowLayout = cute::tuple<cutlass::layout::ColumnMajor*, RowScaleLayout*>;
  using Cooperative = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
  static constexpr bool kScaled = true;
  static_assert(kGemmScaleBlock == 128);
};

// One kernel: tiles of 128 weight rows x kTileRows rows, kClusterSize blocks side by side in weight
// rows that share each load of rows. kTileK is the operands' own and no sum is split: steps of k
// and their order are the same whatever the tile. How wgmma adds the products of a step is the
// hardware's, and could differ with its width, kTileRows; LaunchGroupedGemm says what follows.
template <class Operands, int kTileRows, class Schedule, int kClusterSize>
class Sm90GroupedGemm {
 public:
  using Element = typename Operands::Element;
  using TileShape = cute::Shape<cute::Int<kSm90TileWeightRows>, cute::Int<kTileRows>,
                                cute::Int<Operands::kTileK>>;
  using ClusterShape = cute::Shape<cute::Int<kClusterSize>, cute::_1, cute::_1>;
  using ProblemShape = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
  static_assert(sizeof(GemmGroupShape) == sizeof(cute::Shape<int, int, int>));
  using Epilogue = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
      Sm90RowEpilogue<typename Operands::FusedOutput>>;
  static constexpr int kAlignment = 16 / static_cast<int>(sizeof(Element));
  // Beyond the stages: barriers, the scheduler's ring and the tensor maps.
  static constexpr int kReservedBytes = 1024;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, typename Operands::WeightLayout,
      kAlignment, Element, typename Operands::RowLayout, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<kReservedBytes>, Schedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;

 private:
  static constexpr int kMaxSharedBytes = 227 << 10;
  static_assert(Kernel::SharedStorageSize <= kMaxSharedBytes);
  // The arrays of LaunchWriteGemmGroups are what the kernel reads.
  static_assert(sizeof(typename Mainloop::InternalStrideA) == sizeof(int64_t));
  static_assert(sizeof(typename Mainloop::InternalStrideB) == sizeof(int64_t));

  // The current device lets the kernel have that much. It remembers, so it is told once.
  static cudaError_t AllowSharedMemory() {
    constexpr int kMaxTold = 64;
    static std::atomic<uint64_t> told{0};  // a bit for each device
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const uint64_t bit = device < kMaxTold ? uint64_t{1} << device : 0;
    if ((told.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
    error = cudaFuncSetAttribute(cutlass::device_kernel<Kernel>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Kernel::SharedStorageSize);
    if (error == cudaSuccess) told.fetch_or(bit, std::memory_order_relaxed);
    return error;
  }

 public:
  static typename Kernel::Arguments ArgumentsOf(const CudaGroupedGemmParams& params,
                                                const Sm90GemmLaunch& launch, int multiprocessors) {
    const GemmGroupArrays& arrays = launch.arrays;
    typename Kernel::Arguments arguments;
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    arguments.problem_shape = {
        launch.num_groups, reinterpret_cast<cute::Shape<int, int, int>*>(arrays.shapes), nullptr};
    auto& mainloop = arguments.mainloop;
    mainloop.ptr_A = reinterpret_cast<const Element**>(arrays.weights);
    mainloop.dA = reinterpret_cast<typename Mainloop::InternalStrideA*>(arrays.strides);
    mainloop.ptr_B = reinterpret_cast<const Element**>(arrays.rows);
    mainloop.dB = reinterpret_cast<typename Mainloop::InternalStrideB*>(arrays.strides);
    if constexpr (Operands::kScaled) {
      mainloop.ptr_SFA = arrays.weight_scales;
      mainloop.ptr_SFB = arrays.row_scales;
      // The kernel makes them from the problem's shape.
      mainloop.layout_SFA = nullptr;
      mainloop.layout_SFB = nullptr;
    }
    arguments.epilogue.groups = arrays.groups;
    arguments.epilogue.output = params.output;
    arguments.epilogue.bias = params.bias;
    arguments.epilogue.fuse_silu_mul = params.fuse_silu_mul;
    // Without shapes on the host the scheduler starts one block per multiprocessor that it is told.
    const int64_t blocks = (launch.max_tiles + kClusterSize - 1) / kClusterSize * kClusterSize;
    arguments.hw_info.sm_count =
        static_cast<int>(std::min<int64_t>(multiprocessors, blocks)) / kClusterSize * kClusterSize;
    return arguments;
  }

  static cudaError_t Launch(const CudaGroupedGemmParams& params, const Sm90GemmLaunch& launch,
                            int multiprocessors, cudaStream_t stream) {
    const typename Kernel::Arguments arguments = ArgumentsOf(params, launch, multiprocessors);
    if (!Kernel::can_implement(arguments) ||
        static_cast<int64_t>(Kernel::get_workspace_size(arguments)) > kSm90TensorMapBytes) {
      return cudaErrorInvalidConfiguration;
    }
    typename Kernel::Params kernel_params =
        Kernel::to_underlying_arguments(arguments, launch.tensor_maps);
    if (const cudaError_t error = AllowSharedMemory(); error != cudaSuccess) return error;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kClusterSize;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = Kernel::get_grid_shape(kernel_params);
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = Kernel::SharedStorageSize;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, cutlass::device_kernel<Kernel>, kernel_params);
  }
};

// The instances: each costs 10 to 30 s of compiling. What each is for says GemmTile; float16
// checkpoints are rare, so they make do with one tile for decode and one for prefill, and float8's
// second set of accumulators leaves no registers for 256 rows.
template <class Operands>
using Sm90Rows16 = Sm90GroupedGemm<Operands, 16, typename Operands::Cooperative, 1>;
template <class Operands>
using Sm90Rows64 = Sm90GroupedGemm<Operands, 64, typename Operands::Cooperative, 1>;
// Two tiles in flight: one is stored while the other is multiplied.
template <class Operands>
using Sm90Rows128PingPong = Sm90GroupedGemm<Operands, 128, typename Operands::PingPong, 1>;
template <class Operands>
using Sm90Rows128 = Sm90GroupedGemm<Operands, 128, typename Operands::Cooperative, 1>;
template <class Operands>
using Sm90Rows256 = Sm90GroupedGemm<Operands, 256, typename Operands::Cooperative, 2>;

using Sm90BFloat16 = Sm90PlainOperands<cutlass::bfloat16_t, __nv_bfloat16>;
using Sm90Float16 = Sm90PlainOperands<cutlass::half_t, __half>;

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_CUH_
