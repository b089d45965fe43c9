#include "client/cli/json_output.h"

#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <string>

#include "absl/flags/flag.h"

ABSL_FLAG(bool, json, false, "print JSON instead of text");

namespace expertmesh {

bool JsonWanted() { return absl::GetFlag(FLAGS_json); }

absl::StatusOr<std::string> JsonText(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  std::string text;
  if (const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
      !status.ok()) {
    return absl::InternalError(status.ToString());
  }
  return text;
}

absl::Status PrintJson(const google::protobuf::Message& message) {
  const absl::StatusOr<std::string> text = JsonText(message);
  if (text.ok()) fputs(text->c_str(), stdout);
  return text.status();
}

}  // namespace expertmesh
