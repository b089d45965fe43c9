#include "client/cli/forward_job.h"

#include <grpcpp/impl/codegen/proto_utils.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/flag_error.h"
#include "client/cli/wire_dtype.h"
#include "client/forward_wire.h"
#include "kernels/base/checked_math.h"
#include "server/ops/command_line.h"
#include "server/ops/few_of.h"

ABSL_FLAG(std::string, model, "", "model name; empty: the only one served");
ABSL_FLAG(int, layer, -1, "the checkpoint's own layer index; -1: the first layer that has experts");
ABSL_FLAG(int, tokens, 4, "tokens to draw at random when --hidden names no file");
ABSL_FLAG(uint64_t, seed, 1, "of everything that is drawn at random");
ABSL_FLAG(std::string, dtype, "",
          "float32, float16 or bfloat16: of random hidden states; empty: the model's own");
ABSL_FLAG(std::string, hidden, "",
          "hidden states [tokens, hidden_size]: FILE.npy or FILE.safetensors:TENSOR");
ABSL_FLAG(
    std::string, routing, "",
    "who chooses the experts: topk (this command), logits (the server, from logits) or gate (the "
    "server); empty: as the files given say, topk without any");
ABSL_FLAG(int, topk, 0, "experts per token to draw; 0: the model's own");
ABSL_FLAG(std::string, topk_ids, "", "file of ids [tokens, topk], int32 or int64");
ABSL_FLAG(std::string, topk_weights, "",
          "file of weights [tokens, topk], float32, float16 or bfloat16");
ABSL_FLAG(std::string, router_logits, "", "file of logits [tokens, num_experts]");
ABSL_FLAG(bool, weight_on_input, false,
          "the router weight multiplies the expert's input instead of its output");
ABSL_FLAG(std::string, output_dtype, "",
          "float32, float16 or bfloat16; empty: as the hidden states");
ABSL_FLAG(std::string, combine_dtype, "", "float32, float16 or bfloat16; empty: as the output");
ABSL_FLAG(std::string, combine, "per_owner", "per_owner or per_expert");
ABSL_FLAG(std::string, dispatch, "auto",
          "auto, passthrough, all_to_all, ... (the server must allow others than auto)");
ABSL_FLAG(bool, shared_experts, false, "add the layer's shared experts");
ABSL_FLAG(std::string, request_id, "", "name of the call in the server's log");
ABSL_FLAG(std::string, expected_fingerprint, "", "refuse to be served by other weights than these");

namespace expertmesh {
namespace {

// "bfloat16" -> DATA_TYPE_BFLOAT16 and so on: the proto's names without their prefix, in lower
// case.
template <typename Enum, typename Parse>
absl::StatusOr<Enum> EnumFromFlag(const char* flag, const char* prefix, const std::string& text,
                                  const char* known, Parse parse) {
  Enum value;
  if (!parse(absl::StrCat(prefix, absl::AsciiStrToUpper(text)), &value)) {
    return FlagError(absl::StrCat("--", flag, " is '", text, "'; it takes ", known));
  }
  return value;
}

absl::StatusOr<v1::DataType> DTypeFromFlag(const char* flag, const std::string& text) {
  return EnumFromFlag<v1::DataType>(
      flag, "DATA_TYPE_", text, "float32, float16, bfloat16",
      [](const std::string& name, v1::DataType* value) { return v1::DataType_Parse(name, value); });
}

// What one protobuf message can hold at most; the server's own limit is lower.
constexpr int64_t kMaxMessageBytes = INT32_MAX;

// Before anything is drawn, which takes long where the server would take none of it.
absl::Status CheckTokensToDraw(int64_t num_tokens, DType dtype, const v1::GetModelResponse& model) {
  const v1::Limits& limits = model.limits();
  if (limits.max_request_tokens() > 0 && num_tokens > limits.max_request_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens is ", num_tokens,
                                                   "; the server takes at most ",
                                                   limits.max_request_tokens(), " in one request"));
  }
  const auto size_bytes = CheckedSizeProduct({num_tokens, model.hidden_size(), DTypeBytes(dtype)});
  if (limits.max_request_bytes() > 0 &&
      (!size_bytes.has_value() || *size_bytes > limits.max_request_bytes())) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tokens is ", num_tokens, "; so many of ", model.hidden_size(),
                     " values do not fit one request of ", limits.max_request_bytes(),
                     " bytes, the most that the server takes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<FileTensor> RandomNormal(DType dtype, int64_t rows, int64_t columns,
                                        std::mt19937_64& random) {
  const auto size_bytes = CheckedSizeProduct({rows, columns, DTypeBytes(dtype)});
  if (!size_bytes.has_value() || *size_bytes > kMaxMessageBytes) {
    return FlagError(absl::StrCat("--tokens is ", rows, "; so many of ", columns,
                                  " values do not fit one message of ", kMaxMessageBytes,
                                  " bytes"));
  }
  FileTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = {rows, columns};
  tensor.data.resize(static_cast<size_t>(rows * columns * DTypeBytes(dtype)));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows * columns; ++i)
    StoreFloat(tensor.data.data(), dtype, i, normal(random));
  return tensor;
}

TensorBytes Bytes(const FileTensor& tensor) {
  TensorBytes bytes;
  bytes.data = tensor.data.data();
  bytes.size_bytes = static_cast<int64_t>(tensor.data.size());
  bytes.dtype = WireDType(tensor.dtype);
  return bytes;
}

absl::StatusOr<FileTensor> ReadMatrix(const char* flag, const std::string& path) {
  absl::StatusOr<FileTensor> tensor = ReadTensorFile(path);
  if (!tensor.ok()) return OfFlag(flag, tensor.status());
  if (tensor->shape.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, ": shape [",
                                                   absl::StrJoin(tensor->shape, ", "),
                                                   "]; it must have two dimensions"));
  }
  return tensor;
}

// Distinct experts and softmax-like weights, as a router would give.
void DrawTopK(const v1::LayerInfo& layer, int64_t num_tokens, int topk, std::mt19937_64& random,
              ForwardJob& job) {
  std::vector<int32_t> experts(static_cast<size_t>(layer.num_experts()));
  std::iota(experts.begin(), experts.end(), 0);
  std::exponential_distribution<float> exponential;
  for (int64_t t = 0; t < num_tokens; ++t) {
    float sum = 0;
    for (int k = 0; k < topk; ++k) {
      const size_t slot = static_cast<size_t>(k) % experts.size();
      std::uniform_int_distribution<size_t> pick(slot, experts.size() - 1);
      std::swap(experts[slot], experts[pick(random)]);
      job.topk_ids.push_back(experts[slot]);
      job.topk_weights.push_back(0.01f + exponential(random));
      sum += job.topk_weights.back();
    }
    for (int k = 0; k < topk; ++k)
      job.topk_weights[job.topk_weights.size() - 1 - static_cast<size_t>(k)] /= sum;
  }
}

absl::Status ReadTopK(ForwardJob& job, int& topk) {
  const std::string ids_path = absl::GetFlag(FLAGS_topk_ids);
  const std::string weights_path = absl::GetFlag(FLAGS_topk_weights);
  absl::StatusOr<FileTensor> ids = ReadMatrix("topk_ids", ids_path);
  if (!ids.ok()) return ids.status();
  absl::StatusOr<FileTensor> weights = ReadMatrix("topk_weights", weights_path);
  if (!weights.ok()) return weights.status();
  if (!IsActivationDType(weights->dtype) ||
      (ids->dtype != DType::kInt32 && ids->dtype != DType::kInt64)) {
    return absl::InvalidArgumentError(
        "--topk_ids must hold int32 or int64, --topk_weights float32, float16 or bfloat16");
  }
  if (ids->shape != weights->shape) {
    return absl::InvalidArgumentError(
        absl::StrCat("--topk_ids has shape [", absl::StrJoin(ids->shape, ", "),
                     "], --topk_weights [", absl::StrJoin(weights->shape, ", "), "]"));
  }
  topk = static_cast<int>(ids->shape[1]);
  const int64_t count = ids->shape[0] * ids->shape[1];
  for (int64_t i = 0; i < count; ++i) {
    int64_t id = 0;
    if (ids->dtype == DType::kInt64) {
      memcpy(&id, ids->data.data() + i * 8, 8);
    } else {
      int32_t narrow = 0;
      memcpy(&narrow, ids->data.data() + i * 4, 4);
      id = narrow;
    }
    if (id < INT32_MIN || id > INT32_MAX) {
      return absl::InvalidArgumentError(
          absl::StrCat("--topk_ids: element ", i, " is ", id, ", which is no int32"));
    }
    job.topk_ids.push_back(static_cast<int32_t>(id));
    job.topk_weights.push_back(LoadFloat(weights->data.data(), weights->dtype, i));
  }
  return absl::OkStatus();
}

// --routing, or what the files given imply. A file that would not be read is an error, not a file
// ignored.
absl::StatusOr<std::string> RoutingFromFlags() {
  const bool has_topk =
      !absl::GetFlag(FLAGS_topk_ids).empty() || !absl::GetFlag(FLAGS_topk_weights).empty();
  const bool has_logits = !absl::GetFlag(FLAGS_router_logits).empty();
  if (has_topk && has_logits) {
    return FlagError("--router_logits and --topk_ids: both say who chooses the experts; give one");
  }
  const std::string routing = absl::GetFlag(FLAGS_routing);
  if (routing != "" && routing != "topk" && routing != "logits" && routing != "gate") {
    return FlagError(absl::StrCat("--routing is '", routing, "'; it takes topk, logits or gate"));
  }
  if (routing.empty()) return std::string(has_logits ? "logits" : "topk");
  if (has_topk && routing != "topk") {
    return FlagError(
        absl::StrCat("--routing=", routing, " does not read --topk_ids and --topk_weights"));
  }
  if (has_logits && routing != "logits") {
    return FlagError(absl::StrCat("--routing=", routing, " does not read --router_logits"));
  }
  return routing;
}

absl::Status FillRouting(const v1::LayerInfo& layer, std::mt19937_64& random, ForwardJob& job) {
  const absl::StatusOr<std::string> kind = RoutingFromFlags();
  if (!kind.ok()) return kind.status();
  const std::string& routing = *kind;
  const int64_t num_tokens = job.input.num_tokens;
  if (routing == "gate") {
    job.input.routing = ServerGateRouting();
    return absl::OkStatus();
  }
  if (routing == "logits") {
    if (const std::string path = absl::GetFlag(FLAGS_router_logits); !path.empty()) {
      absl::StatusOr<FileTensor> logits = ReadMatrix("router_logits", path);
      if (!logits.ok()) return logits.status();
      job.router_logits = *std::move(logits);
    } else {
      job.random = true;
      absl::StatusOr<FileTensor> logits =
          RandomNormal(DType::kFloat32, num_tokens, layer.num_experts(), random);
      if (!logits.ok()) return logits.status();
      job.router_logits = *std::move(logits);
    }
    job.input.routing = RouterLogitsRouting{Bytes(job.router_logits), job.router_logits.shape[1]};
    return absl::OkStatus();
  }
  int topk = absl::GetFlag(FLAGS_topk) > 0 ? absl::GetFlag(FLAGS_topk) : layer.topk();
  if (!absl::GetFlag(FLAGS_topk_ids).empty() || !absl::GetFlag(FLAGS_topk_weights).empty()) {
    if (absl::Status status = ReadTopK(job, topk); !status.ok()) return status;
  } else {
    job.random = true;
    DrawTopK(layer, num_tokens, topk, random, job);
  }
  job.input.routing = TopKRouting{topk, job.topk_ids, job.topk_weights};
  return absl::OkStatus();
}

absl::Status FillOptions(v1::ForwardOptions& options) {
  const struct {
    const char* flag;
    std::string text;
    void (v1::ForwardOptions::*set)(v1::DataType);
  } dtypes[] = {
      {"output_dtype", absl::GetFlag(FLAGS_output_dtype), &v1::ForwardOptions::set_output_dtype},
      {"combine_dtype", absl::GetFlag(FLAGS_combine_dtype),
       &v1::ForwardOptions::set_combine_dtype}};
  for (const auto& dtype : dtypes) {
    if (dtype.text.empty()) continue;
    const absl::StatusOr<v1::DataType> value = DTypeFromFlag(dtype.flag, dtype.text);
    if (!value.ok()) return value.status();
    (options.*dtype.set)(*value);
  }
  const auto combine = EnumFromFlag<v1::Combine>(
      "combine", "COMBINE_", absl::GetFlag(FLAGS_combine), "per_owner, per_expert",
      [](const std::string& name, v1::Combine* value) { return v1::Combine_Parse(name, value); });
  if (!combine.ok()) return combine.status();
  options.set_combine(*combine);
  const auto dispatch = EnumFromFlag<v1::DispatchMode>(
      "dispatch", "DISPATCH_MODE_", absl::GetFlag(FLAGS_dispatch),
      "auto, passthrough, allgather_reducescatter, allgather_reducescatter_monolithic, all_to_all, "
      "all_to_all_fixed_capacity, direct",
      [](const std::string& name, v1::DispatchMode* value) {
        return v1::DispatchMode_Parse(name, value);
      });
  if (!dispatch.ok()) return dispatch.status();
  options.set_dispatch(*dispatch);
  options.set_include_shared_experts(absl::GetFlag(FLAGS_shared_experts));
  return absl::OkStatus();
}

// kInvalid: the model's own.
absl::StatusOr<DType> DTypeOfRandomRows() {
  const std::string name = absl::GetFlag(FLAGS_dtype);
  if (name.empty()) return DType::kInvalid;
  const DType dtype = DTypeFromName(name).value_or(DType::kInvalid);
  if (IsActivationDType(dtype)) return dtype;
  return FlagError(absl::StrCat("--dtype is '", name, "'; it takes float32, float16 or bfloat16"));
}

absl::StatusOr<const v1::LayerInfo*> ChooseLayer(const v1::GetModelResponse& model) {
  const int index = absl::GetFlag(FLAGS_layer);
  if (model.layers().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("model ", model.model(), " has no layer with experts"));
  }
  if (index == -1) return &model.layers(0);
  std::vector<std::string> known;
  for (const v1::LayerInfo& layer : model.layers()) {
    if (layer.index() == index) return &layer;
    known.push_back(absl::StrCat(layer.index()));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--layer=", index, " of model ", model.model(),
                   " has no experts; layers that do: ", FewOf(known)));
}

// Of what is drawn at random: each where it is.
absl::Status CheckDrawFlagsAreUsed(const std::vector<std::string>& given,
                                   const std::string& routing) {
  const bool draws_rows = absl::GetFlag(FLAGS_hidden).empty();
  const bool draws_topk = routing == "topk" && absl::GetFlag(FLAGS_topk_ids).empty();
  const bool draws_logits = routing == "logits" && absl::GetFlag(FLAGS_router_logits).empty();
  constexpr char kRowsAreGiven[] = "the hidden states are those of --hidden";
  return FlagErrorOf(CheckFlagsAreUsed(
      given, {{"tokens", draws_rows, kRowsAreGiven},
              {"dtype", draws_rows, kRowsAreGiven},
              {"topk", draws_topk,
               routing == "topk" ? "each token's experts are those of --topk_ids"
                                 : "the server chooses the experts, as many as its rule says"},
              {"seed", draws_rows || draws_topk || draws_logits, "nothing is drawn at random"}}));
}

}  // namespace

absl::Status CheckForwardFlags(const std::vector<std::string>& given) {
  const struct {
    const char* flag;
    int value;
    int least;
  } numbers[] = {{"layer", absl::GetFlag(FLAGS_layer), -1},
                 {"tokens", absl::GetFlag(FLAGS_tokens), 0},
                 {"topk", absl::GetFlag(FLAGS_topk), 0}};
  for (const auto& number : numbers) {
    if (number.value >= number.least) continue;
    return FlagError(absl::StrCat("--", number.flag, " is ", number.value,
                                  "; it takes a whole number from ", number.least, " on"));
  }
  for (const absl::Flag<std::string>* file :
       {&FLAGS_hidden, &FLAGS_topk_ids, &FLAGS_topk_weights, &FLAGS_router_logits}) {
    const std::string path = absl::GetFlag(*file);
    if (path.empty()) continue;
    if (absl::Status status = CheckTensorFileToRead(path); !status.ok()) {
      return OfFlag(absl::GetFlagReflectionHandle(*file).Name(), status);
    }
  }
  if (absl::GetFlag(FLAGS_topk_ids).empty() != absl::GetFlag(FLAGS_topk_weights).empty()) {
    return FlagError("--topk_ids and --topk_weights: give both or none");
  }
  v1::ForwardOptions options;
  absl::Status status = FillOptions(options);
  status.Update(RoutingFromFlags().status());
  status.Update(DTypeOfRandomRows().status());
  if (!status.ok()) return status;
  return CheckDrawFlagsAreUsed(given, *RoutingFromFlags());
}

absl::Status FillForwardJob(const v1::GetModelResponse& model, ForwardJob& job) {
  if (absl::Status status = CheckForwardFlags(/*given=*/{}); !status.ok()) return status;
  const absl::StatusOr<const v1::LayerInfo*> layer = ChooseLayer(model);
  if (!layer.ok()) return layer.status();
  std::mt19937_64 random(absl::GetFlag(FLAGS_seed));
  ForwardInput& input = job.input;
  input.request_id = absl::GetFlag(FLAGS_request_id);
  input.model = model.model();
  input.layer = (*layer)->index();
  input.apply_router_weight_on_input = absl::GetFlag(FLAGS_weight_on_input);
  input.expected_fingerprint = absl::GetFlag(FLAGS_expected_fingerprint);
  if (absl::Status status = FillOptions(input.options); !status.ok()) return status;

  if (const std::string path = absl::GetFlag(FLAGS_hidden); !path.empty()) {
    absl::StatusOr<FileTensor> hidden = ReadMatrix("hidden", path);
    if (!hidden.ok()) return hidden.status();
    job.hidden_states = *std::move(hidden);
  } else {
    const int tokens = absl::GetFlag(FLAGS_tokens);
    const absl::StatusOr<DType> asked = DTypeOfRandomRows();
    if (!asked.ok()) return asked.status();
    const DType dtype = *asked == DType::kInvalid ? MemoryDType(model.activation_dtype()) : *asked;
    if (!IsActivationDType(dtype)) {
      return absl::InvalidArgumentError(
          "this client cannot draw rows of the model's own activation dtype; name one with "
          "--dtype");
    }
    if (absl::Status status = CheckTokensToDraw(tokens, dtype, model); !status.ok()) return status;
    job.random = true;
    absl::StatusOr<FileTensor> hidden = RandomNormal(dtype, tokens, model.hidden_size(), random);
    if (!hidden.ok()) return hidden.status();
    job.hidden_states = *std::move(hidden);
  }
  input.num_tokens = job.hidden_states.shape[0];
  input.hidden_size = job.hidden_states.shape[1];
  input.hidden_states = Bytes(job.hidden_states);
  return FillRouting(**layer, random, job);
}

absl::StatusOr<v1::ForwardRequest> RequestMessage(const ForwardInput& input) {
  absl::StatusOr<grpc::ByteBuffer> bytes = EncodeForwardRequest(input);
  if (!bytes.ok()) return bytes.status();
  v1::ForwardRequest request;
  if (!grpc::SerializationTraits<v1::ForwardRequest>::Deserialize(&*bytes, &request).ok()) {
    return absl::InternalError("the request that this command made cannot be read back");
  }
  return request;
}

}  // namespace expertmesh
