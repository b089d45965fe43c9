#ifndef EXPERTMESH_CLIENT_CLI_JSON_OUTPUT_H_
#define EXPERTMESH_CLIENT_CLI_JSON_OUTPUT_H_

#include <google/protobuf/message.h>

#include <string>

#include "absl/status/statusor.h"

namespace expertmesh {

// --json was given.
bool JsonWanted();

// One JSON object and a newline.
absl::StatusOr<std::string> JsonText(const google::protobuf::Message& message);
// The same to stdout.
absl::Status PrintJson(const google::protobuf::Message& message);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_JSON_OUTPUT_H_
