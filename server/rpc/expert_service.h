#ifndef EXPERTMESH_SERVER_RPC_EXPERT_SERVICE_H_
#define EXPERTMESH_SERVER_RPC_EXPERT_SERVICE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "server/ops/server_metrics.h"
#include "server/rpc/forward_stream_set.h"
#include "server/rpc/open_calls.h"
#include "server/rpc/serving_state.h"

namespace grpc {
class Service;
}

namespace expertmesh {

inline constexpr char kExpertServiceName[] = "expertmesh.v1.ExpertService";

struct ExpertServiceOptions {
  ServingState* state = nullptr;
  const ServerMetrics* metrics = nullptr;
  int64_t max_message_bytes = int64_t{64} << 20;
  absl::Duration max_deadline = absl::Minutes(1);
  // By ascending name, as DescribeModel makes them; limits.max_request_bytes, max_step_tokens and
  // max_deadline_micros are added here.
  std::vector<v1::GetModelResponse> models;
  int64_t max_step_tokens = 0;
  ForwardStreamSet* streams = nullptr;
  OpenCalls* open_calls = nullptr;  // all but those that are answered at once
  // Of unary calls, whether their steps have not run yet or their clients have not read them.
  int64_t max_unsent_answer_bytes = int64_t{1} << 30;
};

// The public service. Forward, ForwardStream and Explain take their messages as bytes
// (forward_decoder.h), so that no tensor passes through a protobuf message; the others are
// ordinary.
std::unique_ptr<grpc::Service> NewExpertService(ExpertServiceOptions options);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPERT_SERVICE_H_
