#ifndef EXPERTMESH_SERVER_RPC_STEP_WIRE_H_
#define EXPERTMESH_SERVER_RPC_STEP_WIRE_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "expertmesh/v1/rank.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/buffer.h"
#include "server/planning/step_plan.h"
#include "server/rank/rank_engine.h"
#include "server/rank/token_shard.h"

// The messages of RankService.RunSteps between what planning/ and rank/ use and the wire. Rows go
// by gRPC's slices: not copied when they are sent, once when they are received.

namespace expertmesh {

// Whether EncodeSlice will take it; makes nothing. INVALID_ARGUMENT for a slice that does not fit
// the wire (counts above int32), RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE) where it may have more than
// 2 GiB.
absl::Status CheckFitsWire(const StepSlice& slice, const TokenShard& shard, int64_t hidden_size);

// RunStepsResponse with a slice. `hidden_size` is the model's. Errors of CheckFitsWire.
absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StepSlice& slice, const TokenShard& shard,
                                             int64_t hidden_size, absl::Duration timeout);

// A slice as it came: ep_rank and ep_size are not on the wire and are 0. The shard's bytes are as
// many as its shape and type say; nothing else is checked here (CheckSlice).
struct ReceivedSlice {
  StepSlice slice;
  int64_t hidden_size = 0;
  absl::Duration timeout;
  // Not OK: there was no memory for the shard, which is empty.
  absl::Status shard_status;
  Buffer shard;
};

struct ReceivedCommand {
  v1::RunStepsResponse other;          // without its slice
  std::optional<ReceivedSlice> slice;  // then `other` is empty
};

// INVALID_ARGUMENT (MALFORMED_MESSAGE, INVALID_FIELD).
absl::StatusOr<ReceivedCommand> DecodeCommand(grpc::ByteBuffer* message, Allocator* allocator);

// RunStepsRequest with a result; the output's bytes stay in its arena until they are sent. Errors
// where it does not fit the wire; those of the step itself always do.
absl::StatusOr<grpc::ByteBuffer> EncodeStepResult(const StepHeader& header, int64_t hidden_size,
                                                  const absl::StatusOr<RankStepResult>& result);

struct ReceivedResult {
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;
  absl::Status status;
  StepTimings timings;
  int64_t num_expert_rows = 0;
  RankTraffic traffic;
  // With an error: the epoch stands (v1::StepResult). So it is where the output came and there was
  // no memory for it.
  bool ran_to_end = false;
  // OK: [num_rows, hidden_size] in dtype.
  DType dtype = DType::kInvalid;
  int64_t num_rows = 0;
  int64_t hidden_size = 0;
  Buffer output;
};

struct ReceivedEvent {
  v1::RunStepsRequest other;             // without its result
  std::optional<ReceivedResult> result;  // then `other` is empty
};

// As DecodeCommand.
absl::StatusOr<ReceivedEvent> DecodeEvent(grpc::ByteBuffer* message, Allocator* allocator);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_STEP_WIRE_H_
