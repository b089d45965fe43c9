#ifndef EXPERTMESH_SERVER_RPC_FORWARD_VALIDATION_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_VALIDATION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "server/control/forward_call.h"
#include "server/model/model_spec.h"
#include "server/planning/step_plan.h"
#include "server/rpc/forward_decoder.h"

namespace expertmesh {

struct ForwardLimits {
  int64_t max_request_tokens = int64_t{1} << 20;
  int32_t max_topk = 4096;
  // Of the output alone. A message of protobuf ends at 2^31 - 1 bytes; the rest is for its head.
  int64_t max_output_bytes = (int64_t{1} << 31) - (int64_t{1} << 24);
  bool allow_dispatch_option = false;
  std::vector<DType> activation_dtypes;         // of hidden_states
  std::vector<DispatchMode> strategies;         // of this group; without kAuto
  DispatchMode dispatch = DispatchMode::kAuto;  // of requests that do not choose
};

struct ValidForward {
  std::unique_ptr<ForwardCall> call;  // all but deadline and done
  std::string model_name;
  bool output_as_values = false;
  bool stats_only = false;
  bool validate_only = false;
  int64_t payload_bytes = 0;
  // With given top-k; otherwise the router decides and these are 0.
  int64_t num_pairs = 0;
  int64_t num_tokens_without_expert = 0;
};

// NOT_FOUND (MODEL_NOT_FOUND), or INVALID_ARGUMENT (INVALID_FIELD) without a name; `served` are the
// names that there are.
absl::Status NoModelOfThatName(const std::string& name, const std::string& served);

// Every rule on bad input, for a request against the models served. Immutable,
// thread safe, does not block. `models` and `allocator` outlive it.
class ForwardValidator {
 public:
  ForwardValidator(std::vector<const ModelSpec*> models, ForwardLimits limits,
                   Allocator* allocator);

  const std::vector<const ModelSpec*>& models() const { return models_; }
  const ForwardLimits& limits() const { return limits_; }

  // An empty name is the only model served; INVALID_ARGUMENT where there are several. NOT_FOUND
  // (MODEL_NOT_FOUND).
  absl::StatusOr<const ModelSpec*> FindModel(const std::string& name) const;

  // Takes over the payload: what is valid goes into the call without a copy (JSON `values` are
  // converted). INVALID_ARGUMENT (INVALID_FIELD with field, value, limit), NOT_FOUND,
  // FAILED_PRECONDITION, UNIMPLEMENTED, RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE for an answer that
  // would not fit; or the allocator's).
  absl::StatusOr<ValidForward> Validate(DecodedForwardRequest request) const;

 private:
  std::vector<const ModelSpec*> models_;
  ForwardLimits limits_;
  Allocator* allocator_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_VALIDATION_H_
