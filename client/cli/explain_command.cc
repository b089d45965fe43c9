#include <cstdio>
#include <string>
#include <utility>
#include <vector>

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
#include "client/cli/text_table.h"

ABSL_DECLARE_FLAG(std::string, model);
ABSL_FLAG(int, max_tokens, 8, "tokens to show one by one");

namespace expertmesh {
namespace {

bool IsDirect(const v1::ExplainResponse& answer) {
  return answer.strategy() == v1::DISPATCH_MODE_DIRECT;
}

// With `direct` nothing goes between ranks, and no rank is any token's source.
void PrintRanks(const v1::ExplainResponse& answer) {
  std::vector<TextTable::Column> columns = {{"rank", ColumnAlign::kRight},
                                            {"expert rows", ColumnAlign::kRight},
                                            {"active experts", ColumnAlign::kRight}};
  if (!IsDirect(answer)) {
    columns.insert(columns.end(), {{"source of tokens", ColumnAlign::kRight},
                                   {"bytes out", ColumnAlign::kRight},
                                   {"bytes back", ColumnAlign::kRight},
                                   {"rows to rank 0, 1, ..."}});
  }
  TextTable table(columns);
  for (const v1::ExplainedRank& rank : answer.ranks()) {
    std::vector<std::string> cells = {absl::StrCat(rank.ep_rank()),
                                      absl::StrCat(rank.num_expert_rows()),
                                      absl::StrCat(rank.num_active_experts())};
    if (!IsDirect(answer)) {
      cells.insert(cells.end(),
                   {absl::StrCat(rank.num_source_tokens()), absl::StrCat(rank.dispatch_bytes()),
                    absl::StrCat(rank.combine_bytes()), absl::StrJoin(rank.send_counts(), ", ")});
    }
    table.AddRow(std::move(cells));
  }
  printf("\n%s", table.Text().c_str());
}

void PrintTokens(const v1::ExplainResponse& answer) {
  if (answer.tokens().empty()) return;
  TextTable table({{"token", ColumnAlign::kRight},
                   {"step", ColumnAlign::kRight},
                   {IsDirect(answer) ? "source" : "source rank"},
                   {"expert x weight @ owner rank"}});
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
    table.AddRow({absl::StrCat(token.token()), absl::StrCat(token.step()),
                  token.source_rank() < 0 ? "control plane" : absl::StrCat(token.source_rank()),
                  experts});
  }
  printf("\n%s", table.Text().c_str());
  if (answer.num_tokens() > answer.tokens_size()) {
    printf("  ... and %lld more tokens (--max_tokens)\n",
           static_cast<long long>(answer.num_tokens() - answer.tokens_size()));
  }
}

void PrintExplanation(const v1::ExplainResponse& answer) {
  const std::string strategy = absl::AsciiStrToLower(
      absl::StripPrefix(v1::DispatchMode_Name(answer.strategy()), "DISPATCH_MODE_"));
  printf(
      "%s layer %d: %lld tokens, top-%d, %d step%s over %d rank%s (%s)\n", answer.model().c_str(),
      answer.layer(), static_cast<long long>(answer.num_tokens()), answer.topk(),
      answer.num_steps(), answer.num_steps() == 1 ? "" : "s", answer.ep_size(),
      answer.ep_size() == 1 ? "" : "s",
      (answer.epoch() == 0 ? "no epoch stands" : absl::StrCat("epoch ", answer.epoch())).c_str());
  printf("  strategy      %s: %s\n", strategy.c_str(), answer.strategy_reason().c_str());
  if (IsDirect(answer)) {
    puts(
        "  between ranks nothing: the control plane sends each rank its rows and sums what comes "
        "back");
  } else {
    printf("  between ranks %lld bytes out, %lld back\n",
           static_cast<long long>(answer.dispatch_bytes()),
           static_cast<long long>(answer.combine_bytes()));
  }
  printf("  work          %.3g GFLOP", static_cast<double>(answer.estimated_flops()) * 1e-9);
  if (answer.ep_size() > 1 && answer.load_imbalance() > 0) {
    printf(", the busiest rank has %.2f times the mean of rows", answer.load_imbalance());
  }
  puts("");
  for (const std::string& warning : answer.warnings())
    printf("  note          %s\n", warning.c_str());
  PrintRanks(answer);
  PrintTokens(answer);
}

absl::Status Run(const std::vector<std::string>& given) {
  absl::Status flags = CheckForwardFlags(given);
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
    "Takes what `forward` takes, but --output and --check; runs nothing.\n\n"
    "  --max_tokens=N   tokens to show one by one (default 8)\n"
    "  --json           as JSON\n\n"
    "  expertmesh explain --tokens=64\n",
    "explain_command.cc forward_job.cc json_output.cc connection_flags.cc", Run};

}  // namespace expertmesh
