#ifndef EXPERTMESH_TESTS_GPU_BENCH_CONTEXT_H_
#define EXPERTMESH_TESTS_GPU_BENCH_CONTEXT_H_

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "tests/gpu/cublas_library.h"
#include "tests/gpu/result_table.h"

namespace expertmesh {

struct BenchContext {
  cudaStream_t stream = nullptr;
  CublasLibrary* cublas = nullptr;  // null: no limit from it
  ResultTable* table = nullptr;
  // Rows are divided by it where a CPU runs the kernels.
  int64_t shrink = 1;
  // Limits of this run, 0 where there are none.
  double copy_gb_per_second = 0;   // bytes read and written by a device-to-device copy
  double matmul_tflops = 0;        // a large bfloat16 matmul of cuBLAS
  double step_kernel_seconds = 0;  // what BenchRankStep's step launches, back to back
};

inline constexpr char kCopyLimit[] = "GB/s of a copy";
inline constexpr char kMatmulLimit[] = "TFLOP/s of cuBLAS";

// |actual - expected| / |expected| over many elements, both taken as vectors.
class RelativeError {
 public:
  void Add(double actual, double expected) {
    difference_ += (actual - expected) * (actual - expected);
    expected_ += expected * expected;
    // A NaN must not hide in a comparison.
    is_finite_ = is_finite_ && std::isfinite(actual);
  }
  double value() const {
    if (!is_finite_) return INFINITY;
    return expected_ > 0 ? std::sqrt(difference_ / expected_) : std::sqrt(difference_);
  }

 private:
  double difference_ = 0;
  double expected_ = 0;
  bool is_finite_ = true;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_BENCH_CONTEXT_H_
