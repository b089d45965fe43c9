#include "server/expert_server.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "server/checkpoints.h"
#include "server/cluster/memory_need.h"
#include "server/comm/socket_address.h"
#include "server/cuda_support.h"
#include "server/model/placement.h"
#include "server/ops/logging.h"
#include "server/rank/rank_backend.h"
#include "server/rank/rank_engine.h"
#include "server/rpc/expert_rank.h"
#include "server/rpc/rank_announcer.h"
#include "server/rpc/tls_credentials.h"
#include "server/rpc/tls_watch.h"

namespace expertmesh {

struct ExpertServer::Impl {
  explicit Impl(ExpertServerOptions o) : options(std::move(o)) {}

  absl::Status MakeEngine();
  // What moves rows among GPUs.
  absl::Status OpenNccl();
  // Memory for weights, on the host or on the device.
  absl::StatusOr<int64_t> Available() const;
  absl::Status LoadExperts(const std::vector<ServedModel>& models);
  // Places the layers and says what the rank will hold; sets `taken`.
  absl::StatusOr<int64_t> Plan(const std::vector<ServedModel>& models);

  const ExpertServerOptions options;
  std::shared_ptr<TlsWatch> tls;
  RankLink link;
  std::map<std::string, std::map<int32_t, Placement>> placements;
  ExpertRankOptions rank_options;
  int64_t taken = 0;  // of the memory, by what Plan says
  std::unique_ptr<RankEngine> engine;
  std::unique_ptr<ExpertRank> rank;

  std::mutex mutex;
  bool is_loaded = false;
};

ExpertServer::ExpertServer(ExpertServerOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

ExpertServer::~ExpertServer() = default;

absl::Status ExpertServer::Impl::MakeEngine() {
  absl::StatusOr<std::unique_ptr<RankBackend>> backend = NewRankBackend(
      {.device = options.device, .isa = options.isa, .num_threads = options.num_threads});
  if (!backend.ok()) return backend.status();
  if (options.device != nullptr) {
    if (absl::Status status = OpenNccl(); !status.ok()) return status;
  }
  RankEngineOptions engine_options;
  engine_options.ep_rank = options.ep_rank;
  engine_options.ep_size = options.ep_size;
  engine_options.backend = *std::move(backend);
  engine = std::make_unique<RankEngine>(std::move(engine_options));
  return absl::OkStatus();
}

absl::Status ExpertServer::Impl::OpenNccl() {
  // A rank without peers needs none, but may be asked to try it.
  if (options.ep_size == 1 && options.nccl_library.empty()) return absl::OkStatus();
  absl::StatusOr<std::shared_ptr<NcclFunctions>> nccl = OpenNcclOfThisBuild(options.nccl_library);
  if (!nccl.ok()) {
    return absl::Status(nccl.status().code(),
                        absl::StrCat("--nccl_library: ", nccl.status().message()));
  }
  LogInfo("ranks exchange rows by NCCL", {{"library", (*nccl)->Describe()}});
  rank_options.nccl.functions = *std::move(nccl);
  rank_options.nccl.device_index = options.device->index();
  rank_options.nccl.on_stuck_abort = [](const absl::Status& status) {
    LogError("NCCL does not come back: this process ends, for its GPU may still write anywhere",
             {{"why", status.message()}});
    std::_Exit(1);
  };
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ExpertServer::Impl::Available() const {
  const std::optional<int64_t> on_device = engine->backend().device_free_bytes();
  if (on_device.has_value()) return *on_device;
  return AvailableMemoryBytes();
}

absl::StatusOr<int64_t> ExpertServer::Impl::Plan(const std::vector<ServedModel>& models) {
  int64_t need = 0;
  for (const ServedModel& model : models) {
    const int64_t need_of_others = need;
    ModelManifest& manifest = rank_options.models.emplace_back();
    manifest.model = model.spec.name;
    manifest.fingerprint = model.spec.fingerprint;
    manifest.weight_dtype = model.spec.weight_dtype;
    rank_options.hidden_sizes[model.spec.name] = model.spec.hidden_size;
    for (const LayerSpec& layer : model.spec.layers) {
      absl::StatusOr<Placement> placement =
          Placement::Contiguous(layer.num_experts, options.ep_size);
      if (!placement.ok()) return placement.status();
      const absl::Span<const int32_t> held = placement->local_experts(options.ep_rank);
      manifest.layers.push_back({layer.index, layer.num_experts, {held.begin(), held.end()}});
      absl::StatusOr<int64_t> bytes =
          PackedLayerBytes(model.spec, layer, *placement, options.ep_rank);
      if (!bytes.ok()) return bytes.status();
      const std::optional<int64_t> sum = CheckedAdd(need, *bytes);
      if (!sum) return absl::OutOfRangeError("the experts fit no memory");
      need = *sum;
      bytes = TakenLayerBytes(
          model.spec, layer, *placement, options.ep_rank,
          [this](int64_t size_bytes) { return engine->backend().TakenBytes(size_bytes); });
      if (!bytes.ok()) return bytes.status();
      const std::optional<int64_t> taken_sum = CheckedAdd(taken, *bytes);
      if (!taken_sum) return absl::OutOfRangeError("the experts fit no memory");
      taken = *taken_sum;
      placements[model.spec.name].emplace(layer.index, *std::move(placement));
    }
    TellOfDequantizedFp8(model, need - need_of_others);
  }
  return need;
}

absl::Status ExpertServer::Impl::LoadExperts(const std::vector<ServedModel>& models) {
  const absl::StatusOr<int64_t> need = Plan(models);
  if (!need.ok()) return need.status();
  const absl::StatusOr<int64_t> available = Available();
  if (!available.ok()) return available.status();
  const int64_t reserve = options.device == nullptr ? 0 : DeviceReserveBytes(*available);
  if (absl::Status status = CheckMemoryNeed(taken, *available, reserve); !status.ok()) {
    return status;
  }
  LoadReporter reporter(
      ProgressToStderr(options.progress_on_terminal),
      absl::StrCat(NamesOf(models), " (rank ", options.ep_rank, " of ", options.ep_size, ")"));
  reporter.Start(*need, *available);
  std::mutex progress_mutex;
  std::atomic<int64_t> loaded{0};
  RankAnnouncerOptions announcer_options;
  announcer_options.link = link;
  announcer_options.ep_rank = options.ep_rank;
  announcer_options.ep_size = options.ep_size;
  announcer_options.comm_address =
      options.advertise_address.empty() ? options.bind_address : options.advertise_address;
  announcer_options.instruction_set = engine->backend().instruction_set();
  announcer_options.load_progress = [&loaded, need = static_cast<double>(*need)] {
    return need > 0 ? static_cast<double>(loaded) / need : 0;
  };
  const RankAnnouncer announcer(std::move(announcer_options));
  absl::Status status;
  for (const ServedModel& model : models) {
    for (const LayerSpec& layer : model.spec.layers) {
      status.Update(engine->LoadLayer(*model.source, layer,
                                      placements.at(model.spec.name).at(layer.index),
                                      [&](int64_t num_bytes) {
                                        const std::lock_guard<std::mutex> lock(progress_mutex);
                                        loaded += num_bytes;
                                        reporter.Update(loaded, *need);
                                      }));
      if (!status.ok()) break;
    }
    if (!status.ok()) break;
  }
  reporter.Finish(status);
  return status;
}

absl::Status ExpertServer::Load() {
  const ExpertServerOptions& options = impl_->options;
  // Else every epoch would fail, for ever, once the weights are there.
  if (absl::Status status = SocketAddress::CheckListen(options.bind_address); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("--listen: ", status.message()));
  }
  absl::StatusOr<std::vector<ServedModel>> models =
      OpenCheckpoints(options.models, options.architecture, options.fp8_weights);
  if (!models.ok()) return models.status();
  absl::StatusOr<std::shared_ptr<TlsWatch>> watch = TlsWatch::Start(options.tls, CheckChannelTls);
  if (!watch.ok()) return watch.status();
  impl_->tls = *std::move(watch);
  impl_->link = {options.control_plane, NewChannelCredentials(impl_->tls.get())};
  absl::Status status = impl_->MakeEngine();
  if (status.ok()) status = impl_->LoadExperts(*models);
  if (!status.ok()) return status;
  ExpertRankOptions rank_options = std::move(impl_->rank_options);
  rank_options.link = impl_->link;
  rank_options.engine = impl_->engine.get();
  rank_options.allocator = impl_->engine->backend().host_allocator();
  rank_options.bind_address = options.bind_address;
  rank_options.advertise_address = options.advertise_address;
  rank_options.join_timeout = options.join_timeout;
  rank_options.on_device_lost = [](const absl::Status& lost) {
    LogError("the GPU is lost: this process ends", {{"why", lost.message()}});
    std::_Exit(1);
  };
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->rank = std::make_unique<ExpertRank>(std::move(rank_options));
  impl_->is_loaded = true;
  LogInfo("loaded", {{"ep_rank", options.ep_rank},
                     {"ep_size", options.ep_size},
                     {"bytes", impl_->engine->weight_bytes()},
                     {"device", impl_->engine->backend().device_name()},
                     {"isa", impl_->engine->backend().instruction_set()}});
  return absl::OkStatus();
}

absl::Status ExpertServer::Run() { return impl_->rank->Run(); }

void ExpertServer::Stop() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  if (!impl_->is_loaded) {
    LogInfo("stopped while loading");
    _exit(0);
  }
  impl_->rank->Stop();
}

}  // namespace expertmesh
