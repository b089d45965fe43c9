#include "tests/server/rpc/linked_ranks.h"

#include <grpc/grpc.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/security/credentials.h"
#include "kernels/base/steady_now.h"
#include "server/rank/rank_backend.h"
#include "server/rpc/rank_service.h"

namespace expertmesh {

LinkedRanks::LinkedRanks(const WeightSource& source, const Options& options) {
  // As the programs do: grpc_shutdown would wait for ever for a thread that gRPC could not start
  // (NoMoreThreads).
  static const bool kept = (grpc_init(), true);
  static_cast<void>(kept);
  const ModelSpec& model = source.model();
  const ModelSpec* models[] = {&model};
  RemoteExpertGroupOptions group_options = options.group;
  group_options.ep_size = options.ep_size;
  group_options.allocator = control_memory_;
  absl::StatusOr<std::unique_ptr<RemoteExpertGroup>> group = RemoteExpertGroup::Create(
      group_options, models, options.clock == nullptr ? SteadyClock() : options.clock);
  if (!group.ok()) abort();
  group_ = *std::move(group);
  RankServiceOptions service_options;
  service_options.group = group_.get();
  service_options.hidden_sizes[model.name] = model.hidden_size;
  service_ = NewRankService(std::move(service_options));
  GrpcServerOptions server_options;
  server_options.listen = "127.0.0.1:0";
  absl::StatusOr<std::unique_ptr<GrpcServer>> server =
      GrpcServer::Start(server_options, {{kRankServiceName, service_.get()}});
  if (!server.ok()) abort();
  server_ = *std::move(server);
  for (int32_t ep_rank = 0; ep_rank < options.ep_size; ++ep_rank) {
    auto rank = std::make_unique<Rank>();
    rank->memory = std::make_shared<FailingMemory>();
    CpuRankBackendOptions backend_options;
    backend_options.isa = SupportedCpuIsas().back();
    backend_options.threads.num_threads = 1;
    backend_options.allocator = std::make_shared<HostBufferPool>();
    absl::StatusOr<std::unique_ptr<RankBackend>> backend = NewCpuRankBackend(backend_options);
    if (!backend.ok()) abort();
    RankEngineOptions engine_options;
    engine_options.ep_rank = ep_rank;
    engine_options.ep_size = options.ep_size;
    engine_options.backend = *std::move(backend);
    rank->engine = std::make_unique<RankEngine>(std::move(engine_options));
    ExpertRankOptions rank_options;
    rank_options.link = {absl::StrCat("127.0.0.1:", server_->port()),
                         grpc::InsecureChannelCredentials()};
    rank_options.engine = rank->engine.get();
    rank_options.allocator = rank->memory;
    rank_options.hidden_sizes[model.name] = model.hidden_size;
    rank_options.nccl.functions = options.nccl;
    rank_options.nccl.on_stuck_abort = [](const absl::Status&) { abort(); };
    ModelManifest& manifest = rank_options.models.emplace_back();
    manifest.model = model.name;
    manifest.fingerprint = model.fingerprint;
    for (const LayerSpec& layer : model.layers) {
      const Placement& placement = *group_->placement(model.name, layer.index);
      if (!rank->engine->LoadLayer(source, layer, placement, [](int64_t) {}).ok()) abort();
      const absl::Span<const int32_t> experts = placement.local_experts(ep_rank);
      manifest.layers.push_back({layer.index, layer.num_experts, {experts.begin(), experts.end()}});
    }
    rank->rank = std::make_unique<ExpertRank>(std::move(rank_options));
    rank->thread = std::thread([own = rank.get()] { own->result = own->rank->Run(); });
    ranks_.push_back(std::move(rank));
  }
  if (!AwaitEpochAfter(0)) abort();
}

LinkedRanks::~LinkedRanks() {
  for (const std::unique_ptr<Rank>& rank : ranks_) rank->rank->Stop();
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (rank->thread.joinable()) rank->thread.join();
  }
  group_->Close();
  server_->Shutdown(SteadyNow() + absl::Seconds(30));
}

absl::Status LinkedRanks::StopRank(int32_t ep_rank) {
  Rank& rank = *ranks_[ep_rank];
  rank.rank->Stop();
  rank.thread.join();
  return rank.result;
}

bool LinkedRanks::AwaitEpochAfter(uint64_t epoch) {
  const absl::Time deadline = SteadyNow() + absl::Minutes(1);
  while (group_->epoch() <= epoch) {
    if (SteadyNow() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

uint64_t LinkedRanks::AwaitMember(int32_t ep_rank, uint64_t than) {
  const absl::Time deadline = SteadyNow() + absl::Minutes(1);
  while (SteadyNow() < deadline) {
    const uint64_t member_id = group_->Members()[ep_rank].member_id;
    if (member_id != 0 && member_id != than) return member_id;
    std::this_thread::yield();
  }
  return 0;
}

}  // namespace expertmesh
