#ifndef EXPERTMESH_SERVER_RPC_FORWARD_STREAM_STATE_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_STREAM_STATE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"

namespace expertmesh {

// Bytes in flight on all streams of a process. Thread safe; outlives the streams.
class ForwardStreamTotal {
 public:
  explicit ForwardStreamTotal(int64_t max_bytes) : max_bytes_(max_bytes) {}

  void Add(int64_t bytes) { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  bool spent() const { return bytes() >= max_bytes_; }

 private:
  const int64_t max_bytes_;
  std::atomic<int64_t> bytes_{0};
};

// One message from its arrival until its answer was written; who drives the stream derives from it.
struct ForwardStreamMessage {
  virtual ~ForwardStreamMessage() = default;
  uint64_t stream_seq = 0;

 private:
  friend class ForwardStreamState;
  int64_t charged_bytes = 0;
};

// What one ForwardStream is doing: which messages are in flight, which answers wait, what may be
// started next. Knows no gRPC and takes no lock: the owner calls everything under one mutex, and
// frees what the functions return after it has let go of it.
//
// Budget. A message is charged from its arrival until its answer was written: first the bytes that
// arrived, the answer's too once its size is known, then the answer's alone. A read is begun only
// while the stream's charge is below its bound and the process's below its own. As a size is known
// only afterwards, each stream may go over by the message that is read next, and by the answers of
// those that are just being checked (on at most as many threads as gRPC has). A stream without any
// charge may always read, so that streams whose clients take no answers slow the others down to one
// message at a time when they use up the process's bound, and never stop them.
class ForwardStreamState {
 public:
  using MessagePtr = std::shared_ptr<ForwardStreamMessage>;
  enum class Action { kNone, kRead, kWrite, kFinish };

  // What each message is charged on top of its bytes: what is kept besides them.
  static constexpr int64_t kMessageOverheadBytes = 4096;
  // Answers that wait beyond these should not keep the buffers of whole steps alive.
  static constexpr size_t kMaxSharedAnswers = 8;
  static constexpr int64_t kMaxSharedAnswerBytes = int64_t{1} << 20;

  ForwardStreamState(int64_t max_bytes, ForwardStreamTotal* total)
      : max_bytes_(max_bytes), total_(total) {}

  // What to start now; it counts as started. After kFinish there is nothing more. At most one read
  // and one write are outstanding; kFinish comes when no message runs and no write is outstanding,
  // though a read may be.
  Action Next();
  // Of kWrite: the message to be answered. Its stream_seq is free again: a client that got the
  // answer may use it before the write is known to be done.
  const MessagePtr& writing() const { return writing_; }
  // Of kWrite: it may be kept back to share a packet with the next one, which follows at once. Not
  // a stream's first: the headers travel with it, and until they are out gRPC 1.51 does not say
  // that a write kept back is done, so that none would follow.
  bool may_keep_back() const { return written_any_ && !answers_.empty(); }
  // Of kFinish.
  const absl::Status& final_status() const { return final_status_; }

  // The read has ended; not `ok`: no more will come (half-close, or a broken stream).
  void OnReadDone(bool ok);
  // A message that was read. False, and the message is not taken: its stream_seq is in flight, or
  // the stream has ended.
  bool Admit(const MessagePtr& message, int64_t bytes);
  // The message with that number if it is not answered yet; else null.
  MessagePtr FindRunning(uint64_t stream_seq) const;
  // The size that its answer will have. The message was not answered yet.
  void ExpectAnswer(ForwardStreamMessage* message, int64_t answer_bytes);
  // An answer that comes now would have to wait behind so much that it should hold only memory of
  // its own.
  bool ShouldCopyAnswer() const;
  // Every admitted message is answered once, also after End. False: nobody waits for the answer any
  // more.
  bool OnAnswer(const MessagePtr& message, int64_t answer_bytes);
  // The message whose write has ended. Not `ok`: the stream is broken, call End.
  MessagePtr OnWriteDone();

  // No more messages are taken, though one may be on its way; the stream ends with that status once
  // those in flight are answered.
  void EndWhenAnswered(absl::Status status);

  // Ends the stream with a status, unless it has ended already: no more reads, answers that wait
  // are dropped. Messages that run are to be cancelled.
  struct Ended {
    std::vector<MessagePtr> running;
    std::deque<MessagePtr> dropped;
  };
  Ended End(absl::Status status);

  bool ended() const { return ended_ || finished_; }
  int64_t num_running() const { return num_running_; }
  int64_t charged_bytes() const { return charged_bytes_; }

 private:
  struct Entry {
    MessagePtr message;
    bool answered = false;
  };

  void Charge(ForwardStreamMessage* message, int64_t bytes);
  bool MayRead() const;

  const int64_t max_bytes_;
  ForwardStreamTotal* const total_;
  int64_t charged_bytes_ = 0;

  // Until the write of the answer begins. Ordered: a client chooses the keys.
  std::map<uint64_t, Entry> in_flight_;
  int64_t num_running_ = 0;
  std::deque<MessagePtr> answers_;
  int64_t waiting_bytes_ = 0;
  MessagePtr writing_;
  bool written_any_ = false;
  bool reading_ = false;
  bool reads_done_ = false;
  bool ended_ = false;
  bool finished_ = false;
  absl::Status final_status_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_STREAM_STATE_H_
