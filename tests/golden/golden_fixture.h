// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#ifndef EXPERTMESH_TESTS_GOLDEN_GOLDEN_FIXTURE_H_
#define EXPERTMESH_TESTS_GOLDEN_GOLDEN_FIXTURE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/reference/reference_moe.h"
#include "tests/reference/reference_router.h"

namespace expertmesh {

// Reads the fixtures that tests/golden/README.md describes, without a line of the product's
// checkpoint code. Paths are relative to the repository root, where ctest runs every test. A
// missing or malformed file aborts the test.

struct GoldenTensor {
  std::string dtype;  // as safetensors spells it: F32, F16, BF16, F8_E4M3, I32
  std::vector<int64_t> shape;
  std::vector<double> values;  // row-major
  std::string bytes;           // as stored: little-endian, row-major
};

// Every tensor of one safetensors file.
std::map<std::string, GoldenTensor> ReadGoldenSafetensors(const std::string& path);

struct GoldenLayer {
  int32_t index = 0;
  int32_t num_experts = 0;
  int32_t topk = 0;
  bool apply_router_weight_on_input = false;

  // The checkpoint's weights, brought to the reference's layout.
  ReferenceExperts experts;
  ReferenceRouterRule router;
  std::vector<double> gate;       // [num_experts, hidden_size]
  std::vector<double> gate_bias;  // [num_experts] or empty
  bool has_shared = false;
  ReferenceExperts shared;                 // one expert
  std::vector<double> shared_output_gate;  // [hidden_size], or empty: not gated

  // The case: T = GoldenFixture::num_tokens.
  GoldenTensor hidden_states;  // [T, hidden_size]
  GoldenTensor router_logits;  // [T, num_experts]
  GoldenTensor topk_ids;       // I32 [T, topk]
  GoldenTensor topk_weights;   // F32 [T, topk]
  GoldenTensor output_routed;  // [T, hidden_size]
  GoldenTensor output_full;    // [T, hidden_size]
  std::vector<int32_t> ids;    // topk_ids as integers

  // Absolute; README.md says what each is for.
  double tolerance_routed = 0;
  double tolerance_full = 0;
  double tolerance_routed_router = 0;
  double tolerance_full_router = 0;
  double tolerance_weights_logits = 0;
  double tolerance_weights_gate = 0;
};

struct GoldenFixture {
  std::string name;
  std::string path;          // folder of the checkpoint
  std::string architecture;  // config.json's architectures[0]
  std::string model_type;
  std::string dtype;  // float32, float16, bfloat16
  int64_t hidden_size = 0;
  int64_t num_tokens = 0;
  std::vector<GoldenLayer> layers;
};

// Sorted names of all fixtures, for parameterised tests.
std::vector<std::string> GoldenFixtureNames();

GoldenFixture LoadGoldenFixture(const std::string& name);

// routed [T, hidden_size] plus the layer's shared experts on hidden_states, in float64.
std::vector<double> ReferenceAddShared(const GoldenLayer& layer,
                                       const std::vector<double>& hidden_states,
                                       std::vector<double> routed);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GOLDEN_GOLDEN_FIXTURE_H_
