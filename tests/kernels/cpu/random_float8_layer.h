#ifndef EXPERTMESH_TESTS_KERNELS_CPU_RANDOM_FLOAT8_LAYER_H_
#define EXPERTMESH_TESTS_KERNELS_CPU_RANDOM_FLOAT8_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/expert_kernels.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {

// One expert layer with random float8 weights: elements up to the largest, 448, and block scales of
// magnitudes that differ by up to `scale_spread` either way.
struct RandomFloat8Layer {
  // The shape's weight_dtype becomes float8_e4m3.
  RandomFloat8Layer(const ExpertLayerShape& layer_shape, bool with_biases, uint64_t seed,
                    double scale_spread = 4.0);
  // Load all experts into `kernels`; fails the test when that fails.
  void LoadInto(ExpertKernels& kernels) const;
  // Views of expert e's weights in the fields below.
  ExpertWeights Weights(int32_t e) const;

  ExpertLayerShape shape;
  std::vector<std::byte> w13;     // [E, 2 * I, H]
  std::vector<std::byte> w2;      // [E, H, I]
  std::vector<float> w13_scales;  // [E, 2 * I / 128, ceil(H / 128)]
  std::vector<float> w2_scales;   // [E, ceil(H / 128), I / 128]
  std::vector<float> w13_bias;    // [E, 2 * I] or empty
  std::vector<float> w2_bias;     // [E, H] or empty
};

// Fails the test where `output` is further from a float64 evaluation of the contract in
// expert_kernels.h, quantization of rows included, than the float32 operations of `instruction_set`
// can explain; says which element.
void ExpectNearFloat8Reference(const RandomFloat8Layer& layer, const RowsByExpert& rows,
                               const OutputByExpert& output, const std::string& instruction_set);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CPU_RANDOM_FLOAT8_LAYER_H_
