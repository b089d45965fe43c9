#ifndef EXPERTMESH_KERNELS_CUDA_SM90_ROW_EPILOGUE_CUH_
#define EXPERTMESH_KERNELS_CUDA_SM90_ROW_EPILOGUE_CUH_

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/detail.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "kernels/cuda/float_math.cuh"
#include "kernels/cuda/gemm_groups.h"
#include "kernels/cuda/row_vectors.cuh"

namespace expertmesh {

// The epilogue of a grouped GEMM whose M are weight rows and whose N are rows: accumulators go to
// output[row, weight row] straight from registers. Eight lanes hold eight consecutive weight rows,
// so float32 stores fill whole 32-byte sectors; neither shared memory nor a tensor map per group is
// needed, which leaves both to the loads. Of a fused product (CudaGroupedGemmParams::fuse_silu_mul)
// each thread holds gate and up of an output, and stores that as Output; void where none is fused.
template <class Output>
class Sm90RowEpilogue {
 public:
  // What CUTLASS's kernel and adapter ask of an epilogue's types.
  using DispatchPolicy = cutlass::epilogue::PtrArrayNoSmemWarpSpecialized;
  using ElementC = float;
  using ElementD = float;
  using StrideC = cute::Stride<cute::Int<1>, int64_t, cute::Int<0>>*;
  using StrideD = StrideC;
  using InternalStrideC = cute::remove_pointer_t<StrideC>;
  using InternalStrideD = InternalStrideC;
  struct SharedStorage {};
  using TensorMapStorage = SharedStorage;

  struct Arguments {
    const GemmGroup* groups = nullptr;
    void* output = nullptr;
    const float* bias = nullptr;  // [num_experts, weight rows] or null
    bool fuse_silu_mul = false;
  };
  using Params = Arguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments,
                                                  void*) {
    return arguments;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&, int) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(const ProblemShape&, const Arguments&, void*,
                                              cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }

  CUTLASS_HOST_DEVICE explicit Sm90RowEpilogue(const Params& params) : params_(params) {}

  template <class ProblemShape, class BlockShape, class BlockCoord, class Engine, class Layout,
            class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(ProblemShape problem_shape, BlockShape block_shape,
                                 BlockCoord block_coord,
                                 const cute::Tensor<Engine, Layout>& accumulators,
                                 TiledMma tiled_mma, Residue, int thread_index, char*) {
    const int weight_rows = cute::get<0>(problem_shape);
    const int num_rows = cute::get<1>(problem_shape);
    const int group_index = cute::get<3>(block_coord);
    const GemmGroup group = params_.groups[group_index];
    const float* bias = params_.bias == nullptr
                            ? nullptr
                            : params_.bias + static_cast<int64_t>(group.expert) * weight_rows;
    const auto biased = [bias](float sum, int weight_row) {
      return bias == nullptr ? sum : __fadd_rn(sum, __ldg(bias + weight_row));
    };
    const auto tile =
        cute::local_tile(cute::make_identity_tensor(cute::make_shape(weight_rows, num_rows)),
                         cute::take<0, 2>(block_shape),
                         cute::make_coord(cute::get<0>(block_coord), cute::get<1>(block_coord)));
    const auto coords = tiled_mma.get_thread_slice(thread_index).partition_C(tile);
    CUTE_STATIC_ASSERT_V(cute::size(coords) == cute::size(accumulators));
    if constexpr (!cute::is_void_v<Output>) {
      if (params_.fuse_silu_mul) {
        Output* output = static_cast<Output*>(params_.output) + group.first_row * (weight_rows / 2);
        // A thread's values come as (2 rows, 2 weight rows that are 8 apart, ...).
        static_assert(cute::is_same_v<decltype(cute::shape<0, 0>(Layout{})), cute::Int<2>> &&
                      cute::is_same_v<decltype(cute::shape<0, 1>(Layout{})), cute::Int<2>>);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < cute::size(accumulators); ++i) {
          if (i % 4 >= 2) continue;
          const int weight_row = cute::get<0>(coords(i));
          const int row = cute::get<1>(coords(i));
          if (weight_row < weight_rows && row < num_rows) {
            const float gate = biased(accumulators(i), weight_row);
            const float up = biased(accumulators(i + 2), weight_row + 8);
            output[static_cast<int64_t>(row) * (weight_rows / 2) + weight_row / 16 * 8 +
                   weight_row % 8] = FromFloat<Output>(__fmul_rn(SwishFloat(gate, gate), up));
          }
        }
        return;
      }
    }
    float* output = static_cast<float*>(params_.output) + group.first_row * weight_rows;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accumulators); ++i) {
      const int weight_row = cute::get<0>(coords(i));
      const int row = cute::get<1>(coords(i));
      if (weight_row < weight_rows && row < num_rows) {
        output[static_cast<int64_t>(row) * weight_rows + weight_row] =
            biased(accumulators(i), weight_row);
      }
    }
  }

 private:
  Params params_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_SM90_ROW_EPILOGUE_CUH_
