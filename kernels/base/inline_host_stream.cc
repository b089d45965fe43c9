#include <cstring>
#include <deque>
#include <utility>

#include "kernels/base/stream.h"
#include "kernels/base/stream_operation.h"

namespace expertmesh {
namespace {

class InlineHostStream : public Stream {
 public:
  ~InlineHostStream() override {
    for (StreamOperation& operation : pending_) CancelOperation(operation);
  }

  Device device() const override { return Device{}; }

  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) override {
    return Add({StreamOperation::Kind::kWork, std::move(work), Event()});
  }
  absl::Status Copy(void* dst, const void* src, int64_t size_bytes) override {
    absl::StatusOr<StreamOperation> copy = HostCopyOperation(dst, src, size_bytes);
    if (!copy.ok()) return copy.status();
    return Add(*std::move(copy));
  }
  absl::Status WaitFor(const Event& event) override {
    return Add({StreamOperation::Kind::kWaitFor, nullptr, event});
  }
  absl::Status Record(const Event& event) override {
    return Add({StreamOperation::Kind::kRecord, nullptr, event});
  }

  absl::Status Wait(absl::Time deadline) override {
    RunReady();
    while (!pending_.empty()) {
      // Only a pending WaitFor is left at the front.
      const Event event = pending_.front().event;
      const absl::Status waited = event.Wait(deadline);
      if (!event.done()) return waited;
      RunReady();
    }
    return error_;
  }

  void ClearError() override { error_ = absl::OkStatus(); }

 private:
  absl::Status Add(StreamOperation operation) {
    pending_.push_back(std::move(operation));
    RunReady();
    return absl::OkStatus();
  }

  void RunReady() {
    if (running_) return;  // called by work of this stream: the loop below goes on with it
    running_ = true;
    while (!pending_.empty()) {
      StreamOperation& front = pending_.front();
      if (front.kind == StreamOperation::Kind::kWaitFor && error_.ok() && !front.event.done()) {
        break;
      }
      StreamOperation operation = std::move(front);
      pending_.pop_front();
      RunOperation(operation, error_);
    }
    running_ = false;
  }

  std::deque<StreamOperation> pending_;
  absl::Status error_;
  bool running_ = false;
};

}  // namespace

std::unique_ptr<Stream> NewInlineHostStream() { return std::make_unique<InlineHostStream>(); }

}  // namespace expertmesh
