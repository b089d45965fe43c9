#ifndef EXPERTMESH_CLIENT_RETRYING_CALL_H_
#define EXPERTMESH_CLIENT_RETRYING_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/expert_client.h"

namespace expertmesh {

// How long to wait before attempt `attempt` (the second is 1): exponential, full jitter in its
// upper half by `random` in [0, 1), and never less than what the server advised. Nothing when the
// call should not be tried again: another code, no attempt left, or not enough time before
// `deadline`.
std::optional<absl::Duration> BackoffBeforeRetry(const RetryPolicy& policy,
                                                 const absl::Status& status, int attempt,
                                                 absl::Time now, absl::Time deadline,
                                                 double random);

// `status`; of a DEADLINE_EXCEEDED that no server explains the message then says how the attempt
// before it ended (`before`, OK for none): that is what the time went to.
absl::Status WithAttemptBefore(const absl::Status& status, const absl::Status& before);

// One unary call in bytes, tried again as its policy says. Keeps itself alive until `done` has run,
// on a gRPC thread.
class RetryingCall {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<grpc::ByteBuffer>)>;

  static void Start(std::shared_ptr<grpc::GenericStub> stub, std::string method,
                    grpc::ByteBuffer request, const RetryPolicy& policy, absl::Time deadline,
                    Done done);
};

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_RETRYING_CALL_H_
