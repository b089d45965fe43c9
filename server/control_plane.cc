#include "server/control_plane.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "grpcpp/impl/service_type.h"
#include "server/cluster/memory_need.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/model/load_reporter.h"
#include "server/ops/clock.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/ops/server_metrics.h"
#include "server/routing/router_table.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/control_metrics.h"
#include "server/rpc/expert_service.h"
#include "server/rpc/forward_validation.h"
#include "server/rpc/model_info.h"
#include "server/rpc/placement_fingerprint.h"
#include "server/rpc/serving_state.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kTimeToSendAnswers = absl::Seconds(5);

struct Model {
  std::unique_ptr<CheckpointWeightSource> source;  // until it is loaded
  ModelSpec spec;
};

std::string NamesOf(const std::vector<Model>& models) {
  return absl::StrJoin(models, ", ", [](std::string* out, const Model& model) {
    absl::StrAppend(out, model.spec.name);
  });
}

absl::StatusOr<std::vector<Model>> OpenCheckpoints(const ControlPlaneOptions& options) {
  std::vector<Model> models;
  for (const auto& [name, folder] : options.models) {
    absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> source = CheckpointWeightSource::Open(
        folder, {.model_name = name, .architecture = options.architecture});
    if (!source.ok()) return source.status();
    Model model;
    model.spec = (*source)->model();
    model.source = *std::move(source);
    LogInfo("opened a checkpoint", {{"model", model.spec.name},
                                    {"architecture", model.spec.architecture},
                                    {"moe_layers", model.spec.layers.size()},
                                    {"hidden_size", model.spec.hidden_size},
                                    {"dtype", DTypeName(model.spec.weight_dtype)},
                                    {"path", folder}});
    models.push_back(std::move(model));
  }
  std::sort(models.begin(), models.end(),
            [](const Model& a, const Model& b) { return a.spec.name < b.spec.name; });
  for (size_t i = 1; i < models.size(); ++i) {
    if (models[i].spec.name == models[i - 1].spec.name) {
      return absl::InvalidArgumentError(
          absl::StrCat("two models are called '", models[i].spec.name, "'"));
    }
  }
  return models;
}

absl::Status LoadRouters(const std::vector<Model>& models, RouterTable* routers) {
  for (const Model& model : models) {
    for (const LayerSpec& layer : model.spec.layers) {
      std::unique_ptr<LoadedGate> gate;
      if (layer.has_gate) {
        absl::StatusOr<LoadedGate> loaded = model.source->LoadGate(layer.index);
        if (!loaded.ok()) return loaded.status();
        gate = std::make_unique<LoadedGate>(*std::move(loaded));
      }
      absl::StatusOr<std::unique_ptr<Router>> router =
          NewRouter(model.spec, layer, std::move(gate));
      if (!router.ok()) return router.status();
      routers->Add(model.spec.name, *std::move(router));
    }
  }
  return absl::OkStatus();
}

absl::Status LoadExperts(const std::vector<Model>& models, bool progress_on_terminal,
                         LocalExpertGroup* group) {
  std::vector<const WeightSource*> sources;
  for (const Model& model : models) sources.push_back(model.source.get());
  absl::StatusOr<std::vector<int64_t>> need = group->NeedBytes(sources);
  if (!need.ok()) return need.status();
  absl::StatusOr<int64_t> available = AvailableMemoryBytes();
  if (!available.ok()) return available.status();

  LoadReporterOptions reporter_options;
  reporter_options.is_terminal = progress_on_terminal;
  reporter_options.write_terminal = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
  };
  reporter_options.log = [](std::string_view message) { LogInfo(message); };
  LoadReporter reporter(std::move(reporter_options), NamesOf(models));
  reporter.Start(std::accumulate(need->begin(), need->end(), int64_t{0}), *available);
  const absl::Status status = group->Load(
      sources,
      [&reporter](const LoadProgress& progress) {
        reporter.Update(progress.loaded_bytes, progress.total_bytes);
      },
      *available);
  reporter.Finish(status);
  return status;
}

absl::Status WritePortFile(const std::string& path, int port) {
  if (path.empty()) return absl::OkStatus();
  // Readers see the whole number or no file.
  const std::string unfinished = absl::StrCat(path, ".tmp");
  {
    std::ofstream file(unfinished);
    file << port << "\n";
    if (!file.flush()) return absl::UnavailableError(absl::StrCat("cannot write ", unfinished));
  }
  if (std::rename(unfinished.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

std::string AddressWithPort(const std::string& listen, int port) {
  const size_t colon = listen.rfind(':');
  return absl::StartsWith(listen, "unix:") || colon == std::string::npos
             ? listen
             : absl::StrCat(listen.substr(0, colon), ":", port);
}

}  // namespace

// What stands earlier in here outlives what stands later.
struct ControlPlane::Impl {
  explicit Impl(ControlPlaneOptions o)
      : options(std::move(o)),
        metrics(&registry),
        control_metrics(&metrics),
        state(options.controller.limits.max_bytes_in_flight),
        streams(options.streams) {}
  ~Impl() {
    registry.SetRefresh(nullptr);
    state.StartDraining();
  }

  void MakeValidator();
  absl::Status StartMetrics();
  absl::Status Listen();
  void Serve();
  v1::GetStatusResponse Status() const;
  void FillRankStatus(bool loaded, v1::GetStatusResponse* response) const;

  const absl::Time start_time = absl::Now();
  const ControlPlaneOptions options;
  absl::Notification stop;
  MetricsRegistry registry;
  const ServerMetrics metrics;
  std::unique_ptr<MetricsExposer> exposer;
  ControlMetrics control_metrics;
  std::vector<Model> models;
  RouterTable routers;
  std::unique_ptr<LocalExpertGroup> group;
  std::unique_ptr<ForwardValidator> validator;
  std::unique_ptr<StepController> controller;
  ServingState state;
  ForwardStreamSet streams;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<grpc::Service> admin;
  std::string address;
  // Between Start and a Stop that comes while it is loading.
  std::mutex start_mutex;
  bool is_serving = false;
  std::unique_ptr<GrpcServer> server;
};

void ControlPlane::Impl::MakeValidator() {
  ForwardLimits limits;
  limits.max_request_tokens = options.controller.limits.max_tokens_in_flight;
  limits.allow_dispatch_option = options.allow_dispatch_option;
  limits.activation_dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  if (group->ep_size() == 1) limits.strategies.push_back(DispatchMode::kPassthrough);
  limits.strategies.push_back(DispatchMode::kAllToAll);
  std::vector<const ModelSpec*> specs;
  for (const Model& model : models) specs.push_back(&model.spec);
  validator = std::make_unique<ForwardValidator>(std::move(specs), std::move(limits),
                                                 group->request_allocator());
}

absl::Status ControlPlane::Impl::StartMetrics() {
  if (options.metrics_listen.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<MetricsExposer>> started =
      MetricsExposer::Start(&registry, options.metrics_listen);
  if (!started.ok()) return started.status();
  exposer = *std::move(started);
  LogInfo(absl::StrCat("metrics on http://",
                       AddressWithPort(options.metrics_listen, exposer->port()), "/metrics"));
  return absl::OkStatus();
}

absl::Status ControlPlane::Impl::Listen() {
  ExpertServiceOptions service_options;
  service_options.state = &state;
  service_options.metrics = &metrics;
  service_options.max_message_bytes = options.server.max_message_bytes;
  service_options.max_deadline = options.controller.max_deadline;
  service_options.max_step_tokens = options.controller.max_step_tokens;
  service_options.streams = &streams;
  for (const Model& model : models) {
    v1::GetModelResponse description = DescribeModel(model.spec, validator->limits());
    description.set_ep_size(group->ep_size());
    description.set_instruction_set(group->instruction_set());
    service_options.models.push_back(std::move(description));
  }
  service = NewExpertService(std::move(service_options));
  std::vector<GrpcServer::NamedService> services = {{kExpertServiceName, service.get()}};
  if (options.allow_admin) {
    admin = NewAdminService({.metrics = &metrics, .status = [this] { return Status(); }});
    services.push_back({kAdminServiceName, admin.get()});
  }
  absl::StatusOr<std::unique_ptr<GrpcServer>> started =
      GrpcServer::Start(options.server, std::move(services));
  if (!started.ok()) return started.status();
  const std::lock_guard<std::mutex> lock(start_mutex);
  server = *std::move(started);
  address = AddressWithPort(options.server.listen, server->port());
  LogInfo(absl::StrCat("listening on ", address, "; calls wait until the experts are loaded"));
  return WritePortFile(options.port_file, server->port());
}

void ControlPlane::Impl::Serve() {
  controller = std::make_unique<StepController>(options.controller, group.get(), &routers,
                                                SystemClock(), &control_metrics);
  registry.SetRefresh([this] { SetControlGauges(controller->Snapshot(), metrics); });
  ServingBackend backend;
  backend.controller = controller.get();
  backend.group = group.get();
  backend.validator = validator.get();
  backend.routers = &routers;
  backend.max_step_tokens = options.controller.max_step_tokens;
  backend.max_rank_pairs = options.controller.max_rank_pairs;
  backend.instruction_set = group->instruction_set();
  for (const Model& model : models) {
    backend.placement_fingerprints[&model.spec] = PlacementFingerprint(model.spec, *group);
  }
  const std::lock_guard<std::mutex> lock(start_mutex);
  is_serving = true;
  state.StartServing(backend);
  metrics.ready.Set(1);
  server->SetServing(true);
  LogInfo(absl::StrCat("serving ", NamesOf(models), " on ", address),
          {{"ranks", group->ep_size()},
           {"threads_per_rank", group->threads_per_rank()},
           {"isa", group->instruction_set()},
           {"tls", !options.server.tls_certificate.empty()}});
}

v1::GetStatusResponse ControlPlane::Impl::Status() const {
  v1::GetStatusResponse response;
  // Null while loading; then there is no controller either.
  const bool loaded = state.backend() != nullptr;
  const bool draining = state.draining();
  response.set_incarnation(group->incarnation());
  response.set_epoch(group->epoch());
  response.set_ready(loaded && !draining);
  response.set_draining(draining);
  response.set_version(EXPERTMESH_VERSION);
  response.set_uptime_micros(absl::ToInt64Microseconds(absl::Now() - start_time));
  response.set_model(NamesOf(models));
  response.set_ep_size(group->ep_size());
  response.set_num_lanes(1);
  if (!loaded) response.set_detail("the experts are being loaded");
  if (draining) response.set_detail("this server is stopping");
  if (loaded) FillControlStatus(controller->Snapshot(), &response);
  FillRankStatus(loaded, &response);
  return response;
}

void ControlPlane::Impl::FillRankStatus(bool loaded, v1::GetStatusResponse* response) const {
  for (int32_t rank = 0; rank < group->ep_size(); ++rank) {
    v1::RankStatus* out = response->add_ranks();
    out->set_ep_rank(rank);
    out->set_address("in-process");
    out->set_state(loaded ? v1::RANK_STATE_ACTIVE : v1::RANK_STATE_LOADING);
    out->set_instruction_set(group->instruction_set());
    if (!loaded) continue;
    out->set_load_progress(1);
    for (const Model& model : models) {
      for (const LayerSpec& layer : model.spec.layers) {
        const Placement* placement = group->placement(model.spec.name, layer.index);
        const auto num_experts = static_cast<int64_t>(placement->local_experts(rank).size());
        out->set_num_experts(out->num_experts() + num_experts);
      }
    }
  }
}

ControlPlane::ControlPlane(ControlPlaneOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

ControlPlane::~ControlPlane() = default;

absl::Status ControlPlane::Start() {
  absl::StatusOr<std::vector<Model>> models = OpenCheckpoints(impl_->options);
  if (!models.ok()) return models.status();
  impl_->models = *std::move(models);
  absl::StatusOr<std::unique_ptr<LocalExpertGroup>> group =
      LocalExpertGroup::Create(impl_->options.group);
  if (!group.ok()) return group.status();
  impl_->group = *std::move(group);
  impl_->MakeValidator();
  absl::Status status = impl_->StartMetrics();
  if (status.ok()) status = impl_->Listen();
  if (status.ok()) status = LoadRouters(impl_->models, &impl_->routers);
  if (status.ok()) {
    status = LoadExperts(impl_->models, impl_->options.progress_on_terminal, impl_->group.get());
  }
  if (!status.ok()) return status;
  for (Model& model : impl_->models) model.source.reset();
  impl_->Serve();
  return absl::OkStatus();
}

void ControlPlane::Stop() {
  impl_->state.StartDraining();
  {
    const std::lock_guard<std::mutex> lock(impl_->start_mutex);
    if (!impl_->is_serving) {
      if (impl_->server != nullptr) impl_->server->Shutdown(absl::Now() + absl::Seconds(1));
      LogInfo("stopped while loading");
      _exit(0);
    }
  }
  impl_->stop.Notify();
}

void ControlPlane::WaitForStopAndDrain() {
  impl_->stop.WaitForNotification();
  LogInfo("draining", {{"timeout", absl::FormatDuration(impl_->options.drain_timeout)}});
  impl_->server->SetServing(false);
  impl_->metrics.ready.Set(0);
  const absl::Status drained = impl_->controller->Drain(absl::Now() + impl_->options.drain_timeout);
  if (!drained.ok()) LogWarning("calls were cut off", {{"error", drained.message()}});
  impl_->streams.EndAll();
  impl_->server->Shutdown(absl::Now() + kTimeToSendAnswers);
  LogInfo("stopped");
}

}  // namespace expertmesh
