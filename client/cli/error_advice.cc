#include "client/cli/error_advice.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/client_error.h"

namespace expertmesh {
namespace {

struct ReasonAdvice {
  const char* reason;
  const char* advice;
};

constexpr ReasonAdvice kReasonAdvice[] = {
    {"MODEL_NOT_FOUND", "`expertmesh model` lists what this server serves; name one with --model"},
    {"LAYER_NOT_FOUND",
     "`expertmesh model` lists the layers that have experts; dense layers have none"},
    {"FINGERPRINT_MISMATCH",
     "the server holds other weights than you expect; `expertmesh model` shows its fingerprint"},
    {"NO_GATE_WEIGHTS",
     "the checkpoint has no gate for this layer: send --routing=topk or --routing=logits"},
    {"NO_SHARED_EXPERTS", "leave --shared_experts out: the routed output is all there is"},
    {"OPTION_DISABLED", "the server must be started with the flag named above"},
    {"QUEUE_FULL", "the server is busy: send less at once, or add a replica"},
    {"BUFFERS_EXHAUSTED",
     "the server has no memory for this request just now: try again, or send fewer tokens"},
    {"MESSAGE_TOO_LARGE", "send fewer tokens in one call"},
    {"DRAINING", "this server is stopping; another replica may answer"},
    {"NO_EPOCH",
     "not all ranks are at work: `expertmesh status` and the server's log say what it waits for"},
    {"STEP_LOST", "a rank was lost while the call ran; it is safe to try again"},
    {"NOT_IMPLEMENTED", "this build does not serve it"},
};

// gRPC refuses a message above its receiver's limit, or its sender's, by itself, before the server
// could add details. Whose message it was shows in its size alone.
std::string TooLargeAdvice(const absl::Status& status) {
  constexpr absl::string_view kWords = "message larger than max (";
  const absl::string_view message = status.message();
  const size_t at = message.find(kWords);
  if (at == absl::string_view::npos) return "";
  const std::vector<absl::string_view> sizes = absl::StrSplit(
      message.substr(at + kWords.size(), message.find(')', at) - at - kWords.size()), " vs. ");
  int64_t size = 0;
  int64_t limit = 0;
  if (sizes.size() != 2 || !absl::SimpleAtoi(sizes[0], &size) ||
      !absl::SimpleAtoi(sizes[1], &limit)) {
    return "";
  }
  const bool by_sender = absl::EndsWith(message.substr(0, at), "Sent ");
  const std::optional<int64_t> request_bytes = GetRequestBytes(status);
  if (!request_bytes.has_value()) {
    return absl::StrCat("a message of ", size, " bytes is above its limit of ", limit,
                        ": send fewer tokens in one call");
  }
  if (size != *request_bytes) {
    return absl::StrCat("the answer of ", size, " bytes is above ",
                        by_sender ? "the server's" : "this client's", " limit of ", limit,
                        ": send fewer tokens in one call, or ask for a smaller --output_dtype");
  }
  if (by_sender) {
    return absl::StrCat("the request of ", size, " bytes is above this client's limit of ", limit,
                        ": send fewer tokens in one call");
  }
  return absl::StrCat(
      "the request of ", size, " bytes is above the server's limit of ", limit,
      " (its flag --max_message_bytes): send fewer tokens in one call, or start the "
      "server with more");
}

std::string Advice(const absl::Status& status, const std::optional<ServerErrorDetails>& details) {
  if (details.has_value()) {
    std::string advice;
    if (details->reason == "INVALID_FIELD" && details->field == "model") {
      advice = "name one of them with --model";
    }
    for (const ReasonAdvice& known : kReasonAdvice) {
      if (details->reason == known.reason) advice = known.advice;
    }
    if (details->retry_after.has_value()) {
      absl::StrAppend(&advice, advice.empty() ? "" : "; ", "the server advises to try again in ",
                      absl::FormatDuration(*details->retry_after));
    }
    return advice;
  }
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      return "nothing answered there: is the server up, is --target right, does one side use TLS "
             "and the other not?";
    case absl::StatusCode::kDeadlineExceeded:
      return "allow more time with --timeout, or see what keeps the server busy, or which rank it "
             "misses: `expertmesh status`";
    case absl::StatusCode::kResourceExhausted:
      return TooLargeAdvice(status);
    case absl::StatusCode::kUnimplemented:
      return "whatever answered there is no ExpertMesh service of this version";
    default:
      return "";
  }
}

}  // namespace

std::string ErrorWithAdvice(const absl::Status& status) {
  const std::optional<ServerErrorDetails> details = GetServerErrorDetails(status);
  std::string text = absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  if (details.has_value()) {
    absl::StrAppend(&text, "\n  reason: ", details->reason);
    if (!details->field.empty()) absl::StrAppend(&text, "\n  field: ", details->field);
    if (!details->value.empty()) absl::StrAppend(&text, "\n  value: ", details->value);
    if (!details->limit.empty()) absl::StrAppend(&text, "\n  limit: ", details->limit);
  }
  const std::string advice = Advice(status, details);
  if (!advice.empty()) absl::StrAppend(&text, "\n  advice: ", advice);
  return text;
}

}  // namespace expertmesh
