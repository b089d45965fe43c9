#include <cstdio>
#include <string>
#include <utility>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/command.h"
#include "client/cli/connection_flags.h"
#include "client/cli/flag_error.h"
#include "client/cli/forward_job.h"
#include "client/cli/json_output.h"

ABSL_DECLARE_FLAG(std::string, model);
ABSL_FLAG(int, max_tokens, 8, "tokens to show one by one");

namespace expertmesh {
namespace {

void PrintRanks(const v1::ExplainResponse& answer) {
  printf("\n  %-6s %8s %12s %15s %14s %14s  %s\n", "rank", "tokens", "expert rows",
         "active experts", "dispatch B", "combine B", "rows sent to rank 0, 1, ...");
  for (const v1::ExplainedRank& rank : answer.ranks()) {
    printf("  %-6d %8lld %12lld %15d %14lld %14lld  %s\n", rank.ep_rank(),
           static_cast<long long>(rank.num_source_tokens()),
           static_cast<long long>(rank.num_expert_rows()), rank.num_active_experts(),
           static_cast<long long>(rank.dispatch_bytes()),
           static_cast<long long>(rank.combine_bytes()),
           absl::StrJoin(rank.send_counts(), ", ").c_str());
  }
}

void PrintTokens(const v1::ExplainResponse& answer) {
  if (answer.tokens().empty()) return;
  printf("\n  %-6s %5s %7s  %s\n", "token", "step", "source", "expert x weight @ owner rank");
  for (const v1::ExplainedToken& token : answer.tokens()) {
    const std::string experts = absl::StrJoin(
        token.experts(), "  ", [](std::string* out, const v1::ExplainedExpert& expert) {
          if (expert.expert_id() < 0) {
            absl::StrAppend(out, "none");
          } else {
            absl::StrAppendFormat(out, "%d x %.4g @ %d", expert.expert_id(), expert.weight(),
                                  expert.owner_rank());
          }
        });
    printf("  %-6lld %5d %7d  %s\n", static_cast<long long>(token.token()), token.step(),
           token.source_rank(), experts.c_str());
  }
}

void PrintExplanation(const v1::ExplainResponse& answer) {
  const std::string strategy = absl::AsciiStrToLower(
      absl::StripPrefix(v1::DispatchMode_Name(answer.strategy()), "DISPATCH_MODE_"));
  printf("%s layer %d: %lld tokens, top-%d, %d step%s over %d rank%s (epoch %llu)\n",
         answer.model().c_str(), answer.layer(), static_cast<long long>(answer.num_tokens()),
         answer.topk(), answer.num_steps(), answer.num_steps() == 1 ? "" : "s", answer.ep_size(),
         answer.ep_size() == 1 ? "" : "s", static_cast<unsigned long long>(answer.epoch()));
  printf("  strategy      %s: %s\n", strategy.c_str(), answer.strategy_reason().c_str());
  printf("  on the wire   %lld bytes out, %lld back\n",
         static_cast<long long>(answer.dispatch_bytes()),
         static_cast<long long>(answer.combine_bytes()));
  printf("  work          %.3g GFLOP, most on one rank / mean %.2f\n",
         static_cast<double>(answer.estimated_flops()) * 1e-9, answer.load_imbalance());
  for (const std::string& warning : answer.warnings())
    printf("  note          %s\n", warning.c_str());
  PrintRanks(answer);
  PrintTokens(answer);
}

absl::Status Run() {
  absl::Status flags = CheckForwardFlags();
  if (flags.ok() && absl::GetFlag(FLAGS_max_tokens) < 0) {
    flags = FlagError(absl::StrCat("--max_tokens is ", absl::GetFlag(FLAGS_max_tokens),
                                   "; it takes a whole number from 0 on"));
  }
  if (!flags.ok()) return flags;
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ClientFromFlags();
  if (!client.ok()) return client.status();
  const absl::StatusOr<v1::GetModelResponse> model =
      (*client)->GetModel(absl::GetFlag(FLAGS_model), CallOptionsFromFlags());
  if (!model.ok()) return model.status();
  ForwardJob job;
  if (absl::Status status = FillForwardJob(*model, job); !status.ok()) return status;
  absl::StatusOr<v1::ForwardRequest> forward = RequestMessage(job.input);
  if (!forward.ok()) return forward.status();
  v1::ExplainRequest request;
  request.set_max_tokens(absl::GetFlag(FLAGS_max_tokens));
  *request.mutable_request() = *std::move(forward);
  const absl::StatusOr<v1::ExplainResponse> answer =
      (*client)->Explain(request, CallOptionsFromFlags());
  if (!answer.ok()) return answer.status();
  if (JsonWanted()) return PrintJson(*answer);
  PrintExplanation(*answer);
  return absl::OkStatus();
}

}  // namespace

const Command kExplainCommand = {
    "explain", "how a request would be run: strategy, ranks, bytes, each token's way",
    "Takes what `forward` takes, runs nothing.\n\n"
    "  --max_tokens=N   tokens to show one by one (default 8)\n"
    "  --json           as JSON\n\n"
    "  expertmesh explain --tokens=64\n",
    "explain_command.cc forward_job.cc json_output.cc connection_flags.cc", Run};

}  // namespace expertmesh
