#ifndef EXPERTMESH_TESTS_BENCH_DELAYED_COMMUNICATOR_H_
#define EXPERTMESH_TESTS_BENCH_DELAYED_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "server/comm/communicator.h"
#include "server/comm/operation_places.h"

namespace expertmesh {

// A wire that takes its time and no core: one thread runs the operations of another communicator in
// the order of their places, each after a delay. AllToAllV alone.
class DelayedCommunicator : public Communicator {
 public:
  // `delay_nanos`, of each operation, outlives it.
  DelayedCommunicator(std::unique_ptr<Communicator> real, const std::atomic<int64_t>* delay_nanos)
      : real_(std::move(real)), delay_nanos_(*delay_nanos), thread_([this] { Work(); }) {}
  ~DelayedCommunicator() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  int32_t ep_rank() const override { return real_->ep_rank(); }
  int32_t ep_size() const override { return real_->ep_size(); }

  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) override {
    const auto operation = std::make_shared<Operation>();
    operation->params = params;
    operation->params.tag.order = CollectiveTag::kAsCalled;
    operation->send_bytes.assign(params.send_bytes.begin(), params.send_bytes.end());
    operation->receive_bytes.assign(params.receive_bytes.begin(), params.receive_bytes.end());
    operation->params.send_bytes = operation->send_bytes;
    operation->params.receive_bytes = operation->receive_bytes;
    OperationPlace place;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      place = places_.Next(params.tag);
    }
    absl::Status status = stream.Enqueue([this, place, operation] {
      const std::lock_guard<std::mutex> lock(mutex_);
      reached_.emplace(place, operation);
      changed_.notify_all();
      return absl::OkStatus();
    });
    status.Update(stream.WaitFor(operation->done));
    return status;
  }
  absl::Status AllGatherV(const AllGatherVParams&, Stream&) override {
    return absl::UnimplementedError("AllGatherV");
  }
  absl::Status Barrier(const CollectiveTag&, Stream&) override {
    return absl::UnimplementedError("Barrier");
  }
  void CloseOrder(int64_t order) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_[order] = places_.Close(order);
    changed_.notify_all();
  }
  void Abort(const absl::Status& reason) override { real_->Abort(reason); }
  void Break(const absl::Status& reason) override { real_->Break(reason); }
  absl::Status status() const override { return real_->status(); }
  std::vector<int64_t> bytes_sent() const override { return real_->bytes_sent(); }

 private:
  struct Operation {
    AllToAllVParams params;
    std::vector<int64_t> send_bytes;
    std::vector<int64_t> receive_bytes;
    Event done;
  };

  void Work() {
    const std::unique_ptr<Stream> stream = NewInlineHostStream();
    OperationPlace next;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      const auto closed = closed_.find(next.order);
      if (closed != closed_.end() && closed->second <= next.index) {
        closed_.erase(closed);
        next = {next.order + 1, 0};
        continue;
      }
      const auto found = reached_.find(next);
      if (found == reached_.end()) {
        changed_.wait(lock);
        continue;
      }
      const std::shared_ptr<Operation> operation = std::move(found->second);
      reached_.erase(found);
      ++next.index;
      changed_.wait_for(lock, std::chrono::nanoseconds(delay_nanos_.load()),
                        [this] { return stopping_; });
      lock.unlock();
      absl::Status status = real_->AllToAllV(operation->params, *stream);
      if (status.ok()) status = stream->Wait(absl::InfiniteFuture());
      operation->done.Signal(status);
      lock.lock();
    }
  }

  const std::unique_ptr<Communicator> real_;
  const std::atomic<int64_t>& delay_nanos_;
  std::mutex mutex_;
  std::condition_variable changed_;
  OperationPlaces places_;
  std::map<OperationPlace, std::shared_ptr<Operation>> reached_;
  std::map<int64_t, int64_t> closed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_BENCH_DELAYED_COMMUNICATOR_H_
