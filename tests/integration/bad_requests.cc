#include "tests/integration/bad_requests.h"

#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

using Request = v1::ForwardRequest;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kTokens = 4;
constexpr int64_t kTopK = 2;

void SetBFloat16(v1::Tensor* tensor, int64_t index, uint16_t bits) {
  std::memcpy(tensor->mutable_data()->data() + 2 * index, &bits, 2);
}

void SetLogits(Request* request, int64_t num_tokens, int64_t num_experts) {
  v1::Tensor* logits = request->mutable_router_logits();
  logits->set_dtype(v1::DATA_TYPE_FLOAT32);
  logits->add_shape(num_tokens);
  logits->add_shape(num_experts);
  logits->mutable_data()->resize(static_cast<size_t>(4 * num_tokens * num_experts));
}

void AddRoutingCases(const RequestTarget& target, std::vector<BadRequest>* cases) {
  const absl::StatusCode kBad = absl::StatusCode::kInvalidArgument;
  const std::string ids_limit = absl::StrCat("-1 to ", target.num_experts - 1);
  const auto invalid = [&](std::string name, std::function<void(Request*)> spoil, std::string field,
                           std::string value, std::string limit) {
    cases->push_back({std::move(name), std::move(spoil), kBad, "INVALID_FIELD", std::move(field),
                      std::move(value), std::move(limit)});
  };
  invalid(
      "NoRouting", [](Request* r) { r->clear_routing(); }, "routing", "not set",
      "one of topk, router_logits, server_gate");
  invalid(
      "TopKNegative", [](Request* r) { r->mutable_topk()->set_topk(-1); }, "topk.topk", "-1",
      "0 to 4096");
  invalid(
      "TopKTooLarge", [](Request* r) { r->mutable_topk()->set_topk(5000); }, "topk.topk", "5000",
      "0 to 4096");
  invalid(
      "IdBelowMinusOne", [](Request* r) { r->mutable_topk()->set_ids(3, -2); }, "topk.ids[3]", "-2",
      ids_limit);
  invalid(
      "IdTooLarge", [target](Request* r) { r->mutable_topk()->set_ids(7, target.num_experts); },
      "topk.ids[7]", absl::StrCat(target.num_experts), ids_limit);
  invalid(
      "TooFewIds", [](Request* r) { r->mutable_topk()->mutable_ids()->RemoveLast(); }, "topk.ids",
      "7 elements", "8 elements (4 tokens, topk 2)");
  invalid(
      "TooManyWeights", [](Request* r) { r->mutable_topk()->add_weights(1); }, "topk.weights",
      "9 elements", "8 elements (4 tokens, topk 2)");
  invalid(
      "TopKZeroWithIds", [](Request* r) { r->mutable_topk()->set_topk(0); }, "topk.ids",
      "8 elements", "0 elements (4 tokens, topk 0)");
  invalid(
      "WeightNaN", [](Request* r) { r->mutable_topk()->set_weights(5, kNan); }, "topk.weights[5]",
      "nan", "a finite number");
  invalid(
      "WeightInfinite", [](Request* r) { r->mutable_topk()->set_weights(0, -kInf); },
      "topk.weights[0]", "-inf", "a finite number");
  invalid(
      "LogitsForOtherTokens",
      [target](Request* r) { SetLogits(r, kTokens + 1, target.num_experts); },
      "router_logits.shape[0]", "5", "4");
  invalid(
      "LogitsForOtherExperts",
      [target](Request* r) { SetLogits(r, kTokens, target.num_experts + 1); },
      "router_logits.shape[1]", absl::StrCat(target.num_experts + 1),
      absl::StrCat(target.num_experts));
  invalid(
      "LogitsBytes",
      [target](Request* r) {
        SetLogits(r, kTokens, target.num_experts);
        r->mutable_router_logits()->mutable_data()->pop_back();
      },
      "router_logits.data", absl::StrCat(16 * target.num_experts - 1, " bytes"),
      absl::StrCat(16 * target.num_experts, " bytes for the shape [4, ", target.num_experts,
                   "] in float32"));
  invalid(
      "AdapterIndexCount", [](Request* r) { r->add_adapter_index(-1); }, "adapter_index",
      "1 elements", "0 or 4 elements, one for each token");
  invalid(
      "AdapterIndexRange",
      [](Request* r) {
        for (int i = 0; i < kTokens; ++i) r->add_adapter_index(i == 2 ? 0 : -1);
      },
      "adapter_index[2]", "0", "-1");
}

void AddTensorCases(const RequestTarget& target, std::vector<BadRequest>* cases) {
  const absl::StatusCode kBad = absl::StatusCode::kInvalidArgument;
  const std::string hidden = absl::StrCat(target.hidden_size);
  const std::string shape = absl::StrCat("[4, ", hidden, "]");
  const std::string bytes = absl::StrCat(2 * kTokens * target.hidden_size);
  const auto invalid = [&](std::string name, std::function<void(Request*)> spoil, std::string field,
                           std::string value, std::string limit) {
    cases->push_back({std::move(name), std::move(spoil), kBad, "INVALID_FIELD", std::move(field),
                      std::move(value), std::move(limit)});
  };
  const std::string dtypes = "float32, float16, bfloat16";
  invalid(
      "NoHiddenStates", [](Request* r) { r->clear_hidden_states(); }, "hidden_states", "",
      "a tensor");
  invalid(
      "ShapeOneDimension",
      [](Request* r) { r->mutable_hidden_states()->mutable_shape()->RemoveLast(); },
      "hidden_states.shape", "[4]", absl::StrCat("[num_tokens, ", hidden, "]"));
  invalid(
      "ShapeThreeDimensions", [](Request* r) { r->mutable_hidden_states()->add_shape(1); },
      "hidden_states.shape", absl::StrCat("[4, ", hidden, ", 1]"),
      absl::StrCat("[num_tokens, ", hidden, "]"));
  invalid(
      "HiddenSize", [](Request* r) { r->mutable_hidden_states()->set_shape(1, 7); },
      "hidden_states.shape[1]", "7", hidden);
  invalid(
      "NegativeTokens", [](Request* r) { r->mutable_hidden_states()->set_shape(0, -4); },
      "hidden_states.shape[0]", "-4", "0 to 1048576");
  invalid(
      "SizeThatWraps",
      [](Request* r) { r->mutable_hidden_states()->set_shape(0, int64_t{1} << 62); },
      "hidden_states.shape[0]", "4611686018427387904", "0 to 1048576");
  invalid(
      "NoDType",
      [](Request* r) { r->mutable_hidden_states()->set_dtype(v1::DATA_TYPE_UNSPECIFIED); },
      "hidden_states.dtype", "unspecified", dtypes);
  invalid(
      "UnknownDType",
      [](Request* r) { r->mutable_hidden_states()->set_dtype(static_cast<v1::DataType>(99)); },
      "hidden_states.dtype", "99", dtypes);
  invalid(
      "OneByteShort", [](Request* r) { r->mutable_hidden_states()->mutable_data()->pop_back(); },
      "hidden_states.data", absl::StrCat(2 * kTokens * target.hidden_size - 1, " bytes"),
      absl::StrCat(bytes, " bytes for the shape ", shape, " in bfloat16"));
  invalid(
      "OtherDTypesBytes",
      [](Request* r) { r->mutable_hidden_states()->set_dtype(v1::DATA_TYPE_FLOAT32); },
      "hidden_states.data", absl::StrCat(bytes, " bytes"),
      absl::StrCat(2 * 2 * kTokens * target.hidden_size, " bytes for the shape ", shape,
                   " in float32"));
  invalid(
      "ValuesAndData", [](Request* r) { r->mutable_hidden_states()->add_values(1); },
      "hidden_states", "values and data", "one of values, data");
  invalid(
      "TooFewValues",
      [](Request* r) {
        r->mutable_hidden_states()->clear_data();
        r->mutable_hidden_states()->add_values(1);
      },
      "hidden_states.values", "1 elements",
      absl::StrCat(kTokens * target.hidden_size, " elements for the shape ", shape));
  invalid(
      "ValueBeyondFloat16",
      [target](Request* r) {
        r->mutable_hidden_states()->clear_data();
        r->mutable_hidden_states()->set_dtype(v1::DATA_TYPE_FLOAT16);
        for (int64_t i = 0; i < kTokens * target.hidden_size; ++i) {
          r->mutable_hidden_states()->add_values(i == 6 ? 1e6f : 1.0f);
        }
      },
      "hidden_states.values[6]", "1e+06", "a value within the range of float16");
  invalid(
      "HiddenNaN",
      [target](Request* r) {
        SetBFloat16(r->mutable_hidden_states(), 2 * target.hidden_size + 5, 0x7fc0);
      },
      "hidden_states.data[2,5]", "nan", "a finite number");
  invalid(
      "HiddenInfinite",
      [target](Request* r) {
        SetBFloat16(r->mutable_hidden_states(), 4 * target.hidden_size - 1, 0xff80);
      },
      absl::StrCat("hidden_states.data[3,", target.hidden_size - 1, "]"), "-inf",
      "a finite number");
  cases->push_back(
      {"Quantized",
       [](Request* r) { r->mutable_hidden_states()->set_dtype(v1::DATA_TYPE_FLOAT8_E4M3); },
       absl::StatusCode::kUnimplemented, "NOT_IMPLEMENTED", "hidden_states.dtype", "float8_e4m3",
       dtypes});
}

void AddOtherCases(const RequestTarget& target, std::vector<BadRequest>* cases) {
  const absl::StatusCode kBad = absl::StatusCode::kInvalidArgument;
  const absl::StatusCode kNotFound = absl::StatusCode::kNotFound;
  const absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;
  const std::string dtypes = "float32, float16, bfloat16";
  cases->push_back({"Model", [](Request* r) { r->set_model("no\nsuch"); }, kNotFound,
                    "MODEL_NOT_FOUND", "model", "no\\nsuch", target.model});
  for (const int32_t layer : {target.dense_layer, 1000, -1}) {
    cases->push_back({absl::StrCat("Layer", layer < 0 ? "Negative" : absl::StrCat(layer)),
                      [layer](Request* r) { r->set_layer(layer); }, kNotFound, "LAYER_NOT_FOUND",
                      "layer", absl::StrCat(layer), ""});
  }
  cases->push_back({"Adapter", [](Request* r) { r->add_adapters("lora"); }, kNotFound,
                    "ADAPTER_NOT_FOUND", "adapters[0]", "lora", "none"});
  cases->push_back({"Fingerprint", [](Request* r) { r->set_expected_fingerprint("00ff"); },
                    kPrecondition, "FINGERPRINT_MISMATCH", "expected_fingerprint", "00ff", ""});
  cases->push_back(
      {"SharedExperts", [](Request* r) { r->mutable_options()->set_include_shared_experts(true); },
       kPrecondition, "NO_SHARED_EXPERTS", "options.include_shared_experts", "true", "false"});
  cases->push_back(
      {"DispatchNotAllowed",
       [](Request* r) { r->mutable_options()->set_dispatch(v1::DISPATCH_MODE_ALL_TO_ALL); },
       kPrecondition, "OPTION_DISABLED", "options.dispatch", "DISPATCH_MODE_ALL_TO_ALL",
       "--allow_dispatch_option"});
  cases->push_back(
      {"DispatchUnknown",
       [](Request* r) { r->mutable_options()->set_dispatch(static_cast<v1::DispatchMode>(77)); },
       kBad, "INVALID_FIELD", "options.dispatch", "77", ""});
  cases->push_back({"OutputDType",
                    [](Request* r) { r->mutable_options()->set_output_dtype(v1::DATA_TYPE_INT8); },
                    kBad, "INVALID_FIELD", "options.output_dtype", "DATA_TYPE_INT8", dtypes});
  cases->push_back(
      {"OutputDTypeUnknown",
       [](Request* r) { r->mutable_options()->set_output_dtype(static_cast<v1::DataType>(42)); },
       kBad, "INVALID_FIELD", "options.output_dtype", "42", dtypes});
  cases->push_back(
      {"CombineDType",
       [](Request* r) { r->mutable_options()->set_combine_dtype(v1::DATA_TYPE_FLOAT8_E4M3); }, kBad,
       "INVALID_FIELD", "options.combine_dtype", "DATA_TYPE_FLOAT8_E4M3", dtypes});
  cases->push_back(
      {"Combine",
       [](Request* r) { r->mutable_options()->set_combine(static_cast<v1::Combine>(9)); }, kBad,
       "INVALID_FIELD", "options.combine", "9", "COMBINE_PER_OWNER, COMBINE_PER_EXPERT"});
  cases->push_back({"OutputFormat",
                    [](Request* r) {
                      r->mutable_options()->set_output_format(static_cast<v1::OutputFormat>(8));
                    },
                    kBad, "INVALID_FIELD", "options.output_format", "8",
                    "OUTPUT_FORMAT_DATA, OUTPUT_FORMAT_VALUES"});
  cases->push_back({"RequestIdTooLong",
                    [](Request* r) { r->set_request_id(std::string(129, 'x')); }, kBad,
                    "INVALID_FIELD", "request_id", "", ""});
}

}  // namespace

v1::ForwardRequest GoodRequest(const RequestTarget& target, int64_t num_tokens, int32_t topk) {
  v1::ForwardRequest request;
  request.set_request_id("good");
  request.set_model(target.model);
  request.set_layer(target.layer);
  v1::Tensor* hidden = request.mutable_hidden_states();
  hidden->set_dtype(v1::DATA_TYPE_BFLOAT16);
  hidden->add_shape(num_tokens);
  hidden->add_shape(target.hidden_size);
  hidden->mutable_data()->resize(static_cast<size_t>(2 * num_tokens * target.hidden_size));
  for (int64_t i = 0; i < num_tokens * target.hidden_size; ++i) {
    // ±(1 to 2) / 2, of varying mantissa.
    SetBFloat16(hidden, i, static_cast<uint16_t>((i % 3 == 0 ? 0xbf00 : 0x3f00) + i * 37 % 128));
  }
  request.mutable_topk()->set_topk(topk);
  for (int64_t i = 0; i < num_tokens * topk; ++i) {
    request.mutable_topk()->add_ids(static_cast<int32_t>(i * 5 % target.num_experts));
    request.mutable_topk()->add_weights(0.25f + static_cast<float>(i % 4) * 0.125f);
  }
  return request;
}

std::vector<BadRequest> BadRequests(const RequestTarget& target) {
  std::vector<BadRequest> cases;
  AddRoutingCases(target, &cases);
  AddTensorCases(target, &cases);
  AddOtherCases(target, &cases);
  return cases;
}

std::vector<OddRequest> OddButGoodRequests(const RequestTarget& target) {
  const int64_t hidden_size = target.hidden_size;
  return {
      {"NoModelName", [](Request* r) { r->clear_model(); }},
      {"WeightBesideNoExpertIsNotRead",
       [](Request* r) {
         r->mutable_topk()->set_ids(1, -1);
         r->mutable_topk()->set_weights(1, kNan);
       }},
      {"RowWithoutExpertIsNotRead",
       [hidden_size](Request* r) {
         for (int64_t k = 0; k < kTopK; ++k) {
           r->mutable_topk()->set_ids(static_cast<int>(2 * kTopK + k), -1);
         }
         for (int64_t c = 0; c < hidden_size; ++c) {
           SetBFloat16(r->mutable_hidden_states(), 2 * hidden_size + c, 0x7fc0);
         }
       }},
      {"DuplicateIds", [](Request* r) { r->mutable_topk()->set_ids(1, r->topk().ids(0)); }},
      {"ZeroTopK", [](Request* r) { r->mutable_topk()->Clear(); }},
      {"ZeroTokens",
       [](Request* r) {
         r->mutable_topk()->clear_ids();
         r->mutable_topk()->clear_weights();
         r->mutable_hidden_states()->set_shape(0, 0);
         r->mutable_hidden_states()->clear_data();
       }},
      {"OtherDTypesOut",
       [](Request* r) {
         r->mutable_options()->set_output_dtype(v1::DATA_TYPE_FLOAT32);
         r->mutable_options()->set_combine_dtype(v1::DATA_TYPE_FLOAT16);
         r->mutable_options()->set_combine(v1::COMBINE_PER_EXPERT);
       }},
      {"NoAdapterForAnyToken",
       [](Request* r) {
         for (int i = 0; i < kTokens; ++i) r->add_adapter_index(-1);
       }},
  };
}

}  // namespace expertmesh
