#ifndef EXPERTMESH_TESTS_KERNELS_CPU_RANDOM_LAYER_H_
#define EXPERTMESH_TESTS_KERNELS_CPU_RANDOM_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "tests/reference/reference_moe.h"

namespace expertmesh {

// `count` values around 0 with this standard deviation, already rounded to `dtype`.
std::vector<double> RandomValues(std::mt19937_64& random, int64_t count, double deviation,
                                 DType dtype);
std::vector<std::byte> ToBytes(const std::vector<double>& values, DType dtype);
ReferenceRounding RoundingOf(DType dtype);

// One expert layer with random weights, as the reference and the kernels want it.
struct RandomLayer {
  RandomLayer(const ExpertLayerShape& layer_shape, bool with_biases, uint64_t seed);
  // Load all experts into `kernels`; fails the test when that fails.
  void LoadInto(ExpertKernels& kernels) const;
  // The same into new kernels of the CPU.
  std::unique_ptr<ExpertKernels> Load(CpuIsa isa, ParallelFor* parallel_for) const;
  // Views of expert e's weights in the fields below.
  ExpertWeights Weights(int32_t e) const;

  ExpertLayerShape shape;
  ReferenceExperts reference;
  std::vector<std::byte> w13;   // [E, 2 * I, H]
  std::vector<std::byte> w2;    // [E, H, I]
  std::vector<float> w13_bias;  // [E, 2 * I] or empty
  std::vector<float> w2_bias;   // [E, H] or empty
};

// Rows by expert: rows[e] is [n_e, hidden_size].
using RowsByExpert = std::vector<std::vector<double>>;
// Output by expert, the same shape.
using OutputByExpert = std::vector<std::vector<float>>;

RowsByExpert RandomRows(const ExpertLayerShape& shape, const std::vector<int32_t>& rows_per_expert,
                        DType dtype, uint64_t seed);

// Where kernels work.
struct FfnDevice {
  Allocator& allocator;
  Stream& stream;
  StepArena* arena = nullptr;       // null: a new one
  int64_t max_rows_per_expert = 0;  // of the batched format; where that is too few, more
};

// Runs the FFN and takes its output apart again. Memory is poisoned with NaNs; fails the test when
// a due row was not written, or when a row of the batched format was that is not due.
OutputByExpert RunFfn(ExpertKernels& kernels, const RowsByExpert& rows, DType activation_dtype,
                      ActivationFormat format, const FfnDevice& device);
// On the host.
OutputByExpert RunFfn(ExpertKernels& kernels, const RowsByExpert& rows, DType activation_dtype,
                      ActivationFormat format);

// Fails the test where `output` is further from the float64 reference than float32 sums and the
// rounding of the intermediate rows can explain; says which element.
void ExpectNearReference(const RandomLayer& layer, const RowsByExpert& rows,
                         const OutputByExpert& output, DType activation_dtype);

std::string FormatName(ActivationFormat format);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CPU_RANDOM_LAYER_H_
