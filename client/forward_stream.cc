#include "client/forward_stream.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_error.h"
#include "client/forward_wire.h"

namespace expertmesh {

// Lives until gRPC has called OnDone and the ForwardStream is gone.
class ForwardStream::Reactor final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public std::enable_shared_from_this<Reactor> {
 public:
  explicit Reactor(const ForwardStreamOptions& options) : options_(options) {}

  void Start(std::shared_ptr<grpc::GenericStub> stub) {
    self_ = shared_from_this();
    stub_ = std::move(stub);
    if (options_.timeout != absl::InfiniteDuration()) {
      context_->set_deadline(absl::ToChronoTime(absl::Now() + options_.timeout));
    }
    stub_->PrepareBidiStreamingCall(context_.get(), "/expertmesh.v1.ExpertService/ForwardStream",
                                    grpc::StubOptions(), this);
    AddHold();  // for what is started outside of reactions
    StartRead(&read_);
    StartCall();
  }

  absl::Status Send(uint64_t stream_seq, absl::Duration timeout, const ForwardInput& input,
                    Done done) {
    // Zero would mean no timeout.
    const int64_t timeout_micros =
        timeout == absl::ZeroDuration()
            ? 0
            : std::max<int64_t>(
                  1, absl::ToInt64Microseconds(absl::Ceil(timeout, absl::Microseconds(1))));
    absl::StatusOr<grpc::ByteBuffer> bytes =
        EncodeForwardStreamRequest(stream_seq, timeout_micros, input);
    if (!bytes.ok()) return bytes.status();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (ended_) return EndStatus();
      if (half_closed_) return absl::FailedPreconditionError("the stream is half-closed");
      if (!HasRoom()) {
        return absl::ResourceExhaustedError(absl::StrCat(in_flight_.size(), " messages with ",
                                                         inflight_bytes_,
                                                         " bytes are in flight on this stream"));
      }
      const auto size_bytes = static_cast<int64_t>(bytes->Length());
      if (!in_flight_.try_emplace(stream_seq, InFlight{size_bytes, std::move(done)}).second) {
        return absl::InvalidArgumentError(absl::StrCat("stream_seq ", stream_seq, " is in flight"));
      }
      inflight_bytes_ += size_bytes;
      to_write_.push_back(*std::move(bytes));
    }
    Pump();
    return absl::OkStatus();
  }

  bool WaitForRoom(absl::Time deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto has_room = [this] { return ended_ || HasRoom(); };
    // On the steady clock, and a thousand hours, so that no sum overflows.
    const absl::Duration wait = std::min(deadline - absl::Now(), absl::Hours(1000));
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(wait), has_room);
  }

  void Cancel(uint64_t stream_seq) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (ended_ || half_closed_ || in_flight_.count(stream_seq) == 0) return;
      to_write_.push_back(EncodeForwardStreamCancel(stream_seq));
    }
    Pump();
  }

  void HalfClose() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      half_closed_ = true;
    }
    Pump();
  }

  void Abort() {
    const std::lock_guard<std::mutex> lock(context_mutex_);
    if (context_ != nullptr) context_->TryCancel();
  }

  absl::Status AwaitEnd() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return status_;
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        broken_ = true;
      }
      return Pump();
    }
    absl::StatusOr<ForwardStreamAnswer> answer = DecodeForwardStreamResponse(read_);
    read_.Clear();
    if (!answer.ok()) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (status_.ok()) status_ = answer.status();
      }
      Abort();
    } else {
      Done done;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = in_flight_.find(answer->stream_seq);
        if (found != in_flight_.end()) {
          done = std::move(found->second.done);
          inflight_bytes_ -= found->second.bytes;
          in_flight_.erase(found);
          changed_.notify_all();
        }
      }
      if (done) done(std::move(answer->result));
    }
    StartRead(&read_);
  }

  void OnWriteDone(bool ok) override {
    grpc::ByteBuffer written;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      written.Swap(&writing_);  // let go of without the mutex
      write_outstanding_ = false;
      if (!ok) broken_ = true;
    }
    Pump();
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<Reactor> self = std::move(self_);
    std::map<uint64_t, InFlight> unanswered;
    absl::Status why;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // What made us cancel the stream says more than the cancellation.
      if (status_.ok()) status_ = StatusOfServer(status);
      ended_ = true;
      why = EndStatus();
      unanswered = std::move(in_flight_);
      in_flight_.clear();
      inflight_bytes_ = 0;
      changed_.notify_all();
    }
    for (auto& [seq, message] : unanswered) message.done(why);
    {
      // Before anybody learns of the end: they may drop the channel next, and gRPC 1.51 aborts when
      // a channel's last reference goes on one of its own threads.
      const std::lock_guard<std::mutex> lock(context_mutex_);
      context_.reset();
      stub_.reset();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    to_write_.clear();
    done_ = true;
    changed_.notify_all();
  }

 private:
  struct InFlight {
    int64_t bytes = 0;
    Done done;
  };

  bool HasRoom() const {
    return in_flight_.empty() ||
           (inflight_bytes_ < options_.max_inflight_bytes &&
            static_cast<int64_t>(in_flight_.size()) < options_.max_inflight_messages);
  }

  // For messages that get no answer.
  absl::Status EndStatus() const {
    return status_.ok() ? absl::UnavailableError("the server ended the stream") : status_;
  }

  // Starts what can be started, without the mutex, one thread at a time.
  void Pump() {
    // gRPC's own reference may go once the hold is removed.
    const std::shared_ptr<Reactor> self = shared_from_this();
    std::unique_lock<std::mutex> lock(mutex_);
    if (pumping_) return;
    pumping_ = true;
    for (;;) {
      if (hold_removed_ || write_outstanding_) break;
      if (broken_) {
        hold_removed_ = true;
        lock.unlock();
        RemoveHold();
      } else if (!to_write_.empty()) {
        writing_.Swap(&to_write_.front());
        to_write_.pop_front();
        write_outstanding_ = true;
        grpc::WriteOptions write_options;
        // Another one follows at once: small ones then share a packet and a system call.
        if (!to_write_.empty()) write_options.set_buffer_hint();
        lock.unlock();
        StartWrite(&writing_, write_options);
      } else if (half_closed_ && !writes_done_) {
        writes_done_ = true;
        hold_removed_ = true;
        lock.unlock();
        StartWritesDone();
        RemoveHold();
      } else {
        break;
      }
      lock.lock();
    }
    pumping_ = false;
  }

  const ForwardStreamOptions options_;
  std::shared_ptr<grpc::GenericStub> stub_;
  std::shared_ptr<Reactor> self_;
  std::mutex context_mutex_;
  std::unique_ptr<grpc::ClientContext> context_ = std::make_unique<grpc::ClientContext>();
  grpc::ByteBuffer read_;

  // std, for ThreadSanitizer does not see into Debian's build of absl::Mutex. Guards all below, but
  // `writing_`.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, InFlight> in_flight_;
  int64_t inflight_bytes_ = 0;
  std::deque<grpc::ByteBuffer> to_write_;
  grpc::ByteBuffer writing_;  // gRPC's while the write is outstanding
  bool write_outstanding_ = false;
  bool pumping_ = false;
  bool half_closed_ = false;
  bool writes_done_ = false;
  bool hold_removed_ = false;
  bool broken_ = false;
  bool ended_ = false;  // no answer will come
  bool done_ = false;   // and all callbacks have run
  absl::Status status_;
};

ForwardStream::ForwardStream(std::shared_ptr<grpc::GenericStub> stub,
                             std::shared_ptr<Reactor> reactor)
    : stub_(std::move(stub)), reactor_(std::move(reactor)) {}

std::unique_ptr<ForwardStream> ForwardStream::Open(std::shared_ptr<grpc::GenericStub> stub,
                                                   const ForwardStreamOptions& options) {
  auto reactor = std::make_shared<Reactor>(options);
  reactor->Start(stub);
  return std::unique_ptr<ForwardStream>(new ForwardStream(std::move(stub), std::move(reactor)));
}

ForwardStream::~ForwardStream() {
  reactor_->Abort();
  reactor_->HalfClose();
  reactor_->AwaitEnd().IgnoreError();
}

absl::Status ForwardStream::Send(uint64_t stream_seq, absl::Duration timeout,
                                 const ForwardInput& input, Done done) {
  return reactor_->Send(stream_seq, timeout, input, std::move(done));
}

bool ForwardStream::WaitForRoom(absl::Time deadline) { return reactor_->WaitForRoom(deadline); }

void ForwardStream::Cancel(uint64_t stream_seq) { reactor_->Cancel(stream_seq); }

void ForwardStream::HalfClose() { reactor_->HalfClose(); }

absl::Status ForwardStream::Finish() {
  reactor_->HalfClose();
  return reactor_->AwaitEnd();
}

void ForwardStream::Abort() { reactor_->Abort(); }

}  // namespace expertmesh
