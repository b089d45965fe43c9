#ifndef EXPERTMESH_CLIENT_CLI_FORWARD_JOB_H_
#define EXPERTMESH_CLIENT_CLI_FORWARD_JOB_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/tensor_file.h"
#include "client/forward_input.h"

namespace expertmesh {

// What one Forward or Explain call sends, as the flags say; `input` points into the members beside
// it, so a job is not copied or moved.
struct ForwardJob {
  ForwardJob() = default;
  ForwardJob(const ForwardJob&) = delete;
  ForwardJob& operator=(const ForwardJob&) = delete;

  ForwardInput input;
  FileTensor hidden_states;       // [num_tokens, hidden_size]
  std::vector<int32_t> topk_ids;  // [num_tokens, topk]
  std::vector<float> topk_weights;
  FileTensor router_logits;  // [num_tokens, num_experts]
  bool random = false;       // something of it was drawn by --seed
};

// What is wrong with the flags, told without reading a file or asking a server; a FlagError. Of
// those `given` (CommandLine::flags) none may be of no use beside the others.
absl::Status CheckForwardFlags(const std::vector<std::string>& given);

// Reads the files that the flags name and draws the rest at random. `model` is the server's answer
// about the model: more tokens than its limits allow are not drawn but refused; other shapes that
// do not fit it are left for the server to refuse. Errors name the flag.
absl::Status FillForwardJob(const v1::GetModelResponse& model, ForwardJob& job);

// The same call as a protobuf message, for Explain.
absl::StatusOr<v1::ForwardRequest> RequestMessage(const ForwardInput& input);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_FORWARD_JOB_H_
