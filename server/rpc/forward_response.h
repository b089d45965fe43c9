#ifndef EXPERTMESH_SERVER_RPC_FORWARD_RESPONSE_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_RESPONSE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/control/forward_call.h"
#include "server/rpc/forward_validation.h"
#include "server/rpc/serving_state.h"

namespace expertmesh {

// What of a request its answer needs, kept while the call itself is with control/.
struct ForwardAnswerInfo {
  std::string request_id;
  const ModelSpec* model = nullptr;
  int64_t num_tokens = 0;
  DType output_dtype = DType::kInvalid;
  bool output_as_values = false;
  bool stats_only = false;
};
ForwardAnswerInfo AnswerInfoOf(const ValidForward& valid);

// The message for a result; its output refers to the result's memory, except for
// OUTPUT_FORMAT_VALUES, which is converted. `allocator` gives that memory. With a `stream_seq`: a
// ForwardStreamResponse instead of a ForwardResponse.
absl::StatusOr<grpc::ByteBuffer> EncodeAnswer(const ForwardAnswerInfo& info,
                                              const ServingBackend& backend, ForwardResult result,
                                              absl::Duration total, Allocator* allocator,
                                              std::optional<uint64_t> stream_seq = std::nullopt);

// The answer to validate_only; `stream_seq` as above.
absl::StatusOr<grpc::ByteBuffer> EncodeValidated(const ForwardAnswerInfo& info,
                                                 const ServingBackend& backend,
                                                 std::optional<uint64_t> stream_seq = std::nullopt);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_RESPONSE_H_
