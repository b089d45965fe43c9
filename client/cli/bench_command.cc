#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <variant>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cli/bench_load.h"
#include "client/cli/bench_run.h"
#include "client/cli/command.h"
#include "client/cli/connection_flags.h"
#include "client/cli/json_output.h"
#include "client/cli/reference_check.h"
#include "client/cli/wire_dtype.h"
#include "server/model/checkpoint_weight_source.h"

ABSL_DECLARE_FLAG(std::string, model);
ABSL_DECLARE_FLAG(std::string, dtype);
ABSL_DECLARE_FLAG(std::string, check);
ABSL_DECLARE_FLAG(int, tokens);
ABSL_DECLARE_FLAG(int, topk);
ABSL_DECLARE_FLAG(uint64_t, seed);
ABSL_FLAG(std::vector<std::string>, layers, {},
          "bench: layers to call in turn; empty: all that have experts");
ABSL_FLAG(std::string, skew, "uniform", "bench: how experts are drawn: uniform, zipf or one_hot");
ABSL_FLAG(int, concurrency, 8, "bench: calls in flight (closed loop)");
ABSL_FLAG(double, rate, 0, "bench: calls per second at random moments (open loop); 0: closed loop");
ABSL_FLAG(absl::Duration, warmup, absl::Seconds(2), "bench: time before measuring");
ABSL_FLAG(absl::Duration, duration, absl::Seconds(10), "bench: time of measuring");
ABSL_FLAG(int, requests, 64, "bench: different requests, used again and again");
ABSL_FLAG(int, samples, 16, "bench: answers to verify");

namespace expertmesh {
namespace {

// More calls in flight than any one client process should hold; beyond it, sending them takes
// longer than measuring.
constexpr int kMaxConcurrency = 16384;

// What became of the answers that were kept.
struct Verification {
  int num_same = 0;  // the bytes that the same request gets when it is alone
  int num_different = 0;
  int num_not_comparable = 0;  // another placement or instruction set served it alone
  int num_right = 0;           // --check: agree with the checkpoint
  int num_wrong = 0;
  double max_error = 0;

  bool ok() const { return num_different == 0 && num_wrong == 0; }
};

bool SameServer(const v1::ServedBy& a, const v1::ServedBy& b) {
  return a.fingerprint() == b.fingerprint() &&
         a.placement_fingerprint() == b.placement_fingerprint() &&
         a.instruction_set() == b.instruction_set();
}

absl::StatusOr<Verification> Verify(ExpertClient& client,
                                    const std::vector<std::unique_ptr<ForwardJob>>& load,
                                    const std::vector<BenchSample>& samples) {
  Verification result;
  std::unique_ptr<CheckpointWeightSource> weights;
  if (const std::string directory = absl::GetFlag(FLAGS_check); !directory.empty()) {
    auto opened = CheckpointWeightSource::Open(directory);
    if (!opened.ok()) return opened.status();
    weights = *std::move(opened);
  }
  for (const BenchSample& sample : samples) {
    const ForwardJob& job = *load[sample.request];
    const absl::StatusOr<ForwardOutput> alone = client.Forward(job.input, CallOptionsFromFlags());
    if (!alone.ok()) return alone.status();
    if (!SameServer(alone->response.served_by(), sample.answer.response.served_by())) {
      ++result.num_not_comparable;
    } else {
      ++(alone->output == sample.answer.output ? result.num_same : result.num_different);
    }
    if (weights == nullptr) continue;
    const absl::StatusOr<ReferenceCheck> check = CheckAgainstWeights(
        *weights, job, std::get<TopKRouting>(job.input.routing).topk, sample.answer);
    if (!check.ok()) return check.status();
    ++(check->ok() ? result.num_right : result.num_wrong);
    result.max_error = std::max(result.max_error, check->max_error);
  }
  return result;
}

std::string Rates(const BenchSummary& summary) {
  const double seconds = summary.seconds > 0 ? summary.seconds : 1;
  return absl::StrFormat("%.0f calls/s  %.0f tokens/s  p50 %d  p95 %d  p99 %d us",
                         static_cast<double>(summary.num_ok) / seconds,
                         static_cast<double>(summary.num_tokens) / seconds, summary.p50_micros,
                         summary.p95_micros, summary.p99_micros);
}

void ShowProgress(double seconds, const BenchSummary& summary, int64_t in_flight) {
  if (isatty(STDERR_FILENO) == 0) return;
  const std::string phase = seconds < 0 ? absl::StrFormat("warming up %.1f s", -seconds)
                                        : absl::StrFormat("measuring %.1f s", seconds);
  fprintf(stderr, "\r\033[K  %s  %s  errors %lld  in flight %lld", phase.c_str(),
          Rates(summary).c_str(), static_cast<long long>(summary.num_errors()),
          static_cast<long long>(in_flight));
  fflush(stderr);
}

std::string Shape(const v1::GetModelResponse& model, const BenchLoadOptions& load,
                  const BenchRunOptions& run) {
  const std::string loop =
      run.rate > 0 ? absl::StrFormat("open loop at %.6g calls/s", run.rate)
                   : absl::StrFormat("closed loop, %d calls in flight", run.concurrency);
  return absl::StrFormat("%s: %d tokens a call, hidden size %d, %s, %s routing, %s", model.model(),
                         load.tokens_per_call, model.hidden_size(),
                         std::string(DTypeName(load.dtype)), absl::GetFlag(FLAGS_skew), loop);
}

std::string CountsByCode(const std::map<std::string, int64_t>& counts) {
  std::string text = counts.empty() ? "none" : "";
  for (const auto& [code, count] : counts) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", code, " ", count);
  }
  return text;
}

void PrintVerification(const Verification& verification) {
  const int num_samples =
      verification.num_same + verification.num_different + verification.num_not_comparable;
  if (num_samples == 0) {
    puts("  verified      nothing: no answer was kept");
    return;
  }
  printf(
      "  verified      %d of %d answers have the bytes of the same request alone%s\n",
      verification.num_same, num_samples,
      verification.num_not_comparable > 0 ? " (the others were served by another placement)" : "");
  if (verification.num_right + verification.num_wrong > 0) {
    printf("                %d of %d agree with the checkpoint, max error %.2e\n",
           verification.num_right, verification.num_right + verification.num_wrong,
           verification.max_error);
  }
}

void PrintText(const BenchResult& result, const absl::StatusOr<Verification>& verification) {
  const BenchSummary& summary = result.summary;
  const double seconds = summary.seconds > 0 ? summary.seconds : 1;
  printf("  measured      %.1f s, %lld calls answered\n", summary.seconds,
         static_cast<long long>(summary.num_ok));
  printf("  throughput    %.1f calls/s, %.1f tokens/s\n",
         static_cast<double>(summary.num_ok) / seconds,
         static_cast<double>(summary.num_tokens) / seconds);
  printf("  latency us    p50 %lld, p95 %lld, p99 %lld, max %lld (inside the server: mean %.0f)\n",
         static_cast<long long>(summary.p50_micros), static_cast<long long>(summary.p95_micros),
         static_cast<long long>(summary.p99_micros), static_cast<long long>(summary.max_micros),
         summary.mean_server_micros);
  printf("  errors        %s\n", CountsByCode(summary.errors_by_code).c_str());
  if (!summary.first_error.ok()) {
    printf("                the first: %s\n", std::string(summary.first_error.message()).c_str());
  }
  // A few at the end are a closed loop's nature.
  if (result.num_unfinished > summary.num_ok / 100 ||
      result.oldest_unfinished_micros > summary.max_micros ||
      !result.unfinished_errors_by_code.empty()) {
    printf(
        "  unfinished    %lld calls were in flight at the end and are in no figure above, the "
        "oldest waiting for %.1f s; errors among them: %s\n",
        static_cast<long long>(result.num_unfinished),
        static_cast<double>(result.oldest_unfinished_micros) * 1e-6,
        CountsByCode(result.unfinished_errors_by_code).c_str());
  }
  if (result.num_not_sent > 0) {
    printf(
        "  not sent      %lld calls: too many were in flight; the server is slower than the rate "
        "asked for\n",
        static_cast<long long>(result.num_not_sent));
  }
  if (verification.ok()) {
    PrintVerification(*verification);
  } else {
    printf("  verified      nothing: the server answers no more\n");
  }
}

nlohmann::ordered_json VerificationJson(const absl::StatusOr<Verification>& verification) {
  if (!verification.ok()) return nullptr;
  return {{"same_bytes", verification->num_same},
          {"different_bytes", verification->num_different},
          {"not_comparable", verification->num_not_comparable},
          {"agree_with_checkpoint", verification->num_right},
          {"disagree_with_checkpoint", verification->num_wrong}};
}

void PrintBenchJson(const v1::GetModelResponse& model, const BenchLoadOptions& load,
                    const BenchRunOptions& run, const BenchResult& result,
                    const absl::StatusOr<Verification>& verification) {
  const BenchSummary& summary = result.summary;
  const double seconds = summary.seconds > 0 ? summary.seconds : 1;
  const nlohmann::ordered_json json = {
      {"model", model.model()},
      {"tokens_per_call", load.tokens_per_call},
      {"hidden_size", model.hidden_size()},
      {"dtype", std::string(DTypeName(load.dtype))},
      {"skew", absl::GetFlag(FLAGS_skew)},
      {"concurrency", run.rate > 0 ? 0 : run.concurrency},
      {"rate", run.rate},
      {"seconds", summary.seconds},
      {"calls_ok", summary.num_ok},
      {"calls_per_second", static_cast<double>(summary.num_ok) / seconds},
      {"tokens_per_second", static_cast<double>(summary.num_tokens) / seconds},
      {"latency_micros",
       {{"p50", summary.p50_micros},
        {"p95", summary.p95_micros},
        {"p99", summary.p99_micros},
        {"max", summary.max_micros}}},
      {"mean_server_micros", summary.mean_server_micros},
      {"errors", summary.errors_by_code},
      {"calls_not_sent", result.num_not_sent},
      {"calls_unfinished", result.num_unfinished},
      {"oldest_unfinished_micros", result.oldest_unfinished_micros},
      {"errors_of_unfinished", result.unfinished_errors_by_code},
      {"verified", VerificationJson(verification)}};
  printf("%s\n", json.dump(2).c_str());
}

absl::Status ReadFlags(const v1::GetModelResponse& model, BenchLoadOptions& load,
                       BenchRunOptions& run) {
  for (const std::string& layer : absl::GetFlag(FLAGS_layers)) {
    int32_t index = 0;
    if (!absl::SimpleAtoi(layer, &index)) {
      return absl::InvalidArgumentError(absl::StrCat("--layers: '", layer, "' is no number"));
    }
    load.layers.push_back(index);
  }
  load.tokens_per_call = absl::GetFlag(FLAGS_tokens);
  load.topk = absl::GetFlag(FLAGS_topk);
  load.seed = absl::GetFlag(FLAGS_seed);
  load.num_requests = absl::GetFlag(FLAGS_requests);
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  load.dtype = dtype.empty() ? MemoryDType(model.activation_dtype())
                             : DTypeFromName(dtype).value_or(DType::kInvalid);
  if (!IsActivationDType(load.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype=", dtype, "; known: float32, float16, bfloat16"));
  }
  const absl::StatusOr<RoutingSkew> skew = RoutingSkewFromName(absl::GetFlag(FLAGS_skew));
  if (!skew.ok()) return skew.status();
  load.skew = *skew;
  run.concurrency = absl::GetFlag(FLAGS_concurrency);
  run.rate = absl::GetFlag(FLAGS_rate);
  run.warmup = absl::GetFlag(FLAGS_warmup);
  run.duration = absl::GetFlag(FLAGS_duration);
  run.call = CallOptionsFromFlags();
  run.num_samples = absl::GetFlag(FLAGS_samples);
  run.seed = load.seed;
  if (run.num_samples < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--samples=", run.num_samples, "; it must be at least 0"));
  }
  if (run.concurrency > kMaxConcurrency) {
    return absl::InvalidArgumentError(absl::StrCat("--concurrency=", run.concurrency, "; at most ",
                                                   kMaxConcurrency, " calls in flight"));
  }
  if (run.concurrency < 1 || run.rate < 0 || run.duration <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        "--concurrency must be at least 1, --rate at least 0, --duration above 0");
  }
  return absl::OkStatus();
}

// The first error, with its details, in the name of all.
absl::Status NothingAnswered(const BenchResult& result) {
  const absl::Status& first = result.summary.first_error;
  if (first.ok()) {
    return absl::DeadlineExceededError("no call was answered while it was measured");
  }
  absl::Status status(first.code(), absl::StrCat("no call was answered: ", first.message()));
  first.ForEachPayload([&status](absl::string_view url, const absl::Cord& payload) {
    status.SetPayload(url, payload);
  });
  return status;
}

absl::Status Run() {
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ClientFromFlags();
  if (!client.ok()) return client.status();
  const absl::StatusOr<v1::GetModelResponse> model =
      (*client)->GetModel(absl::GetFlag(FLAGS_model), CallOptionsFromFlags());
  if (!model.ok()) return model.status();
  BenchLoadOptions load_options;
  BenchRunOptions run_options;
  if (absl::Status status = ReadFlags(*model, load_options, run_options); !status.ok())
    return status;
  const auto load = MakeBenchLoad(*model, load_options);
  if (!load.ok()) return load.status();
  if (!JsonWanted()) {
    printf("%s\n", Shape(*model, load_options, run_options).c_str());
    fflush(stdout);
  }
  const BenchResult result = RunBench(**client, *load, run_options, ShowProgress);
  if (isatty(STDERR_FILENO) != 0) fputs("\r\033[K", stderr);
  const absl::StatusOr<Verification> verification = Verify(**client, *load, result.samples);
  if (JsonWanted()) {
    PrintBenchJson(*model, load_options, run_options, result, verification);
  } else {
    PrintText(result, verification);
  }
  if (result.summary.num_ok == 0) return NothingAnswered(result);
  if (!verification.ok()) return verification.status();
  if (!verification->ok())
    return absl::DataLossError("answers under load differ from what they should be");
  return absl::OkStatus();
}

}  // namespace

const Command kBenchCommand = {
    "bench",
    "calls a server for a while: throughput, latency, errors; verifies a sample of the answers",
    "What is sent:\n"
    "  --tokens=N --layers=0,1,... --dtype=T --topk=N --skew=uniform|zipf|one_hot --seed=N "
    "--requests=N\n\n"
    "How:\n"
    "  --concurrency=N            calls in flight; each answer starts the next (closed loop)\n"
    "  --rate=R                   R calls a second at random moments (open loop); latency counts "
    "from when a\n"
    "                             call was due\n"
    "  --warmup=2s --duration=10s --timeout=30s --max_attempts=1\n\n"
    "What is verified, after the run:\n"
    "  --samples=N   answers that must have the bytes of the same request alone\n"
    "  --check=DIR   they must also agree with a float64 evaluation of the checkpoint in DIR\n\n"
    "  --json        as JSON\n\n"
    "  expertmesh bench --tokens=16 --concurrency=32 --duration=5s\n",
    Run};

}  // namespace expertmesh
