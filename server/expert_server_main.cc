// expertmesh-expert-server: reads the flags; ExpertServer does the rest.

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "server/comm/nccl_functions.h"
#include "server/comm/network_interface.h"
#include "server/comm/socket_address.h"
#include "server/expert_server.h"
#include "server/flag_values.h"
#include "server/ops/command_line.h"
#include "server/ops/listen_address.h"
#include "server/ops/logging.h"
#include "server/ops/stop_signals.h"
#include "server/server_program.h"

ABSL_FLAG(std::string, control_plane, "", "host:port of the control plane's --rank_listen.");
ABSL_FLAG(int32_t, ep_rank, -1, "This rank's number, from 0.");
ABSL_FLAG(int32_t, ep_size, 0, "Ranks in the group: the control plane's --ep_size.");
ABSL_FLAG(std::string, checkpoint, "",
          "Folder of a checkpoint in Hugging Face format: config.json and safetensors.");
ABSL_FLAG(std::string, model_name, "",
          "What clients call --checkpoint's model; empty: the folder's own name.");
ABSL_FLAG(std::vector<std::string>, model, {},
          "NAME=DIR, or several by commas: the same models as the control plane's.");
ABSL_FLAG(std::string, architecture, "",
          "Reads checkpoints as this architecture, whatever their config.json says.");
ABSL_FLAG(
    std::string, listen, "127.0.0.1",
    "Numeric address of this machine that the other ranks connect to: a private one, since what "
    "ranks exchange is not encrypted.");
ABSL_FLAG(std::string, advertise_address, "",
          "Numeric address at which the other ranks reach --listen, where they know it by another; "
          "empty: --listen.");
ABSL_FLAG(absl::Duration, join_timeout, absl::Seconds(60),
          "For how long the control plane may not answer before this process gives up.");
ABSL_FLAG(int, threads, 0, "Threads of this rank; 0: one for each core.");
ABSL_FLAG(std::string, isa, "auto", "CPU kernels: auto, portable, avx2, avx512_bf16.");
ABSL_FLAG(std::string, device, "cpu",
          "What computes: cpu, or cuda:N for the N-th GPU that this process sees.");
ABSL_FLAG(std::string, fp8_weights, "auto",
          "Experts in float8_e4m3 with 128 x 128 block scales: native (kept as they are, rows are "
          "quantized as well; GPUs alone), dequantize (to bfloat16, which takes twice the memory), "
          "or auto: native on a GPU where it can be, else dequantize.");
ABSL_FLAG(std::string, nccl_library, "",
          "With --device=cuda:N and several ranks: the file of NCCL's library. Empty: libnccl.so.2 "
          "where the loader finds it, else where deploy/install_deps.sh puts it.");
ABSL_FLAG(
    std::string, tls_cert, "",
    "PEM file: this rank's certificate chain. With --tls_key and --tls_ca. All three are read "
    "again when they change, for new connections.");
ABSL_FLAG(std::string, tls_key, "", "PEM file: its private key.");
ABSL_FLAG(std::string, tls_ca, "",
          "PEM file: TLS; the control plane must show a certificate of this authority.");
ABSL_FLAG(std::string, log_format, "text", "text or json, to standard error.");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning or error.");

namespace expertmesh {
namespace {

constexpr char kUsage[] =
    "usage: expertmesh-expert-server --control_plane=HOST:PORT --ep_rank=R --ep_size=N "
    "--checkpoint=DIR [flags]\n"
    "One rank of a group: holds its share of the experts and runs their part of every step.\n\n"
    "flags:\n";

// Found out here rather than when the weights are loaded.
absl::Status CheckRankAddresses(const ExpertServerOptions& options) {
  const auto check = [](const char* flag, const std::string& address) {
    const absl::Status status = SocketAddress::Parse(address, 0).status();
    if (status.ok()) return status;
    return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", status.message()));
  };
  absl::Status status = check("listen", options.bind_address);
  if (!options.advertise_address.empty()) {
    status.Update(check("advertise_address", options.advertise_address));
  }
  return status;
}

// Once; everything that is wrong with a flag is found here. `given`: CommandLine::flags.
absl::StatusOr<ExpertServerOptions> ReadFlags(const std::vector<std::string>& given) {
  ExpertServerOptions options;
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> models = ParseModelFlags(
      absl::GetFlag(FLAGS_checkpoint), absl::GetFlag(FLAGS_model_name), absl::GetFlag(FLAGS_model));
  if (!models.ok()) return models.status();
  options.models = *std::move(models);
  options.architecture = absl::GetFlag(FLAGS_architecture);
  options.control_plane = absl::GetFlag(FLAGS_control_plane);
  if (options.control_plane.empty()) {
    return absl::InvalidArgumentError("--control_plane is missing");
  }
  if (absl::Status status = CheckCallAddress("control_plane", options.control_plane);
      !status.ok()) {
    return status;
  }
  options.ep_rank = absl::GetFlag(FLAGS_ep_rank);
  options.ep_size = absl::GetFlag(FLAGS_ep_size);
  if (options.ep_size < 1 || options.ep_rank < 0 || options.ep_rank >= options.ep_size) {
    return absl::InvalidArgumentError(absl::StrCat("--ep_rank is ", options.ep_rank, ", --ep_size ",
                                                   options.ep_size, "; 0 <= ep_rank < ep_size"));
  }
  options.bind_address = absl::GetFlag(FLAGS_listen);
  options.advertise_address = absl::GetFlag(FLAGS_advertise_address);
  if (absl::Status status = CheckRankAddresses(options); !status.ok()) return status;
  options.join_timeout = absl::GetFlag(FLAGS_join_timeout);
  if (absl::Status status = CheckPositive("join_timeout", options.join_timeout); !status.ok()) {
    return status;
  }
  options.num_threads = absl::GetFlag(FLAGS_threads);
  if (absl::Status status = CheckThreads(options.num_threads); !status.ok()) return status;
  const absl::StatusOr<std::optional<CpuIsa>> isa = ParseIsaFlag(absl::GetFlag(FLAGS_isa));
  if (!isa.ok()) return isa.status();
  options.isa = *isa;
  options.nccl_library = absl::GetFlag(FLAGS_nccl_library);
  const bool is_cpu = absl::GetFlag(FLAGS_device) == "cpu";
  const absl::StatusOr<Fp8Weights> fp8_weights =
      ParseFp8WeightsFlag(absl::GetFlag(FLAGS_fp8_weights), /*on_gpu=*/!is_cpu);
  if (!fp8_weights.ok()) return fp8_weights.status();
  options.fp8_weights = *fp8_weights;
  if (absl::Status status =
          CheckFlagsAreUsed(given, {{"isa", is_cpu, "it is for --device=cpu"},
                                    {"nccl_library", !is_cpu, "it is for GPUs, --device=cuda:N"},
                                    {"model_name", !absl::GetFlag(FLAGS_checkpoint).empty(),
                                     "it is for --checkpoint's model"}});
      !status.ok()) {
    return status;
  }
  options.progress_on_terminal =
      isatty(STDERR_FILENO) != 0 && absl::GetFlag(FLAGS_log_format) == "text";
  options.tls = {absl::GetFlag(FLAGS_tls_cert), absl::GetFlag(FLAGS_tls_key),
                 absl::GetFlag(FLAGS_tls_ca)};
  const absl::StatusOr<TlsTexts> tls = ReadTlsFiles(options.tls);
  if (!tls.ok()) return tls.status();
  if (absl::Status status = CheckChannelTls(*tls); !status.ok()) return status;
  return options;
}

// NCCL takes no address for its own sockets: without this it would take any network that it finds.
// And it would connect what a collective of a size needs when one of that size first comes, in a
// client's call.
// Before there are threads, which might be reading the environment.
absl::Status BindNccl(const std::string& bind_address) {
  const absl::StatusOr<std::string> interface = InterfaceOfAddress(bind_address);
  if (!interface.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--listen: ", interface.status().message()));
  }
  // Whoever has set it knows better. "=": this very name.
  setenv("NCCL_SOCKET_IFNAME", absl::StrCat("=", *interface).c_str(), /*replace=*/0);
  setenv("NCCL_RUNTIME_CONNECT", "0", /*replace=*/0);
  return absl::OkStatus();
}

int Run(const std::vector<std::string>& args) {
  const ServerProgram program("expertmesh-expert-server", kUsage, "expert_server_main.cc");
  std::vector<std::string> given;
  if (const std::optional<int> exit_code = program.ReadCommandLine(args, &given)) return *exit_code;
  const absl::StatusOr<LoggingOptions> logging =
      ServerProgram::ParseLogFlags(absl::GetFlag(FLAGS_log_level), absl::GetFlag(FLAGS_log_format));
  if (!logging.ok()) return program.UsageError(logging.status());
  absl::StatusOr<ExpertServerOptions> options = ReadFlags(given);
  if (!options.ok()) return program.UsageError(options.status());

  if (absl::GetFlag(FLAGS_device) != "cpu") {
    if (absl::Status status = BindNccl(options->bind_address); !status.ok()) {
      return program.UsageError(status);
    }
  }
  CudaDeviceOptions device_options;
  if (options->ep_size > 1) device_options.reserved_multiprocessors = kNcclMultiprocessors;
  absl::StatusOr<std::shared_ptr<CudaDevice>> device =
      OpenDeviceFlag(absl::GetFlag(FLAGS_device), device_options);
  if (!device.ok()) return program.StartError(device.status());
  options->device = *std::move(device);

  InitLogging(*logging);
  WarnOfSlowDevice(options->device.get());
  ExpertServer server(*std::move(options));
  const StopSignals signals([&server](int signal_number) {
    LogInfo("stop asked for; another signal ends it at once, ignored for the first second",
            {{"signal", signal_number}});
    server.Stop();
  });
  if (const absl::Status status = server.Load(); !status.ok()) {
    LogError(absl::StrCat("cannot start: ", status.message()));
    return ServerProgram::kExitFailure;
  }
  if (const absl::Status status = server.Run(); !status.ok()) {
    LogError(std::string(status.message()));
    return ServerProgram::kExitFailure;
  }
  LogInfo("stopped");
  return 0;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) {
  return expertmesh::ServerProgram::Main(argc, argv, expertmesh::Run);
}
