#include "client/forward_stream.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_error.h"
#include "client/forward_wire.h"

namespace expertmesh {

namespace {

// What the server's own word that the timeout passed, which says more, has to get here.
constexpr absl::Duration kTimeForAnswer = absl::Milliseconds(100);

}  // namespace

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

  // After AwaitEnd.
  void JoinTimer() {
    if (timer_.joinable()) timer_.join();
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
      if (in_flight_.count(stream_seq) != 0) {
        return absl::InvalidArgumentError(absl::StrCat("stream_seq ", stream_seq, " is in flight"));
      }
      const auto size_bytes = static_cast<int64_t>(bytes->Length());
      auto deadline = deadlines_.end();
      if (timeout_micros != 0) {
        if (absl::Status status = StartTimer(); !status.ok()) return status;
        // A thousand hours, so that the sum cannot overflow.
        deadline = deadlines_.emplace(
            std::chrono::steady_clock::now() +
                absl::ToChronoNanoseconds(std::min(timeout + kTimeForAnswer, absl::Hours(1000))),
            stream_seq);
        timer_changed_.notify_one();
      }
      in_flight_.emplace(stream_seq, InFlight{size_bytes, std::move(done), deadline});
      ++num_waiting_;
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
      // Until all are answered the stream is not half-closed for the server, so this can be told.
      const auto found = in_flight_.find(stream_seq);
      if (ended_ || writes_done_ || found == in_flight_.end() || !found->second.done) return;
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
    changed_.wait(lock, [this] { return done_ && num_telling_ == 0; });
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
      bool may_end;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = in_flight_.find(answer->stream_seq);
        if (found != in_flight_.end()) {
          done = Take(found->second);
          inflight_bytes_ -= found->second.bytes;
          in_flight_.erase(found);
          changed_.notify_all();
        }
        may_end = half_closed_ && num_waiting_ == 0;
      }
      Tell(std::move(done), std::move(answer->result));
      if (may_end) Pump();
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
      deadlines_.clear();
      changed_.notify_all();
      timer_changed_.notify_all();
    }
    for (auto& [seq, message] : unanswered) Tell(std::move(message.done), why);
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
  using Deadlines = std::multimap<std::chrono::steady_clock::time_point, uint64_t>;
  struct InFlight {
    int64_t bytes = 0;
    Done done;                     // null: its time was over, though the server still has to answer
    Deadlines::iterator deadline;  // deadlines_.end(): none
  };

  // Of a message that has its answer, or will get no other one. With the mutex.
  Done Take(InFlight& message) {
    if (message.deadline != deadlines_.end()) deadlines_.erase(message.deadline);
    message.deadline = deadlines_.end();
    num_waiting_ -= static_cast<bool>(message.done);
    return std::exchange(message.done, nullptr);
  }

  // Without the mutex. Callbacks run one at a time; they may call everything that does not block.
  void Tell(Done done, absl::StatusOr<ForwardOutput> result) {
    if (!done) return;
    const std::lock_guard<std::recursive_mutex> lock(tell_mutex_);
    done(std::move(result));
    done = nullptr;
  }

  // With the mutex.
  absl::Status StartTimer() {
    if (timer_.joinable()) return absl::OkStatus();
    try {
      timer_ = std::thread([this] { WatchDeadlines(); });
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot start a thread for messages' timeouts: ", error.what()));
    }
    return absl::OkStatus();
  }

  void WatchDeadlines() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ended_) {
      if (deadlines_.empty()) {
        timer_changed_.wait(lock);
        continue;
      }
      const auto [deadline, stream_seq] = *deadlines_.begin();
      if (std::chrono::steady_clock::now() < deadline) {
        timer_changed_.wait_until(lock, deadline);
        continue;
      }
      Done done = Take(in_flight_.find(stream_seq)->second);
      ++num_telling_;
      lock.unlock();
      Tell(std::move(done), absl::DeadlineExceededError(
                                "the message's timeout passed, and the server did not answer"));
      Pump();
      lock.lock();
      --num_telling_;
      changed_.notify_all();
    }
  }

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
      } else if (half_closed_ && !writes_done_ && num_waiting_ == 0) {
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
  std::condition_variable timer_changed_;
  Deadlines deadlines_;
  std::map<uint64_t, InFlight> in_flight_;
  int64_t num_waiting_ = 0;  // of in_flight_, those whose callbacks have not been called
  int64_t num_telling_ = 0;  // callbacks that the timer runs
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

  std::recursive_mutex tell_mutex_;
  std::thread timer_;  // runs until the stream has ended, if there ever was a timeout
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
  reactor_->JoinTimer();
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
