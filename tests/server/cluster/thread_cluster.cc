#include "tests/server/cluster/thread_cluster.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "kernels/base/host_buffer_pool.h"
#include "server/comm/in_process_communicator.h"
#include "server/rank/rank_backend.h"

namespace expertmesh {

// As an expert server: threads that take the commands in turns, each step on one of them.
class ThreadCluster::Rank : public RemoteRank {
 public:
  Rank(RankEngine* engine, std::unique_ptr<Communicator> communicator, Allocator* allocator,
       decltype(Options::report) report)
      : engine_(engine),
        communicator_(std::move(communicator)),
        allocator_(allocator),
        report_(std::move(report)) {}
  ~Rank() override { Stop(); }

  void SetMember(RemoteExpertGroup* group, uint64_t member_id) {
    group_ = group;
    member_id_ = member_id;
    for (int32_t lane = 0; lane < kMaxLanes; ++lane) {
      threads_.emplace_back([this] { Work(); });
    }
  }
  void Stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  int32_t ep_rank() const override { return engine_->ep_rank(); }
  Allocator* host_allocator() override { return allocator_; }
  absl::Status CheckStep(const StepSlice&, const TokenShard&) const override {
    return absl::OkStatus();
  }
  void RunStep(StepSlice slice, TokenShard shard, absl::Time deadline, StepDone done) override {
    Push([this, slice = std::move(slice), shard = std::move(shard), deadline,
          done = std::move(done)](std::unique_lock<std::mutex>& lead) mutable {
      ComputeTurns::Turn turn = engine_->TakeTurn();
      lead.unlock();
      auto result = engine_->RunStep(std::move(slice), std::move(shard), deadline, std::move(turn));
      done(report_ == nullptr ? std::move(result) : report_(std::move(result)));
    });
  }
  void SkipOrder(uint64_t incarnation, uint64_t epoch, int64_t order) override {
    Push([=, this](std::unique_lock<std::mutex>&) {
      engine_->SkipOrder(incarnation, epoch, order);
    });
  }
  void EnterEpoch(uint64_t incarnation, uint64_t epoch, absl::Duration, absl::Duration) override {
    Push([=, this](std::unique_lock<std::mutex>&) {
      engine_->EnterEpoch(incarnation, epoch, std::move(communicator_));
      group_->OnEpochReady(member_id_, epoch, absl::OkStatus());
    });
  }
  void EndEpoch(uint64_t, const EpochEnd& end) override { engine_->Abort(end.reason); }
  void Abort(const absl::Status& reason) override { engine_->Abort(reason); }
  void Close(const absl::Status&) override {}

 private:
  using Command = absl::AnyInvocable<void(std::unique_lock<std::mutex>& lead)>;

  void Push(Command command) {
    const std::lock_guard<std::mutex> lock(mutex_);
    commands_.push_back(std::move(command));
    changed_.notify_one();
  }
  void Work() {
    while (true) {
      std::unique_lock<std::mutex> lead(lead_);
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !commands_.empty(); });
      if (stopping_) return;
      Command command = std::move(commands_.front());
      commands_.pop_front();
      lock.unlock();
      command(lead);
    }
  }

  RankEngine* const engine_;
  std::unique_ptr<Communicator> communicator_;
  Allocator* const allocator_;
  const decltype(Options::report) report_;
  RemoteExpertGroup* group_ = nullptr;
  uint64_t member_id_ = 0;
  std::mutex lead_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Command> commands_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

ThreadCluster::ThreadCluster() = default;

ThreadCluster::~ThreadCluster() {
  for (const std::shared_ptr<Rank>& rank : ranks_) rank->Stop();
}

absl::StatusOr<std::unique_ptr<ThreadCluster>> ThreadCluster::Start(const WeightSource& source,
                                                                    const Options& options) {
  std::unique_ptr<ThreadCluster> cluster(new ThreadCluster());
  const ModelSpec& model = source.model();
  RemoteExpertGroupOptions group_options;
  group_options.ep_size = options.ep_size;
  group_options.heartbeat_timeout = absl::Hours(10);
  group_options.step_timeout = absl::Minutes(2);
  const ModelSpec* models[] = {&model};
  absl::StatusOr<std::unique_ptr<RemoteExpertGroup>> group =
      RemoteExpertGroup::Create(group_options, models, SteadyClock());
  if (!group.ok()) return group.status();
  cluster->group_ = *std::move(group);
  std::vector<std::unique_ptr<Communicator>> communicators =
      options.communicate != nullptr ? options.communicate(options.ep_size)
                                     : NewInProcessCommunicators(options.ep_size);
  for (int32_t ep_rank = 0; ep_rank < options.ep_size; ++ep_rank) {
    CpuRankBackendOptions backend_options;
    backend_options.isa = SupportedCpuIsas().back();
    backend_options.threads.num_threads = options.threads_per_rank;
    backend_options.allocator = cluster->group_->allocator();
    absl::StatusOr<std::unique_ptr<RankBackend>> backend = NewCpuRankBackend(backend_options);
    if (!backend.ok()) return backend.status();
    RankEngineOptions engine_options;
    engine_options.ep_rank = ep_rank;
    engine_options.ep_size = options.ep_size;
    engine_options.backend = *std::move(backend);
    RankOffer offer;
    offer.protocol_version = kRankProtocolVersion;
    offer.ep_rank = ep_rank;
    offer.ep_size = options.ep_size;
    offer.instance = 100 + ep_rank;
    offer.instruction_set = CpuIsaName(SupportedCpuIsas().back());
    ModelManifest& manifest = offer.models.emplace_back();
    manifest.model = model.name;
    manifest.fingerprint = model.fingerprint;
    auto engine = std::make_unique<RankEngine>(std::move(engine_options));
    for (const LayerSpec& layer : model.layers) {
      const Placement& placement = *cluster->group_->placement(model.name, layer.index);
      const absl::Status loaded = engine->LoadLayer(source, layer, placement, [](int64_t) {});
      if (!loaded.ok()) return loaded;
      const absl::Span<const int32_t> experts = placement.local_experts(ep_rank);
      manifest.layers.push_back({layer.index, layer.num_experts, {experts.begin(), experts.end()}});
    }
    cluster->engines_.push_back(std::move(engine));
    std::unique_ptr<Communicator> communicator = std::move(communicators[ep_rank]);
    if (options.wrap != nullptr) communicator = options.wrap(std::move(communicator));
    const auto rank =
        std::make_shared<Rank>(cluster->engines_.back().get(), std::move(communicator),
                               cluster->group_->request_allocator(), options.report);
    cluster->ranks_.push_back(rank);
    const absl::StatusOr<uint64_t> member_id = cluster->group_->Join(offer);
    if (!member_id.ok()) return member_id.status();
    rank->SetMember(cluster->group_.get(), *member_id);
    const absl::Status attached =
        cluster->group_->Attach(cluster->group_->incarnation(), *member_id, rank);
    if (!attached.ok()) return attached;
  }
  while (cluster->group_->epoch() == 0) std::this_thread::yield();
  return cluster;
}

}  // namespace expertmesh
