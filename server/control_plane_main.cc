// expertmesh-control-plane: reads the flags; ControlPlane does the rest.

#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "server/control_plane.h"
#include "server/flag_values.h"
#include "server/ops/command_line.h"
#include "server/ops/listen_address.h"
#include "server/ops/logging.h"
#include "server/ops/stop_signals.h"
#include "server/planning/choose_strategy.h"
#include "server/rpc/tls_files.h"
#include "server/server_program.h"

using expertmesh::ByteSize;

ABSL_FLAG(std::string, checkpoint, "",
          "Folder of a checkpoint in Hugging Face format: config.json and safetensors.");
ABSL_FLAG(std::string, model_name, "",
          "What clients call --checkpoint's model; empty: the folder's own name.");
ABSL_FLAG(std::vector<std::string>, model, {},
          "NAME=DIR, or several by commas: other models to serve, or instead of --checkpoint.");
ABSL_FLAG(std::string, architecture, "",
          "Reads checkpoints as this architecture, whatever their config.json says.");
ABSL_FLAG(int32_t, local_ranks, 1, "Expert-parallel ranks inside this process.");
ABSL_FLAG(
    int32_t, ep_size, 0,
    "Expert-parallel ranks that are processes of their own (expertmesh-expert-server), instead "
    "of --local_ranks. With --rank_listen.");
ABSL_FLAG(std::string, rank_listen, "",
          "host:port that expert servers dial: a private address. Port 0: the system chooses.");
ABSL_FLAG(std::string, rank_port_file, "",
          "File to write that port's number to, once it is bound; for port 0.");
ABSL_FLAG(
    std::vector<std::string>, rank_tls_names, {},
    "With --rank_listen and TLS: names (subject alternative names of their certificates) that "
    "expert servers may have. '*': whoever has a certificate of --tls_ca, clients included.");
ABSL_FLAG(absl::Duration, heartbeat_timeout, absl::Seconds(5),
          "An expert server that is silent for longer is lost.");
ABSL_FLAG(std::string, listen, "127.0.0.1:50051",
          "host:port of the public gRPC service. Port 0: the system chooses.");
ABSL_FLAG(std::string, metrics_listen, "127.0.0.1:9464",
          "host:port of Prometheus' GET /metrics. Port 0: the system chooses. Empty: none.");
ABSL_FLAG(int32_t, metrics_top_experts, 32,
          "Experts of each model, the busiest, with a series of their own in /metrics; all others "
          "share one.");
ABSL_FLAG(std::string, port_file, "",
          "File to write the gRPC port's number to, once it is bound; for port 0.");
ABSL_FLAG(std::string, tls_cert, "",
          "PEM file: this server's certificate chain, for clients and ranks. With --tls_key. These "
          "files are read again when they change, for new connections: change them at once, by "
          "renaming a folder or a symbolic link.");
ABSL_FLAG(std::string, tls_key, "", "PEM file: its private key.");
ABSL_FLAG(std::string, tls_ca, "", "PEM file: clients must show a certificate of this authority.");
ABSL_FLAG(int64_t, max_step_tokens, 8192,
          "Tokens of one step: waiting requests are merged up to it, larger ones split.");
ABSL_FLAG(int64_t, max_rank_pairs, 65536,
          "(token, expert) pairs on any one rank in a step; splits steps of skewed routing.");
ABSL_FLAG(ByteSize, max_inflight_bytes, ByteSize{int64_t{1} << 30},
          "Payload of admitted requests, and as much again of answers until their clients have "
          "read them; above it calls get RESOURCE_EXHAUSTED.");
ABSL_FLAG(int64_t, max_inflight_tokens, 1 << 20,
          "Tokens of admitted requests; likewise. One request of more is INVALID_ARGUMENT.");
ABSL_FLAG(
    ByteSize, max_stream_inflight_bytes, ByteSize{int64_t{64} << 20},
    "Messages and answers in flight on one ForwardStream; above it the server stops reading.");
ABSL_FLAG(ByteSize, max_all_streams_inflight_bytes, ByteSize{int64_t{1} << 30},
          "Messages and answers in flight on all ForwardStreams together; above it each may have "
          "one message in flight.");
ABSL_FLAG(ByteSize, max_message_bytes, ByteSize{int64_t{72} << 20},
          "One request message, 4KiB to 2047MiB: 64 MiB of hidden states, and their routing.");
ABSL_FLAG(ByteSize, max_transport_bytes, ByteSize{int64_t{1} << 30},
          "What gRPC itself may hold in buffers: at least --max_message_bytes.");
ABSL_FLAG(absl::Duration, max_deadline, absl::Seconds(60),
          "Deadline of a call that brings none, and the most that one may bring.");
ABSL_FLAG(absl::Duration, step_timeout, absl::Seconds(30),
          "A step that takes longer ends its epoch. At least 1ms.");
ABSL_FLAG(int, lanes, 2,
          "Steps in flight at once over ranks that are processes: while one step's rows are on the "
          "wire another one's experts compute. 1 to 4; no byte of a result depends on it.");
ABSL_FLAG(absl::Duration, keepalive_time, absl::Minutes(1),
          "A connection that is silent for that long is asked for a sign of life.");
ABSL_FLAG(absl::Duration, keepalive_timeout, absl::Seconds(20),
          "A connection that gives none for that long is closed.");
ABSL_FLAG(
    absl::Duration, drain_timeout, absl::Seconds(30),
    "After SIGTERM: time for admitted calls to end. With answers sent and ranks gone the stop "
    "takes at most 2s more. Another signal ends at once, but is ignored for the first "
    "second.");
ABSL_FLAG(
    absl::Duration, drain_delay, absl::ZeroDuration(),
    "After SIGTERM: time for which new connections are still taken, to be told that health is "
    "NOT_SERVING and that new calls are refused (DRAINING). Longer than the interval of whoever "
    "probes health, e.g. 10s under Kubernetes.");
ABSL_FLAG(int, threads, 0, "Threads of all ranks together; 0: one for each core.");
ABSL_FLAG(std::string, isa, "auto", "CPU kernels: auto, portable, avx2, avx512_bf16.");
ABSL_FLAG(std::string, device, "cpu",
          "What --local_ranks compute on: cpu, or cuda:N for the N-th GPU that this process sees.");
ABSL_FLAG(std::string, fp8_weights, "auto",
          "Experts in float8_e4m3 with 128 x 128 block scales: native (kept as they are, rows are "
          "quantized as well; GPUs alone), dequantize (to bfloat16, which takes twice the memory), "
          "or auto: native on a GPU where it can be, else dequantize.");
ABSL_FLAG(std::string, dispatch, "auto",
          "How rows get to their experts: auto, passthrough (one rank), all_to_all, "
          "all_to_all_fixed_capacity, allgather_reducescatter, allgather_reducescatter_monolithic, "
          "direct. No byte of a result depends on it.");
ABSL_FLAG(
    int64_t, max_num_tokens, 64,
    "Slots of all_to_all_fixed_capacity: rows that each rank sends each other one in a step, at "
    "most; splits steps that need more. A step sends as many, used or not, as the power of two "
    "that holds a rank's tokens. A rank's experts take "
    "num_experts * max_num_tokens rows of memory then.");
ABSL_FLAG(bool, allow_dispatch_option, false,
          "Lets requests choose the dispatch strategy (options.dispatch); for debugging.");
ABSL_FLAG(
    bool, allow_admin, false,
    "Serves AdminService (GetStatus, Drain) on the public listener as well: whoever reaches it "
    "may end this server's work.");
ABSL_FLAG(std::string, log_format, "text", "text or json, to standard error.");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning or error.");

namespace expertmesh {
namespace {

constexpr int64_t kMostSlots = int64_t{1} << 16;
constexpr int64_t kMostStepTokens = int64_t{1} << 24;
constexpr absl::Duration kLeastStepTimeout = absl::Milliseconds(1);
constexpr int64_t kMostRankPairs = int64_t{1} << 30;      // rows are counted in 32 bits
constexpr ByteSize kLeastMessage = {int64_t{4} << 10};    // a row of hidden states
constexpr ByteSize kMostMessage = {int64_t{2047} << 20};  // gRPC counts in 31 bits
constexpr int kMaxTopExperts = 4096;
constexpr char kUsage[] =
    "usage: expertmesh-control-plane --checkpoint=DIR [--local_ranks=N | --ep_size=N "
    "--rank_listen=HOST:PORT] [flags]\n"
    "Serves the experts of a Mixture-of-Experts checkpoint over gRPC.\n\nflags:\n";

// A strategy that `ep_size` ranks can run.
absl::StatusOr<DispatchMode> ParseDispatchFlag(const std::string& name, int32_t ep_size) {
  std::string known;
  for (const DispatchMode mode :
       {DispatchMode::kAuto, DispatchMode::kPassthrough, DispatchMode::kAllToAll,
        DispatchMode::kAllToAllFixedCapacity, DispatchMode::kAllGatherReduceScatter,
        DispatchMode::kAllGatherReduceScatterMonolithic, DispatchMode::kDirect}) {
    if (!ChooseStrategy(mode, {.ep_size = ep_size}).ok()) continue;
    if (name == DispatchModeName(mode)) return mode;
    absl::StrAppend(&known, known.empty() ? "" : ", ", DispatchModeName(mode));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--dispatch is '", name, "'; with ", ep_size, " ranks: ", known));
}

// Flags that are right each for itself but not with each other.
absl::Status CheckCombination(const std::vector<std::string>& given) {
  const bool has_local_ranks = absl::GetFlag(FLAGS_ep_size) == 0;
  const bool has_cpu_ranks = absl::GetFlag(FLAGS_device) == "cpu";
  constexpr char kForProcesses[] =
      "it is for ranks that are other processes: --ep_size and --rank_listen";
  if (!has_local_ranks && !has_cpu_ranks) {
    return absl::InvalidArgumentError(
        "--device is of --local_ranks; expert servers have a --device of their own");
  }
  const ByteSize transport = absl::GetFlag(FLAGS_max_transport_bytes);
  const ByteSize message = absl::GetFlag(FLAGS_max_message_bytes);
  // gRPC would close the connections of those who send such messages, and say nothing.
  if (transport.bytes < message.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_transport_bytes is ", AbslUnparseFlag(transport),
                     "; at least --max_message_bytes, which is ", AbslUnparseFlag(message)));
  }
  return CheckFlagsAreUsed(
      given,
      {{"local_ranks", has_local_ranks, "with --ep_size all ranks are other processes"},
       {"threads", has_local_ranks,
        "with --ep_size all ranks are other processes, which have a --threads of their own"},
       {"isa", has_local_ranks,
        "with --ep_size all ranks are other processes, which have an --isa of their own"},
       {"isa", has_cpu_ranks, "it is for --device=cpu"},
       {"fp8_weights", has_local_ranks,
        "with --ep_size all ranks are other processes, which have a --fp8_weights of their own"},
       {"lanes", !has_local_ranks, kForProcesses},
       {"heartbeat_timeout", !has_local_ranks, kForProcesses},
       {"rank_port_file", !has_local_ranks, kForProcesses},
       {"rank_tls_names", !has_local_ranks, kForProcesses},
       {"model_name", !absl::GetFlag(FLAGS_checkpoint).empty(), "it is for --checkpoint's model"},
       {"metrics_top_experts", !absl::GetFlag(FLAGS_metrics_listen).empty(),
        "--metrics_listen is empty"}});
}

// Once; everything that is wrong with a flag is found here. `given`: CommandLine::flags.
absl::StatusOr<ControlPlaneOptions> ReadFlags(const std::vector<std::string>& given) {
  ControlPlaneOptions options;
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> models = ParseModelFlags(
      absl::GetFlag(FLAGS_checkpoint), absl::GetFlag(FLAGS_model_name), absl::GetFlag(FLAGS_model));
  if (!models.ok()) return models.status();
  options.models = *std::move(models);
  for (const absl::Status& status :
       {CheckPositive("local_ranks", absl::GetFlag(FLAGS_local_ranks)),
        CheckPositive("max_step_tokens", absl::GetFlag(FLAGS_max_step_tokens)),
        CheckAtMost("max_step_tokens", absl::GetFlag(FLAGS_max_step_tokens), kMostStepTokens),
        CheckPositive("max_rank_pairs", absl::GetFlag(FLAGS_max_rank_pairs)),
        CheckAtMost("max_rank_pairs", absl::GetFlag(FLAGS_max_rank_pairs), kMostRankPairs),
        CheckPositive("max_num_tokens", absl::GetFlag(FLAGS_max_num_tokens)),
        CheckAtMost("max_num_tokens", absl::GetFlag(FLAGS_max_num_tokens), kMostSlots),
        CheckPositive("max_inflight_bytes", absl::GetFlag(FLAGS_max_inflight_bytes).bytes),
        CheckPositive("max_inflight_tokens", absl::GetFlag(FLAGS_max_inflight_tokens)),
        CheckPositive("max_stream_inflight_bytes",
                      absl::GetFlag(FLAGS_max_stream_inflight_bytes).bytes),
        CheckPositive("max_all_streams_inflight_bytes",
                      absl::GetFlag(FLAGS_max_all_streams_inflight_bytes).bytes),
        CheckBetween("max_message_bytes", absl::GetFlag(FLAGS_max_message_bytes), kLeastMessage,
                     kMostMessage),
        CheckPositive("max_deadline", absl::GetFlag(FLAGS_max_deadline)),
        CheckPositive("heartbeat_timeout", absl::GetFlag(FLAGS_heartbeat_timeout)),
        CheckAtLeast("step_timeout", absl::GetFlag(FLAGS_step_timeout), kLeastStepTimeout),
        CheckPositive("lanes", absl::GetFlag(FLAGS_lanes)),
        CheckAtMost("lanes", absl::GetFlag(FLAGS_lanes), kMaxLanes),
        CheckPositive("keepalive_time", absl::GetFlag(FLAGS_keepalive_time)),
        CheckPositive("keepalive_timeout", absl::GetFlag(FLAGS_keepalive_timeout)),
        CheckNotNegative("drain_timeout", absl::GetFlag(FLAGS_drain_timeout)),
        CheckNotNegative("drain_delay", absl::GetFlag(FLAGS_drain_delay)),
        CheckAtMost("local_ranks", absl::GetFlag(FLAGS_local_ranks), kMaxLocalRanks),
        CheckPositive("metrics_top_experts", absl::GetFlag(FLAGS_metrics_top_experts)),
        CheckAtMost("metrics_top_experts", absl::GetFlag(FLAGS_metrics_top_experts),
                    kMaxTopExperts),
        CheckThreads(absl::GetFlag(FLAGS_threads)),
        CheckGrpcListenFlag("listen", absl::GetFlag(FLAGS_listen)),
        absl::GetFlag(FLAGS_rank_listen).empty()
            ? absl::OkStatus()
            : CheckGrpcListenFlag("rank_listen", absl::GetFlag(FLAGS_rank_listen)),
        absl::GetFlag(FLAGS_metrics_listen).empty()
            ? absl::OkStatus()
            : CheckListenAddress("metrics_listen", absl::GetFlag(FLAGS_metrics_listen))}) {
    if (!status.ok()) return status;
  }
  options.ranks.ep_size = absl::GetFlag(FLAGS_ep_size);
  options.ranks.heartbeat_timeout = absl::GetFlag(FLAGS_heartbeat_timeout);
  options.ranks.step_timeout = absl::GetFlag(FLAGS_step_timeout);
  options.rank_listen = absl::GetFlag(FLAGS_rank_listen);
  options.rank_port_file = absl::GetFlag(FLAGS_rank_port_file);
  options.rank_tls_names = absl::GetFlag(FLAGS_rank_tls_names);
  if ((options.ranks.ep_size > 0) == options.rank_listen.empty() || options.ranks.ep_size < 0) {
    return absl::InvalidArgumentError(
        "--ep_size (at least 1) and --rank_listen go together: ranks that are other processes");
  }
  if (!options.rank_tls_names.empty() && absl::GetFlag(FLAGS_tls_ca).empty()) {
    return absl::InvalidArgumentError("--rank_tls_names needs --tls_ca");
  }
  // Else every client could join as a rank and answer the other clients' calls.
  if (!options.rank_listen.empty() && !absl::GetFlag(FLAGS_tls_cert).empty() &&
      options.rank_tls_names.empty()) {
    return absl::InvalidArgumentError(
        "--rank_listen with --tls_cert needs --tls_ca and --rank_tls_names, the names on the "
        "certificates of expert servers ('*': any certificate of --tls_ca)");
  }
  if (absl::Status status = CheckCombination(given); !status.ok()) return status;
  absl::StatusOr<std::optional<CpuIsa>> isa = ParseIsaFlag(absl::GetFlag(FLAGS_isa));
  if (!isa.ok()) return isa.status();
  options.group.num_ranks = absl::GetFlag(FLAGS_local_ranks);
  options.group.num_threads = absl::GetFlag(FLAGS_threads);
  options.group.isa = *isa;
  absl::StatusOr<Fp8Weights> fp8_weights = ParseFp8WeightsFlag(
      absl::GetFlag(FLAGS_fp8_weights), /*on_gpu=*/absl::GetFlag(FLAGS_device) != "cpu");
  if (!fp8_weights.ok()) return fp8_weights.status();
  options.fp8_weights = *fp8_weights;
  absl::StatusOr<DispatchMode> dispatch = ParseDispatchFlag(
      absl::GetFlag(FLAGS_dispatch),
      options.ranks.ep_size > 0 ? options.ranks.ep_size : options.group.num_ranks);
  if (!dispatch.ok()) return dispatch.status();
  options.dispatch = *dispatch;

  options.controller.limits.max_bytes_in_flight = absl::GetFlag(FLAGS_max_inflight_bytes).bytes;
  options.controller.limits.max_tokens_in_flight = absl::GetFlag(FLAGS_max_inflight_tokens);
  options.controller.max_step_tokens = absl::GetFlag(FLAGS_max_step_tokens);
  options.controller.max_rank_pairs = absl::GetFlag(FLAGS_max_rank_pairs);
  options.controller.max_num_tokens = absl::GetFlag(FLAGS_max_num_tokens);
  options.controller.max_deadline = absl::GetFlag(FLAGS_max_deadline);
  options.controller.step_timeout = absl::GetFlag(FLAGS_step_timeout);
  options.controller.lanes = absl::GetFlag(FLAGS_lanes);

  options.server.listen = absl::GetFlag(FLAGS_listen);
  options.server.max_message_bytes = absl::GetFlag(FLAGS_max_message_bytes).bytes;
  options.server.max_transport_bytes = absl::GetFlag(FLAGS_max_transport_bytes).bytes;
  options.server.keepalive_time = absl::GetFlag(FLAGS_keepalive_time);
  options.server.keepalive_timeout = absl::GetFlag(FLAGS_keepalive_timeout);
  options.streams.max_stream_bytes = absl::GetFlag(FLAGS_max_stream_inflight_bytes).bytes;
  options.streams.max_all_bytes = absl::GetFlag(FLAGS_max_all_streams_inflight_bytes).bytes;
  options.architecture = absl::GetFlag(FLAGS_architecture);
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  options.metrics_top_experts = static_cast<size_t>(absl::GetFlag(FLAGS_metrics_top_experts));
  options.port_file = absl::GetFlag(FLAGS_port_file);
  options.drain_timeout = absl::GetFlag(FLAGS_drain_timeout);
  options.drain_delay = absl::GetFlag(FLAGS_drain_delay);
  options.allow_dispatch_option = absl::GetFlag(FLAGS_allow_dispatch_option);
  options.allow_admin = absl::GetFlag(FLAGS_allow_admin);
  options.progress_on_terminal =
      isatty(STDERR_FILENO) != 0 && absl::GetFlag(FLAGS_log_format) == "text";
  options.tls = {absl::GetFlag(FLAGS_tls_cert), absl::GetFlag(FLAGS_tls_key),
                 absl::GetFlag(FLAGS_tls_ca)};
  const absl::StatusOr<TlsTexts> tls = ReadTlsFiles(options.tls);
  if (!tls.ok()) return tls.status();
  if (absl::Status status = CheckServerTls(*tls); !status.ok()) return status;
  return options;
}

int Run(const std::vector<std::string>& args) {
  const ServerProgram program("expertmesh-control-plane", kUsage, "control_plane_main.cc");
  std::vector<std::string> given;
  if (const std::optional<int> exit_code = program.ReadCommandLine(args, &given)) return *exit_code;
  const absl::StatusOr<LoggingOptions> logging =
      ServerProgram::ParseLogFlags(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format));
  if (!logging.ok()) return program.UsageError(logging.status());
  absl::StatusOr<ControlPlaneOptions> options = ReadFlags(given);
  if (!options.ok()) return program.UsageError(options.status());

  absl::StatusOr<std::shared_ptr<CudaDevice>> device = OpenDeviceFlag(absl::GetFlag(FLAGS_device));
  if (!device.ok()) return program.StartError(device.status());
  options->group.device = *std::move(device);

  InitLogging(*logging);
  WarnOfSlowDevice(options->group.device.get());
  ControlPlane control_plane(*std::move(options));
  const StopSignals signals(
      [&control_plane](int signal_number) {
        LogInfo("stop asked for; another signal ends it at once, ignored for the first second",
                {{"signal", signal_number}});
        control_plane.Stop();
      },
      [&control_plane](int signal_number) {
        const int64_t num_lost = control_plane.num_open_calls();
        LogWarning(num_lost > 0 ? "ending at once; open calls are lost" : "ending at once",
                   {{"signal", signal_number}, {"open_calls", num_lost}});
      });
  const absl::Status status = control_plane.Start();
  if (!status.ok()) {
    LogError(absl::StrCat("cannot start: ", status.message()));
    return ServerProgram::kExitFailure;
  }
  control_plane.WaitForStopAndDrain();
  return 0;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) {
  return expertmesh::ServerProgram::Main(argc, argv, expertmesh::Run);
}
