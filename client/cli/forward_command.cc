#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/cli/command.h"
#include "client/cli/connection_flags.h"
#include "client/cli/flag_error.h"
#include "client/cli/forward_job.h"
#include "client/cli/json_output.h"
#include "client/cli/reference_check.h"
#include "client/cli/tensor_file.h"
#include "client/cli/wire_dtype.h"
#include "server/model/checkpoint_weight_source.h"

ABSL_DECLARE_FLAG(std::string, model);
ABSL_DECLARE_FLAG(std::string, hidden);
ABSL_DECLARE_FLAG(std::string, dtype);
ABSL_DECLARE_FLAG(std::string, output_dtype);
ABSL_FLAG(std::string, output, "", "write the output there: FILE.npy or FILE.safetensors");
ABSL_FLAG(std::string, check, "",
          "checkpoint directory: compare the answer with a float64 evaluation of it");

namespace expertmesh {
namespace {

constexpr int64_t kShownRows = 4;
constexpr int64_t kShownColumns = 6;
// expert_service.proto, ExplainRequest.max_tokens.
constexpr int kMaxExplainedTokens = 4096;

void PrintSummary(const ForwardJob& job, const ForwardOutput& output, DType dtype) {
  const v1::ServedBy& served = output.response.served_by();
  const v1::Timings& timings = output.response.timings();
  printf("%s layer %d: %lld tokens, output [%lld, %lld] %s\n", job.input.model.c_str(),
         job.input.layer, static_cast<long long>(job.input.num_tokens),
         static_cast<long long>(output.num_tokens), static_cast<long long>(output.hidden_size),
         std::string(DTypeName(dtype)).c_str());
  printf("  served by     request %s, epoch %llu, step %llu (%d in all), %d rank%s, %s, %s\n",
         output.response.request_id().c_str(), static_cast<unsigned long long>(served.epoch()),
         static_cast<unsigned long long>(served.step()), served.num_steps(), served.ep_size(),
         served.ep_size() == 1 ? "" : "s",
         served.num_steps() == 0
             ? "nothing to run"
             : absl::AsciiStrToLower(
                   absl::StripPrefix(v1::DispatchMode_Name(served.strategy()), "DISPATCH_MODE_"))
                   .c_str(),
         served.instruction_set().c_str());
  const int64_t stages = timings.queue_micros() + timings.route_micros() + timings.plan_micros() +
                         timings.dispatch_micros() + timings.compute_micros() +
                         timings.combine_micros();
  printf(
      "  micros        %lld: queue %lld, route %lld, plan %lld, dispatch %lld, compute %lld, "
      "combine %lld, other %lld\n",
      static_cast<long long>(timings.total_micros()),
      static_cast<long long>(timings.queue_micros()),
      static_cast<long long>(timings.route_micros()), static_cast<long long>(timings.plan_micros()),
      static_cast<long long>(timings.dispatch_micros()),
      static_cast<long long>(timings.compute_micros()),
      static_cast<long long>(timings.combine_micros()),
      static_cast<long long>(std::max<int64_t>(0, timings.total_micros() - stages)));
  for (int64_t t = 0; t < std::min(output.num_tokens, kShownRows); ++t) {
    double sum_of_squares = 0;
    std::string row;
    for (int64_t c = 0; c < output.hidden_size; ++c) {
      const double value = LoadFloat(output.output.data(), dtype, t * output.hidden_size + c);
      sum_of_squares += value * value;
      if (c < kShownColumns) absl::StrAppendFormat(&row, " %10.5f", value);
    }
    const double rms = output.hidden_size == 0
                           ? 0
                           : std::sqrt(sum_of_squares / static_cast<double>(output.hidden_size));
    printf("  token %-7lld%s%s   rms %.5f\n", static_cast<long long>(t), row.c_str(),
           output.hidden_size > kShownColumns ? " ..." : "", rms);
  }
  if (output.num_tokens > kShownRows) {
    printf("  ... and %lld more tokens\n", static_cast<long long>(output.num_tokens - kShownRows));
  }
}

// The experts that the server chose, put where given ones would stand. Explain routes as Forward
// does.
absl::StatusOr<int> AdoptServersChoice(ExpertClient& client, ForwardJob& job) {
  const absl::StatusOr<v1::ForwardRequest> request = RequestMessage(job.input);
  if (!request.ok()) return request.status();
  v1::ExplainRequest explain;
  *explain.mutable_request() = *request;
  explain.set_max_tokens(kMaxExplainedTokens);
  const absl::StatusOr<v1::ExplainResponse> answer =
      client.Explain(explain, CallOptionsFromFlags());
  if (!answer.ok()) return answer.status();
  for (const v1::ExplainedToken& token : answer->tokens()) {
    for (const v1::ExplainedExpert& expert : token.experts()) {
      job.topk_ids.push_back(expert.expert_id());
      job.topk_weights.push_back(expert.weight());
    }
  }
  if (job.topk_ids.size() != static_cast<size_t>(job.input.num_tokens * answer->topk())) {
    return absl::DataLossError("Explain did not name every token's experts");
  }
  return answer->topk();
}

// What no server could make right of --output; the flags of types are valid.
absl::Status CheckOutputFlag() {
  const std::string path = absl::GetFlag(FLAGS_output);
  if (path.empty()) return absl::OkStatus();
  if (absl::Status status = CheckTensorFileToWrite(path); !status.ok()) {
    return OfFlag("output", status);
  }
  std::string dtype = absl::GetFlag(FLAGS_output_dtype);
  if (dtype.empty() && absl::GetFlag(FLAGS_hidden).empty()) dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype.empty()) return absl::OkStatus();
  return OfFlag("output", FlagErrorOf(CheckTensorFileHolds(path, *DTypeFromName(dtype))));
}

// Finds fault with what is to be done with the answer before the call is made.
absl::Status PrepareForAnswer(const v1::GetModelResponse& model, const ForwardJob& job,
                              std::unique_ptr<CheckpointWeightSource>& weights) {
  if (const std::string path = absl::GetFlag(FLAGS_output); !path.empty()) {
    const DType asked = MemoryDType(job.input.options.output_dtype());
    const DType dtype = asked == DType::kInvalid ? job.hidden_states.dtype : asked;
    if (absl::Status status = CanWriteTensorFile(path, dtype); !status.ok()) {
      return OfFlag("output", status);
    }
  }
  if (const std::string directory = absl::GetFlag(FLAGS_check); !directory.empty()) {
    if (!std::holds_alternative<TopKRouting>(job.input.routing) &&
        job.input.num_tokens > kMaxExplainedTokens) {
      const std::string fault =
          absl::StrCat("--check with --routing=logits or gate takes at most ", kMaxExplainedTokens,
                       " tokens, not ", job.input.num_tokens);
      // As many tokens as a file has are no fault of the command line.
      return absl::GetFlag(FLAGS_hidden).empty() ? FlagError(fault)
                                                 : absl::InvalidArgumentError(fault);
    }
    absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> opened =
        OpenServedCheckpoint(directory, model);
    if (!opened.ok()) return opened.status();
    weights = *std::move(opened);
  }
  return absl::OkStatus();
}

absl::Status Check(ExpertClient& client, const WeightSource& weights, ForwardJob& job,
                   const ForwardOutput& output) {
  int topk = 0;
  if (const auto* given = std::get_if<TopKRouting>(&job.input.routing)) {
    topk = given->topk;
  } else {
    const absl::StatusOr<int> chosen = AdoptServersChoice(client, job);
    if (!chosen.ok()) return chosen.status();
    topk = *chosen;
    job.input.apply_router_weight_on_input |= weights.model().apply_router_weight_on_input;
  }
  const absl::StatusOr<ReferenceCheck> check = CheckAgainstWeights(weights, job, topk, output);
  if (!check.ok()) return check.status();
  fprintf(JsonWanted() ? stderr : stdout,
          "  check         %s: %lld values, max error %.2e, rms %.2e of the largest; rounding "
          "allows %.2e\n",
          check->ok() ? "ok" : "FAILED", static_cast<long long>(check->num_values),
          check->max_error, check->rms_error, check->limit);
  if (!check->ok()) {
    return absl::DataLossError("the answer differs from the checkpoint's float64 evaluation");
  }
  return absl::OkStatus();
}

absl::Status Run(const std::vector<std::string>& given) {
  if (absl::Status status = CheckForwardFlags(given); !status.ok()) return status;
  if (absl::Status status = CheckOutputFlag(); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ClientFromFlags();
  if (!client.ok()) return client.status();
  const absl::StatusOr<v1::GetModelResponse> model =
      (*client)->GetModel(absl::GetFlag(FLAGS_model), CallOptionsFromFlags());
  if (!model.ok()) return model.status();
  ForwardJob job;
  if (absl::Status status = FillForwardJob(*model, job); !status.ok()) return status;
  std::unique_ptr<CheckpointWeightSource> weights;
  if (absl::Status status = PrepareForAnswer(*model, job, weights); !status.ok()) return status;
  const absl::StatusOr<ForwardOutput> output =
      (*client)->Forward(job.input, CallOptionsFromFlags());
  if (!output.ok()) return output.status();
  const DType dtype = MemoryDType(output->dtype);
  if (dtype == DType::kInvalid) {
    return absl::DataLossError(
        absl::StrCat("the answer has dtype ", v1::DataType_Name(output->dtype)));
  }
  if (JsonWanted()) {
    if (absl::Status status = PrintJson(output->response); !status.ok()) return status;
  } else {
    PrintSummary(job, *output, dtype);
  }
  if (const std::string path = absl::GetFlag(FLAGS_output); !path.empty()) {
    const FileTensor tensor{dtype, {output->num_tokens, output->hidden_size}, output->output};
    if (absl::Status status = WriteTensorFile(path, "output", tensor); !status.ok()) return status;
    fprintf(stderr, "wrote %s\n", path.c_str());
  }
  if (weights != nullptr) return Check(**client, *weights, job, *output);
  return absl::OkStatus();
}

}  // namespace

const Command kForwardCommand = {
    "forward",
    "one Forward call, with random or given input; prints a summary or writes the output",
    "Input, drawn at random by --seed where no file is named:\n"
    "  --model=NAME --layer=N --tokens=N --topk=N --dtype=T --seed=N\n"
    "  --hidden=FILE                         hidden states [tokens, hidden_size]\n"
    "  --routing=topk|logits|gate            who chooses the experts (default: as the files say)\n"
    "  --topk_ids=FILE --topk_weights=FILE   [tokens, topk]\n"
    "  --router_logits=FILE                  [tokens, num_experts]\n"
    "  (FILE is x.npy or x.safetensors:TENSOR)\n\n"
    "What to ask for:\n"
    "  --output_dtype=T --combine_dtype=T --combine=per_owner|per_expert --weight_on_input "
    "--shared_experts\n"
    "  --dispatch=MODE --request_id=NAME --expected_fingerprint=HEX\n\n"
    "What to do with the answer:\n"
    "  --output=FILE   write it (x.npy or x.safetensors)\n"
    "  --check=DIR     compare it with a float64 evaluation of the checkpoint in DIR\n"
    "  --json          the answer's fields but its elements, as JSON\n\n"
    "  expertmesh forward --tokens=16 --routing=gate --check=/models/my-moe\n",
    "forward_command.cc forward_job.cc json_output.cc connection_flags.cc", Run};

}  // namespace expertmesh
