#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>
#include <memory>
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
#include "client/cli/bench_report.h"
#include "client/cli/bench_run.h"
#include "client/cli/command.h"
#include "client/cli/connection_flags.h"
#include "client/cli/flag_error.h"
#include "client/cli/json_output.h"
#include "client/cli/reference_check.h"
#include "client/cli/wire_dtype.h"
#include "kernels/base/steady_now.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/ops/command_line.h"

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
ABSL_FLAG(double, rate, 0,
          "bench: calls per second at random moments (open loop); without it: closed loop");
ABSL_FLAG(absl::Duration, warmup, absl::Seconds(2),
          "bench: time before measuring, e.g. 500ms or 2s");
ABSL_FLAG(absl::Duration, duration, absl::Seconds(10),
          "bench: time of measuring, e.g. 500ms, 10s or 2m");
ABSL_FLAG(int, requests, 64, "bench: different requests, used again and again");
ABSL_FLAG(int, samples, 16, "bench: answers to verify");

namespace expertmesh {
namespace {

// More calls in flight than any one client process should hold; beyond it, sending them takes
// longer than measuring.
constexpr int kMaxConcurrency = 16384;

bool SameServer(const v1::ServedBy& a, const v1::ServedBy& b) {
  return a.fingerprint() == b.fingerprint() &&
         a.placement_fingerprint() == b.placement_fingerprint() &&
         a.instruction_set() == b.instruction_set() && a.weight_dtype() == b.weight_dtype();
}

// Takes each Ctrl-C for an event that the main thread learns of, as long as it lives; one such at a
// time. By a handler and not by blocking the signal: gRPC makes threads when it likes, whose mask
// nobody controls, and before there are figures to lose Ctrl-C shall end the program.
class CtrlC {
 public:
  CtrlC() = default;
  // The event stays open: the handler may run on another thread still.
  ~CtrlC() {
    if (event_.load() >= 0) sigaction(SIGINT, &before_, nullptr);
  }
  CtrlC(const CtrlC&) = delete;
  CtrlC& operator=(const CtrlC&) = delete;

  // Once, before the others.
  absl::Status Catch() {
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_.load() < 0) return absl::ErrnoToStatus(errno, "eventfd");
    struct sigaction action = {};
    action.sa_handler = &CtrlC::Handle;
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, &before_);
    // In this thread, whatever mask the program was started with.
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGINT);
    pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);
    return absl::OkStatus();
  }

  // True: it came, within `duration` or since the last time that this was true.
  bool Sleep(absl::Duration duration) {
    const absl::Time end = SteadyNow() + duration;
    while (true) {
      const absl::Duration left =
          std::clamp(end - SteadyNow(), absl::ZeroDuration(), absl::Hours(1));
      const timespec time = absl::ToTimespec(left);
      pollfd event = {event_.load(), POLLIN, 0};
      if (ppoll(&event, 1, &time, nullptr) > 0) {
        uint64_t count = 0;
        return read(event.fd, &count, sizeof(count)) == sizeof(count);
      }
      if (SteadyNow() >= end) return false;
    }
  }
  bool Came() { return Sleep(absl::ZeroDuration()); }

  // Ends the program as Ctrl-C does, without destructors that would wait for calls in flight.
  [[noreturn]] static void EndProgram() {
    fflush(nullptr);
    signal(SIGINT, SIG_DFL);
    raise(SIGINT);
    _exit(128 + SIGINT);
  }

 private:
  static void Handle(int /*signal*/) {
    const int saved = errno;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_.load(), &one, sizeof(one));
    errno = saved;
  }

  static inline std::atomic<int> event_{-1};
  struct sigaction before_ = {};
};

// As ExpertClient::Forward. CANCELLED: Ctrl-C came first, and the call goes on.
absl::StatusOr<ForwardOutput> ForwardUnlessCtrlC(ExpertClient& client, const ForwardInput& input,
                                                 CtrlC& ctrl_c) {
  constexpr auto kPoll = std::chrono::milliseconds(50);
  const auto answer = std::make_shared<std::promise<absl::StatusOr<ForwardOutput>>>();
  std::future<absl::StatusOr<ForwardOutput>> future = answer->get_future();
  client.ForwardAsync(
      input, CallOptionsFromFlags(),
      [answer](absl::StatusOr<ForwardOutput> result) { answer->set_value(std::move(result)); });
  while (future.wait_for(kPoll) != std::future_status::ready) {
    if (ctrl_c.Came()) return absl::CancelledError("interrupted");
  }
  return future.get();
}

absl::StatusOr<BenchVerification> Verify(ExpertClient& client,
                                         const std::vector<std::unique_ptr<ForwardJob>>& load,
                                         const std::vector<BenchSample>& samples,
                                         const WeightSource* weights, CtrlC& ctrl_c) {
  BenchVerification result;
  for (const BenchSample& sample : samples) {
    if (ctrl_c.Came()) return absl::CancelledError("interrupted");
    const ForwardJob& job = *load[sample.request];
    const absl::StatusOr<ForwardOutput> alone = ForwardUnlessCtrlC(client, job.input, ctrl_c);
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

std::string Shape(const v1::GetModelResponse& model, const BenchLoadOptions& load,
                  const BenchRunOptions& run) {
  const std::string loop =
      run.rate > 0 ? absl::StrFormat("open loop at %.6g calls/s", run.rate)
                   : absl::StrFormat("closed loop, %d calls in flight", run.concurrency);
  return absl::StrFormat("%s: %d tokens a call, hidden size %d, %s, %s routing, %s", model.model(),
                         load.tokens_per_call, model.hidden_size(),
                         std::string(DTypeName(load.dtype)), absl::GetFlag(FLAGS_skew), loop);
}

absl::Status AtLeast(const char* flag, double value, double least) {
  if (value >= least) return absl::OkStatus();
  return FlagError(
      absl::StrCat("--", flag, " is ", value, "; it takes a number from ", least, " on"));
}

// load.dtype stays kInvalid where it is to be the model's own.
absl::Status ReadFlags(const std::vector<std::string>& given, BenchLoadOptions& load,
                       BenchRunOptions& run) {
  for (const std::string& layer : absl::GetFlag(FLAGS_layers)) {
    int32_t index = 0;
    if (!absl::SimpleAtoi(layer, &index)) {
      return FlagError(
          absl::StrCat("--layers: '", layer, "' is no number; it takes numbers by commas: 0,1,2"));
    }
    load.layers.push_back(index);
  }
  load.tokens_per_call = absl::GetFlag(FLAGS_tokens);
  load.topk = absl::GetFlag(FLAGS_topk);
  load.seed = absl::GetFlag(FLAGS_seed);
  load.num_requests = absl::GetFlag(FLAGS_requests);
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  load.dtype = DTypeFromName(dtype).value_or(DType::kInvalid);
  if (!dtype.empty() && !IsActivationDType(load.dtype)) {
    return FlagError(
        absl::StrCat("--dtype is '", dtype, "'; it takes float32, float16 or bfloat16"));
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
  absl::Status status = AtLeast("tokens", static_cast<double>(load.tokens_per_call), 1);
  status.Update(AtLeast("requests", load.num_requests, 1));
  status.Update(AtLeast("topk", load.topk, 0));
  status.Update(AtLeast("samples", run.num_samples, 0));
  status.Update(AtLeast("concurrency", run.concurrency, 1));
  if (!status.ok()) return status;
  const bool is_open_loop = std::find(given.begin(), given.end(), "rate") != given.end();
  if (is_open_loop && !(run.rate > 0 && std::isfinite(run.rate))) {
    return FlagError(absl::StrCat("--rate is ", run.rate,
                                  "; it takes a number of calls a second above 0; without it "
                                  "--concurrency says how many calls are in flight"));
  }
  status = FlagErrorOf(CheckFlagsAreUsed(
      given, {{"concurrency", !is_open_loop, "with --rate calls start at random moments"},
              {"check", run.num_samples > 0, "with --samples=0 no answer is verified"}}));
  if (!status.ok()) return status;
  if (run.concurrency > kMaxConcurrency) {
    return FlagError(absl::StrCat("--concurrency is ", run.concurrency, "; at most ",
                                  kMaxConcurrency, " calls in flight"));
  }
  if (run.duration <= absl::ZeroDuration() || run.duration == absl::InfiniteDuration() ||
      run.warmup < absl::ZeroDuration() || run.warmup == absl::InfiniteDuration()) {
    return FlagError(absl::StrCat("--duration is ", absl::FormatDuration(run.duration),
                                  ", --warmup ", absl::FormatDuration(run.warmup),
                                  "; they take times such as 10s, --duration above 0"));
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

absl::Status Run(const std::vector<std::string>& given) {
  BenchLoadOptions load_options;
  BenchRunOptions run_options;
  if (absl::Status status = ReadFlags(given, load_options, run_options); !status.ok())
    return status;
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ClientFromFlags();
  if (!client.ok()) return client.status();
  const absl::StatusOr<v1::GetModelResponse> model =
      (*client)->GetModel(absl::GetFlag(FLAGS_model), CallOptionsFromFlags());
  if (!model.ok()) return model.status();
  if (load_options.dtype == DType::kInvalid) {
    load_options.dtype = MemoryDType(model->activation_dtype());
  }
  if (!IsActivationDType(load_options.dtype)) {
    return absl::InvalidArgumentError(
        "this client cannot draw rows of the model's own activation dtype; name one with --dtype");
  }
  std::unique_ptr<CheckpointWeightSource> weights;
  if (const std::string directory = absl::GetFlag(FLAGS_check); !directory.empty()) {
    auto opened = OpenServedCheckpoint(directory, *model);
    if (!opened.ok()) return opened.status();
    weights = *std::move(opened);
  }
  const auto load = MakeBenchLoad(*model, load_options);
  if (!load.ok()) return load.status();
  if (!JsonWanted()) {
    printf("%s\n", Shape(*model, load_options, run_options).c_str());
    fflush(stdout);
  }
  BenchReport report{model->model(), model->hidden_size(), absl::GetFlag(FLAGS_skew), load_options,
                     run_options};
  BenchProgressLine line(run_options.call.timeout);
  CtrlC ctrl_c;
  if (absl::Status status = ctrl_c.Catch(); !status.ok()) return status;
  report.result = RunBench(
      **client, *load, run_options, [&](const BenchProgress& progress) { line.Show(progress); },
      [&](absl::Duration duration) { return ctrl_c.Sleep(duration); });
  if (report.result.interrupted) {
    report.verification = absl::CancelledError("interrupted");
  } else {
    line.Draw(absl::StrCat("verifying ", report.result.samples.size(), " answers"));
    report.verification = Verify(**client, *load, report.result.samples, weights.get(), ctrl_c);
  }
  line.Erase();
  if (JsonWanted()) {
    PrintBenchJson(report);
  } else {
    PrintBenchText(report);
  }
  if (absl::IsCancelled(report.verification.status())) CtrlC::EndProgram();
  if (report.result.summary.num_ok == 0) return NothingAnswered(report.result);
  if (!report.verification.ok()) return report.verification.status();
  if (!report.verification->ok())
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
    "  --concurrency=N            calls in flight; each answer starts the next, an error after a "
    "pause\n"
    "  --rate=R                   R calls a second at random moments (open loop); latency counts "
    "from when a\n"
    "                             call was due\n"
    "  --warmup=2s --duration=10s\n"
    "  --max_attempts=N           1 counts each refusal as an error; above it (4 by default) calls "
    "are\n"
    "                             retried as clients do, and that is part of their latency\n"
    "  Ctrl-C ends the measuring early and tells what was seen; another one ends the waiting for "
    "calls\n"
    "                             and the verification\n\n"
    "What is verified, after the run:\n"
    "  --samples=N   answers that must have the bytes of the same request alone\n"
    "  --check=DIR   they must also agree with a float64 evaluation of the checkpoint in DIR\n\n"
    "  --json        as JSON\n\n"
    "  expertmesh bench --tokens=16 --concurrency=32 --duration=5s\n",
    "bench_command.cc json_output.cc connection_flags.cc model dtype check tokens topk seed", Run};

}  // namespace expertmesh
