// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/golden/golden_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

namespace expertmesh {
namespace {

using ::nlohmann::json;
using TensorMap = std::map<std::string, GoldenTensor>;

constexpr char kRoot[] = "tests/golden/";

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "golden fixture: %s\n", what.c_str());
  std::abort();
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Fail("cannot open " + path + " (tests run in the repository root)");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

template <typename T>
T LoadLittleEndian(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

double Float16ToDouble(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0x1f) {
    return sign * (fraction == 0 ? std::numeric_limits<double>::infinity()
                                 : std::numeric_limits<double>::quiet_NaN());
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

// e4m3fn: no infinity, NaN is all ones.
double Float8E4m3ToDouble(uint8_t bits) {
  const int exponent = (bits >> 3) & 0xf;
  const int fraction = bits & 0x7;
  const double sign = (bits & 0x80) != 0 ? -1.0 : 1.0;
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(fraction, -9);
  return sign * std::ldexp(8 + fraction, exponent - 10);
}

double BFloat16ToDouble(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return static_cast<double>(value);
}

double ElementToDouble(const std::string& dtype, const char* bytes) {
  if (dtype == "F32") return static_cast<double>(LoadLittleEndian<float>(bytes));
  if (dtype == "F16") return Float16ToDouble(LoadLittleEndian<uint16_t>(bytes));
  if (dtype == "BF16") return BFloat16ToDouble(LoadLittleEndian<uint16_t>(bytes));
  if (dtype == "I32") return static_cast<double>(LoadLittleEndian<int32_t>(bytes));
  if (dtype == "F8_E4M3") return Float8E4m3ToDouble(LoadLittleEndian<uint8_t>(bytes));
  Fail("dtype " + dtype);
}

size_t ElementSize(const std::string& dtype) {
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16") return 2;
  if (dtype == "F8_E4M3") return 1;
  Fail("dtype " + dtype);
}

const GoldenTensor& Find(const TensorMap& tensors, const std::string& name) {
  const auto it = tensors.find(name);
  if (it == tensors.end()) Fail("no tensor " + name);
  return it->second;
}

std::string ReplaceExpert(std::string name, int64_t expert_id) {
  const std::string placeholder = "{expert}";
  const size_t at = name.find(placeholder);
  if (at == std::string::npos) Fail("no {expert} in " + name);
  return name.replace(at, placeholder.size(), std::to_string(expert_id));
}

// The values of a matrix, times its 128 x 128 block scales where it has them (fp8).
std::vector<double> Dequantized(const TensorMap& tensors, const std::string& name) {
  const GoldenTensor& tensor = Find(tensors, name);
  const auto scales = tensors.find(name + "_scale_inv");
  if (scales == tensors.end()) return tensor.values;
  std::vector<double> values = tensor.values;
  const int64_t cols = tensor.shape[1];
  const int64_t scale_cols = scales->second.shape[1];
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    const int64_t block = (i / cols) / 128 * scale_cols + (i % cols) / 128;
    values[static_cast<size_t>(i)] *= scales->second.values[static_cast<size_t>(block)];
  }
  return values;
}

void Append(std::vector<double>* to, const std::vector<double>& values) {
  to->insert(to->end(), values.begin(), values.end());
}

ReferenceActivation ActivationOf(const std::string& name) {
  if (name == "silu") return ReferenceActivation::kSiluMul;
  if (name == "clamped_swiglu") return ReferenceActivation::kClampedSwiglu;
  Fail("activation " + name);
}

// Row `to` of w13 [2I] comes from row or column `from` of a fused gate_up.
int64_t FusedIndex(int64_t to, int64_t intermediate_size, bool interleaved) {
  if (!interleaved) return to;
  return to < intermediate_size ? 2 * to : 2 * (to - intermediate_size) + 1;
}

void LoadFused(const TensorMap& tensors, const json& names, ReferenceExperts* experts) {
  const bool transposed = names.at("transposed").get<bool>();
  const bool interleaved = names.at("interleaved").get<bool>();
  const GoldenTensor& gate_up = Find(tensors, names.at("gate_up").get<std::string>());
  const GoldenTensor& down = Find(tensors, names.at("down").get<std::string>());
  const int64_t h = experts->hidden_size;
  const int64_t n = gate_up.shape[transposed ? 2 : 1] / 2;
  experts->intermediate_size = n;
  for (int64_t e = 0; e < experts->num_experts; ++e) {
    for (int64_t r = 0; r < 2 * n; ++r) {
      const int64_t from = FusedIndex(r, n, interleaved);
      for (int64_t c = 0; c < h; ++c) {
        const int64_t at = transposed ? (e * h + c) * 2 * n + from : (e * 2 * n + from) * h + c;
        experts->w13.push_back(gate_up.values.at(static_cast<size_t>(at)));
      }
    }
    for (int64_t r = 0; r < h; ++r) {
      for (int64_t c = 0; c < n; ++c) {
        const int64_t at = transposed ? (e * n + c) * h + r : (e * h + r) * n + c;
        experts->w2.push_back(down.values.at(static_cast<size_t>(at)));
      }
    }
  }
  if (!names.contains("gate_up_bias")) return;
  const GoldenTensor& bias = Find(tensors, names.at("gate_up_bias").get<std::string>());
  for (int64_t e = 0; e < experts->num_experts; ++e) {
    for (int64_t r = 0; r < 2 * n; ++r) {
      const int64_t at = e * 2 * n + FusedIndex(r, n, interleaved);
      experts->w13_bias.push_back(bias.values.at(static_cast<size_t>(at)));
    }
  }
  experts->w2_bias = Find(tensors, names.at("down_bias").get<std::string>()).values;
}

void LoadExperts(const TensorMap& tensors, const json& names, ReferenceExperts* experts) {
  if (names.at("layout") == "fused") return LoadFused(tensors, names, experts);
  for (int64_t e = 0; e < experts->num_experts; ++e) {
    for (const char* part : {"gate", "up"}) {
      Append(&experts->w13,
             Dequantized(tensors, ReplaceExpert(names.at(part).get<std::string>(), e)));
    }
    const std::string down = ReplaceExpert(names.at("down").get<std::string>(), e);
    Append(&experts->w2, Dequantized(tensors, down));
    experts->intermediate_size = Find(tensors, down).shape[1];
  }
}

void LoadShared(const TensorMap& tensors, const json& names, GoldenLayer* layer) {
  layer->has_shared = true;
  layer->shared.num_experts = 1;
  layer->shared.hidden_size = layer->experts.hidden_size;
  if (names.contains("gate_up")) {  // gate rows, then up rows
    layer->shared.w13 = Dequantized(tensors, names.at("gate_up").get<std::string>());
  } else {
    layer->shared.w13 = Dequantized(tensors, names.at("gate").get<std::string>());
    Append(&layer->shared.w13, Dequantized(tensors, names.at("up").get<std::string>()));
  }
  const std::string down = names.at("down").get<std::string>();
  layer->shared.w2 = Dequantized(tensors, down);
  layer->shared.intermediate_size = Find(tensors, down).shape[1];
  if (names.contains("output_gate")) {
    layer->shared_output_gate = Find(tensors, names.at("output_gate").get<std::string>()).values;
  }
}

ReferenceScore ScoreOf(const std::string& name) {
  if (name == "softmax") return ReferenceScore::kSoftmax;
  if (name == "sigmoid") return ReferenceScore::kSigmoid;
  if (name == "softmax_over_topk") return ReferenceScore::kSoftmaxOverTopK;
  if (name == "sigmoid_of_topk") return ReferenceScore::kSigmoidOfTopK;
  if (name == "sparse_mixer") return ReferenceScore::kSparseMixer;
  Fail("router score " + name);
}

void LoadRouter(const TensorMap& tensors, const json& rule, GoldenLayer* layer) {
  ReferenceRouterRule& router = layer->router;
  router.score = ScoreOf(rule.at("score").get<std::string>());
  router.topk = layer->topk;
  router.renormalize = rule.at("renormalize").get<bool>();
  router.renormalize_epsilon = rule.at("renormalize_epsilon").get<double>();
  router.renormalize_min = rule.at("renormalize_min").get<double>();
  router.scaling_factor = rule.at("scaling_factor").get<double>();
  router.num_groups = rule.at("num_groups").get<int64_t>();
  router.topk_groups = rule.at("topk_groups").get<int64_t>();
  router.group_score = rule.at("group_score") == "max" ? ReferenceGroupScore::kMax
                                                       : ReferenceGroupScore::kSumOfTopTwo;
  router.masked_groups_score_zero = true;
  router.sparse_mixer_jitter = rule.value("sparse_mixer_jitter", 0.0);
  layer->gate = Find(tensors, rule.at("gate").get<std::string>()).values;
  if (!rule.at("gate_bias").is_null()) {
    layer->gate_bias = Find(tensors, rule.at("gate_bias").get<std::string>()).values;
  }
  if (!rule.at("correction_bias").is_null()) {
    router.correction_bias = Find(tensors, rule.at("correction_bias").get<std::string>()).values;
  }
}

GoldenLayer LoadLayer(const TensorMap& tensors, const TensorMap& cases, const json& description) {
  GoldenLayer layer;
  layer.index = description.at("index").get<int32_t>();
  layer.num_experts = description.at("num_experts").get<int32_t>();
  layer.topk = description.at("topk").get<int32_t>();
  layer.apply_router_weight_on_input = description.at("apply_router_weight_on_input").get<bool>();
  layer.experts.num_experts = layer.num_experts;
  layer.experts.hidden_size = description.at("hidden_size").get<int64_t>();
  layer.experts.activation = ActivationOf(description.at("activation").get<std::string>());
  LoadExperts(tensors, description.at("experts"), &layer.experts);
  LoadRouter(tensors, description.at("router"), &layer);
  if (!description.at("shared").is_null()) LoadShared(tensors, description.at("shared"), &layer);

  const std::string prefix = "layers." + std::to_string(layer.index) + ".";
  layer.hidden_states = Find(cases, prefix + "hidden_states");
  layer.router_logits = Find(cases, prefix + "router_logits");
  layer.topk_ids = Find(cases, prefix + "topk_ids");
  layer.topk_weights = Find(cases, prefix + "topk_weights");
  layer.output_routed = Find(cases, prefix + "output_routed");
  layer.output_full = Find(cases, prefix + "output_full");
  for (const double id : layer.topk_ids.values) layer.ids.push_back(static_cast<int32_t>(id));

  layer.tolerance_routed = description.at("tolerance_routed").get<double>();
  layer.tolerance_full = description.at("tolerance_full").get<double>();
  layer.tolerance_routed_router = description.at("tolerance_routed_router").get<double>();
  layer.tolerance_full_router = description.at("tolerance_full_router").get<double>();
  layer.tolerance_weights_logits = description.at("tolerance_weights_logits").get<double>();
  layer.tolerance_weights_gate = description.at("tolerance_weights_gate").get<double>();
  return layer;
}

}  // namespace

std::map<std::string, GoldenTensor> ReadGoldenSafetensors(const std::string& path) {
  const std::string file = ReadFile(path);
  if (file.size() < 8) Fail(path + " is too short");
  const uint64_t header_size = LoadLittleEndian<uint64_t>(file.data());
  if (header_size > file.size() - 8) Fail(path + ": header beyond the end");
  const json header = json::parse(file.substr(8, header_size));
  TensorMap tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    GoldenTensor tensor;
    tensor.dtype = entry.at("dtype").get<std::string>();
    tensor.shape = entry.at("shape").get<std::vector<int64_t>>();
    const size_t begin = entry.at("data_offsets").at(0).get<size_t>();
    const size_t end = entry.at("data_offsets").at(1).get<size_t>();
    if (begin > end || end > file.size() - 8 - header_size) Fail(path + ": offsets of " + name);
    tensor.bytes = file.substr(8 + header_size + begin, end - begin);
    const size_t size = ElementSize(tensor.dtype);
    size_t count = 1;
    for (const int64_t extent : tensor.shape) count *= static_cast<size_t>(extent);
    if (count * size != tensor.bytes.size()) Fail(path + ": shape of " + name);
    for (size_t i = 0; i < count; ++i) {
      tensor.values.push_back(ElementToDouble(tensor.dtype, tensor.bytes.data() + i * size));
    }
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

std::vector<std::string> GoldenFixtureNames() {
  if (!std::filesystem::is_directory(kRoot)) Fail("run tests in the repository root");
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kRoot)) {
    if (std::filesystem::exists(entry.path() / "fixture.json")) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

GoldenFixture LoadGoldenFixture(const std::string& name) {
  GoldenFixture fixture;
  fixture.name = name;
  fixture.path = kRoot + name;
  const json description = json::parse(ReadFile(fixture.path + "/fixture.json"));
  fixture.architecture = description.at("architecture").get<std::string>();
  fixture.model_type = description.at("model_type").get<std::string>();
  fixture.dtype = description.at("dtype").get<std::string>();
  fixture.hidden_size = description.at("hidden_size").get<int64_t>();
  fixture.num_tokens = description.at("num_tokens").get<int64_t>();
  TensorMap tensors;
  for (const auto& file : description.at("checkpoint_files")) {
    const std::string path = fixture.path + "/" + file.get<std::string>();
    if (path.ends_with(".safetensors")) tensors.merge(ReadGoldenSafetensors(path));
  }
  const TensorMap cases = ReadGoldenSafetensors(fixture.path + "/cases.safetensors");
  for (const json& layer : description.at("layers")) {
    fixture.layers.push_back(LoadLayer(tensors, cases, layer));
  }
  return fixture;
}

std::vector<double> ReferenceAddShared(const GoldenLayer& layer,
                                       const std::vector<double>& hidden_states,
                                       std::vector<double> routed) {
  if (!layer.has_shared) return routed;
  const std::vector<double> shared = ReferenceExpertFfn(layer.shared, 0, hidden_states);
  const size_t h = static_cast<size_t>(layer.shared.hidden_size);
  for (size_t t = 0; t < routed.size() / h; ++t) {
    double scale = 1.0;
    if (!layer.shared_output_gate.empty()) {
      double logit = 0.0;
      for (size_t j = 0; j < h; ++j) {
        logit += layer.shared_output_gate[j] * hidden_states[t * h + j];
      }
      scale = 1.0 / (1.0 + std::exp(-logit));
    }
    for (size_t j = 0; j < h; ++j) routed[t * h + j] += scale * shared[t * h + j];
  }
  return routed;
}

}  // namespace expertmesh
