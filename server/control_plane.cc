#include <cstdlib>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "server/control_plane_impl.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/ops/clock.h"
#include "server/ops/listen_address.h"
#include "server/ops/logging.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/expert_service.h"
#include "server/rpc/model_info.h"
#include "server/rpc/placement_fingerprint.h"
#include "server/rpc/rank_metrics.h"
#include "server/rpc/rank_service.h"
#include "server/served_experts.h"

namespace expertmesh {
namespace {

absl::Status Named(absl::string_view flag, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("--", flag, ": ", status.message()));
}

}  // namespace

absl::Status ControlPlane::Impl::MakeGroup() {
  if (options.rank_listen.empty()) {
    LocalExpertGroupOptions group_options = options.group;
    group_options.on_device_lost = [](const absl::Status& status) {
      LogError("the GPU is lost: this process ends", {{"why", status.message()}});
      std::_Exit(1);
    };
    absl::StatusOr<std::unique_ptr<LocalExpertGroup>> made =
        LocalExpertGroup::Create(group_options);
    if (!made.ok()) return made.status();
    local_group = *std::move(made);
    group = local_group.get();
    return absl::OkStatus();
  }
  std::vector<const ModelSpec*> specs;
  for (const ServedModel& model : models) specs.push_back(&model.spec);
  absl::StatusOr<std::unique_ptr<RemoteExpertGroup>> made =
      RemoteExpertGroup::Create(options.ranks, specs, SteadyClock());
  if (!made.ok()) return made.status();
  remote_group = *std::move(made);
  group = remote_group.get();
  remote_group->SetEpochListener([this](uint64_t epoch) { OnEpoch(epoch); });
  return absl::OkStatus();
}

absl::Status ControlPlane::Impl::ListenToRanks() {
  RankServiceOptions service_options;
  service_options.group = remote_group.get();
  for (const ServedModel& model : models) {
    service_options.hidden_sizes[model.spec.name] = model.spec.hidden_size;
  }
  service_options.max_step_tokens = options.controller.max_step_tokens;
  service_options.allowed_names = options.rank_tls_names;
  rank_service = NewRankService(std::move(service_options));
  GrpcServerOptions server_options = options.server;
  server_options.listen = options.rank_listen;
  server_options.tls = tls;
  server_options.max_message_bytes = std::numeric_limits<int32_t>::max();
  absl::StatusOr<std::unique_ptr<GrpcServer>> started =
      GrpcServer::Start(server_options, {{kRankServiceName, rank_service.get()}});
  if (!started.ok()) return Named("rank_listen", started.status());
  rank_server = *std::move(started);
  rank_server->SetServing(true);
  LogInfo(absl::StrCat("ranks dial ", AddressWithPort(options.rank_listen, rank_server->port())),
          {{"ep_size", group->ep_size()}});
  return WritePortFile(options.rank_port_file, rank_server->port());
}

void ControlPlane::Impl::OnEpoch(uint64_t epoch) {
  const std::lock_guard<std::mutex> lock(start_mutex);
  if (!is_serving || is_stopping) return;
  // The newest one, whatever the order of those who tell.
  epoch = group->epoch();
  metrics.ready.Set(epoch != 0);
  server->SetServing(epoch != 0);
  controller->NotifyEpochChanged();
  if (epoch != 0) {
    LogInfo(absl::StrCat("serving ", NamesOf(models), " on ", address), {{"epoch", epoch}});
  }
}

void ControlPlane::Impl::MakeValidator() {
  ForwardLimits limits;
  limits.max_request_tokens = options.controller.limits.max_tokens_in_flight;
  limits.allow_dispatch_option = options.allow_dispatch_option;
  limits.dispatch = options.dispatch;
  limits.activation_dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  if (group->ep_size() == 1) limits.strategies.push_back(DispatchMode::kPassthrough);
  limits.strategies.push_back(DispatchMode::kAllToAll);
  limits.strategies.push_back(DispatchMode::kAllToAllFixedCapacity);
  limits.strategies.push_back(DispatchMode::kAllGatherReduceScatter);
  limits.strategies.push_back(DispatchMode::kAllGatherReduceScatterMonolithic);
  limits.strategies.push_back(DispatchMode::kDirect);
  std::vector<const ModelSpec*> specs;
  for (const ServedModel& model : models) specs.push_back(&model.spec);
  validator = std::make_unique<ForwardValidator>(std::move(specs), std::move(limits),
                                                 group->request_allocator());
}

absl::Status ControlPlane::Impl::StartMetrics() {
  if (options.metrics_listen.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<MetricsExposer>> started =
      MetricsExposer::Start(&registry, options.metrics_listen);
  if (!started.ok()) return Named("metrics_listen", started.status());
  exposer = *std::move(started);
  LogInfo(absl::StrCat("metrics on http://",
                       AddressWithPort(options.metrics_listen, exposer->port()), "/metrics"));
  return absl::OkStatus();
}

std::vector<MetricFamily> ControlPlane::Impl::GroupMetrics() const {
  std::vector<MetricFamily> families =
      RankMetrics(group->epoch(), usage().Snapshot(),
                  remote_group == nullptr ? std::vector<MemberView>() : remote_group->Members());
  families.push_back(control_metrics.expert_load().Top(options.metrics_top_experts));
  families.push_back(BuildInfo(EXPERTMESH_VERSION, group->instruction_set(), group->ep_size()));
  return families;
}

absl::Status ControlPlane::Impl::Listen() {
  ExpertServiceOptions service_options;
  service_options.state = &state;
  service_options.metrics = &metrics;
  service_options.max_message_bytes = options.server.max_message_bytes;
  service_options.max_deadline = options.controller.max_deadline;
  service_options.max_step_tokens = options.controller.max_step_tokens;
  service_options.streams = &streams;
  service_options.open_calls = &open_calls;
  service_options.max_unsent_answer_bytes = options.controller.limits.max_bytes_in_flight;
  for (const ServedModel& model : models) {
    v1::GetModelResponse description = DescribeModel(model.spec, validator->limits());
    description.set_ep_size(group->ep_size());
    service_options.models.push_back(std::move(description));
  }
  service = NewExpertService(std::move(service_options));
  std::vector<GrpcServer::NamedService> services = {{kExpertServiceName, service.get()}};
  if (options.allow_admin) {
    admin = NewAdminService({.metrics = &metrics,
                             .open_calls = &open_calls,
                             .status = [this] { return Status(); },
                             .drain = [this](absl::Duration timeout) { return Drain(timeout); }});
    services.push_back({kAdminServiceName, admin.get()});
  }
  absl::StatusOr<std::shared_ptr<TlsWatch>> watch = TlsWatch::Start(options.tls, CheckServerTls);
  if (!watch.ok()) return watch.status();
  tls = *std::move(watch);
  GrpcServerOptions server_options = options.server;
  server_options.tls = tls;
  absl::StatusOr<std::unique_ptr<GrpcServer>> started =
      GrpcServer::Start(server_options, std::move(services));
  if (!started.ok()) return Named("listen", started.status());
  const std::lock_guard<std::mutex> lock(start_mutex);
  server = *std::move(started);
  address = AddressWithPort(options.server.listen, server->port());
  if (options.allow_admin && options.tls.ca.empty() &&
      !IsLocalListenAddress(options.server.listen)) {
    LogWarning(
        "whoever reaches this address may end this server's work: --allow_admin without "
        "--tls_ca, which asks clients for certificates",
        {{"listen", address}});
  }
  LogInfo(absl::StrCat("listening on ", address, "; calls wait until the experts are loaded"));
  return WritePortFile(options.port_file, server->port());
}

void ControlPlane::Impl::Serve() {
  StepControllerOptions controller_options = options.controller;
  // A step waits for other processes, and gRPC's threads, on which calls come, must not.
  if (remote_group != nullptr) controller_options.max_inline_micros = -1;
  controller = std::make_unique<StepController>(controller_options, group, &routers, SteadyClock(),
                                                &control_metrics);
  registry.SetRefresh([this] { SetControlGauges(controller->Snapshot(), metrics); });
  registry.SetCollector([this] { return GroupMetrics(); });
  ServingBackend backend;
  backend.controller = controller.get();
  backend.group = group;
  backend.validator = validator.get();
  backend.routers = &routers;
  backend.max_step_tokens = options.controller.max_step_tokens;
  backend.max_rank_pairs = options.controller.max_rank_pairs;
  backend.max_num_tokens = options.controller.max_num_tokens;
  for (const ServedModel& model : models) {
    backend.placement_fingerprints[&model.spec] = PlacementFingerprint(model.spec, *group);
  }
  WarnOfEmptyRanks(models, *group);
  const std::lock_guard<std::mutex> lock(start_mutex);
  is_serving = true;
  state.StartServing(backend);
  const bool is_ready = group->epoch() != 0;
  metrics.ready.Set(is_ready);
  server->SetServing(is_ready);
  if (remote_group != nullptr) {
    LogInfo(absl::StrCat("calls on ", address, " wait until all ranks are there"),
            {{"ranks", group->ep_size()}, {"tls", !options.tls.empty()}});
    return;
  }
  LogInfo(absl::StrCat("serving ", NamesOf(models), " on ", address),
          {{"ranks", group->ep_size()},
           {"threads_per_rank", local_group->threads_per_rank()},
           {"device", local_group->device_name()},
           {"isa", group->instruction_set()},
           {"tls", !options.tls.empty()}});
}

v1::GetStatusResponse ControlPlane::Impl::Status() const {
  v1::GetStatusResponse response;
  // Null while loading; then there is no controller either.
  const bool loaded = state.backend() != nullptr;
  const bool draining = state.draining();
  response.set_incarnation(group->incarnation());
  response.set_epoch(group->epoch());
  response.set_ready(loaded && !draining && group->epoch() != 0);
  response.set_draining(draining);
  response.set_version(EXPERTMESH_VERSION);
  response.set_uptime_micros(absl::ToInt64Microseconds(SteadyNow() - start_time));
  response.set_model(NamesOf(models));
  response.set_ep_size(group->ep_size());
  if (!loaded) response.set_detail("the experts are being loaded");
  if (loaded && group->epoch() == 0) response.set_detail(group->WhyNoEpoch());
  if (draining) {
    response.set_detail(
        was_asked_to_drain && !stop.HasBeenNotified()
            ? "as AdminService.Drain asked: calls are refused from then on; nothing "
              "takes it back, SIGTERM ends this process"
            : "this server is stopping");
  }
  FillCallStatus(metrics, &response);
  if (loaded) FillControlStatus(controller->Snapshot(), &response);
  FillRankStatus(loaded, &response);
  return response;
}

void ControlPlane::Impl::FillRankStatus(bool loaded, v1::GetStatusResponse* response) const {
  if (remote_group != nullptr) {
    FillMemberStatus(remote_group->Members(), response);
    return FillUsage(remote_group->usage(), response);
  }
  FillLocalRankStatus(models, *local_group, loaded, response);
  FillUsage(local_group->usage(), response);
}

ControlPlane::ControlPlane(ControlPlaneOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

ControlPlane::~ControlPlane() = default;

absl::Status ControlPlane::Start() {
  absl::StatusOr<std::vector<ServedModel>> models = OpenCheckpoints(
      impl_->options.models, impl_->options.architecture, impl_->options.fp8_weights);
  if (!models.ok()) return models.status();
  impl_->models = *std::move(models);
  if (absl::Status status = impl_->MakeGroup(); !status.ok()) return status;
  impl_->MakeValidator();
  absl::Status status = impl_->StartMetrics();
  if (status.ok()) status = impl_->Listen();
  if (status.ok()) status = LoadRouters(impl_->models, &impl_->routers);
  if (status.ok() && impl_->local_group != nullptr) {
    status =
        LoadExperts(impl_->models, impl_->options.progress_on_terminal, impl_->local_group.get());
  }
  if (!status.ok()) return status;
  for (ServedModel& model : impl_->models) model.source.reset();
  impl_->Serve();
  return impl_->remote_group == nullptr ? absl::OkStatus() : impl_->ListenToRanks();
}

int64_t ControlPlane::num_open_calls() const { return impl_->open_calls.num_open(); }

}  // namespace expertmesh
