#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_RANDOM_GEMM_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_RANDOM_GEMM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/cuda/gemm_tile.h"
#include "kernels/cuda/grouped_gemm.h"
#include "tests/kernels/cuda/device_bytes.h"

namespace expertmesh {

enum class GemmForm { kContiguous, kBatched, kMasked };
// Of rows and weights: of one size; over many powers of two; and these, with sums that cancel.
enum class GemmValues { kEven, kSpread, kCancelling };

struct GemmCase {
  DType rows_dtype = DType::kInvalid;
  DType weight_dtype = DType::kInvalid;
  DType output_dtype = DType::kFloat32;
  int64_t n = 0;
  int64_t k = 0;
  std::vector<int32_t> tokens;
  GemmForm form = GemmForm::kContiguous;
  std::optional<GemmTile> tile;
  bool fuse_silu_mul = false;
  bool with_bias = false;
  GemmValues values = GemmValues::kEven;
};

// As large as that many experts ask for, behind a 256-byte boundary as the header asks.
class GemmWorkspace {
 public:
  explicit GemmWorkspace(int32_t num_experts)
      : size_bytes_(GroupedGemmWorkspaceBytes(num_experts)), memory_(size_bytes_ + 256) {}
  void GiveTo(CudaGroupedGemmParams& params) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    params.workspace = memory_.data() + (256 - address % 256) % 256;
    params.workspace_bytes = size_bytes_;
  }

 private:
  const int64_t size_bytes_;
  const DeviceBytes memory_;
};

// A random product on the test device and what it should give.
class RandomGemm {
 public:
  RandomGemm(const GemmCase& c, uint64_t seed);

  int64_t num_experts() const { return static_cast<int64_t>(case_.tokens.size()); }
  bool is_float8() const { return case_.rows_dtype == DType::kFloat8E4M3; }
  int64_t FirstRow(size_t e) const {
    return case_.form == GemmForm::kContiguous ? offsets_[e] : static_cast<int64_t>(e) * max_rows_;
  }
  // Of the last run.
  bool uses_tensor_cores() const { return uses_tensor_cores_; }
  int64_t columns() const { return case_.fuse_silu_mul ? case_.n / 2 : case_.n; }
  int64_t row_bytes() const { return columns() * DTypeBytes(case_.output_dtype); }

  DeviceBytes Run();

  // Every `column_step`th column.
  void ExpectNearReference(const DeviceBytes& output, int64_t column_step = 1) const;

  // Batched rows beyond an expert's count.
  void ExpectPaddingUntouched(const DeviceBytes& output) const;

  // The same experts and row bytes with each expert's rows cut to the last `count` of them.
  RandomGemm WithLastRows(int32_t count) const;

  const GemmCase& gemm_case() const { return case_; }
  void set_tile(GemmTile tile) { case_.tile = tile; }

 private:
  struct Sum {
    double exact = 0;
    double bound = 0;
  };
  // Row times weight row; `sum_bound` is of the sum of magnitudes.
  Sum Product(size_t e, int64_t row, int64_t column, double sum_bound) const;
  double Scale(size_t e, int64_t row, int64_t column, int64_t i) const;

  GemmCase case_;
  int64_t max_rows_;
  int64_t num_rows_ = 0;
  bool uses_tensor_cores_ = false;
  std::vector<int64_t> offsets_;
  std::vector<std::byte> rows_;
  std::vector<std::byte> weights_;
  std::vector<float> row_scales_;
  std::vector<float> weight_scales_;
  std::vector<float> bias_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_RANDOM_GEMM_H_
