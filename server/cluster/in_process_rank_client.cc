#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "server/cluster/rank_client.h"

namespace expertmesh {
namespace {

class InProcessRankClient : public RankClient {
 public:
  explicit InProcessRankClient(RankEngine* engine) : engine_(engine), thread_([this] { Work(); }) {}

  ~InProcessRankClient() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  int32_t ep_rank() const override { return engine_->ep_rank(); }
  Allocator* host_allocator() override { return engine_->backend().host_allocator().get(); }

  void RunStep(StepSlice slice, TokenShard shard, absl::Time deadline, StepDone done) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_.emplace(Job{std::move(slice), std::move(shard), deadline, std::move(done)});
    }
    changed_.notify_one();
  }

  void Abort(const absl::Status& reason) override { engine_->Abort(reason); }

 private:
  struct Job {
    StepSlice slice;
    TokenShard shard;
    absl::Time deadline;
    StepDone done;
  };

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return job_.has_value() || stopping_; });
      if (!job_.has_value()) return;
      Job job = *std::move(job_);
      job_.reset();
      lock.unlock();
      job.done(engine_->RunStep(std::move(job.slice), std::move(job.shard), job.deadline));
      lock.lock();
    }
  }

  RankEngine* const engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Job> job_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace

std::unique_ptr<RankClient> NewInProcessRankClient(RankEngine* engine) {
  return std::make_unique<InProcessRankClient>(engine);
}

}  // namespace expertmesh
