#ifndef EXPERTMESH_SERVER_RPC_RANK_SESSION_H_
#define EXPERTMESH_SERVER_RPC_RANK_SESSION_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "expertmesh/v1/rank.pb.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/client_callback.h"
#include "kernels/base/buffer.h"
#include "server/rpc/step_wire.h"

namespace expertmesh {

// A rank's end of its RunSteps stream: commands come out in order, on the thread that asks for
// them, while the next one is read. Thread safe.
class RankSession final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                          public std::enable_shared_from_this<RankSession> {
 public:
  // The last epoch that has ended, and why.
  using OnEpochEnd = std::function<void(uint64_t epoch, const absl::Status& reason)>;
  static constexpr uint64_t kAllEpochs = std::numeric_limits<uint64_t>::max();

  // Opens the stream. `stub` and `allocator` outlive the session; `on_epoch_end` is called as soon
  // as the control plane ends an epoch or the stream ends (kAllEpochs), before Next tells of it, on
  // gRPC's thread: it must not block.
  static std::shared_ptr<RankSession> Start(grpc::GenericStub* stub, Allocator* allocator,
                                            const v1::StreamHello& hello, OnEpochEnd on_epoch_end);

  // Blocks until there is a command; when the stream has ended, why (never OK): the control plane's
  // word has CallErrorDetails.
  absl::StatusOr<ReceivedCommand> Next();
  // Nothing when the stream has ended.
  void Write(grpc::ByteBuffer message);
  // Takes leave of the control plane and ends the stream. Blocks until that is heard, half a second
  // at most; Next returns by then. Not on gRPC's threads.
  void Leave();
  // Ends the stream, or says why it is of no use; Next returns soon.
  void Cancel(const absl::Status& reason);
  void Fail(const absl::Status& status);
  // Cancels and blocks until gRPC is done with the stream. Once, before the last reference goes;
  // not on gRPC's threads.
  void Finish();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  RankSession(Allocator* allocator, OnEpochEnd on_epoch_end)
      : allocator_(allocator), on_epoch_end_(std::move(on_epoch_end)) {}

  void TryCancel();
  void Pump();
  // Lets OnDone come: gRPC keeps it back as long as somebody might write.
  void CloseWrites();

  Allocator* const allocator_;
  const OnEpochEnd on_epoch_end_;
  // Null after OnDone: it holds the channel, whose last reference must not go on gRPC's threads.
  std::mutex context_mutex_;
  std::unique_ptr<grpc::ClientContext> context_ = std::make_unique<grpc::ClientContext>();
  grpc::ByteBuffer read_;
  std::shared_ptr<RankSession> self_;  // until OnDone

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<ReceivedCommand> commands_;
  std::deque<grpc::ByteBuffer> to_write_;
  bool pumping_ = false;
  bool writing_ = false;
  bool closing_ = false;     // nothing is written any more
  bool has_let_go_ = false;  // of the hold
  bool done_ = false;
  absl::Status end_;  // not OK: the stream has ended, or is about to
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_SESSION_H_
