#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cli/connection_flags.h"
#include "client/cli/flag_error.h"
#include "client/cli/json_output.h"

ABSL_FLAG(absl::Duration, watch, absl::ZeroDuration(),
          "status: print again every so often, e.g. 500ms or 2s, until Ctrl-C");

namespace expertmesh {
namespace {

std::string Bytes(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return absl::StrFormat(unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
}

std::string Age(int64_t micros) {
  return absl::FormatDuration(absl::Trunc(absl::Microseconds(micros), absl::Milliseconds(1)));
}

std::string Memory(const v1::RankStatus& rank) {
  if (rank.memory_used_bytes() == 0) return "-";
  if (rank.memory_limit_bytes() == 0) return Bytes(rank.memory_used_bytes());
  return absl::StrCat(Bytes(rank.memory_used_bytes()), " / ", Bytes(rank.memory_limit_bytes()));
}

std::string State(const v1::RankStatus& rank) {
  std::string state =
      absl::AsciiStrToLower(absl::StripPrefix(v1::RankState_Name(rank.state()), "RANK_STATE_"));
  if (rank.state() == v1::RANK_STATE_LOADING) {
    absl::StrAppendFormat(&state, " %.0f%%", 100 * rank.load_progress());
  }
  return state;
}

void PrintRanks(const v1::GetStatusResponse& status) {
  printf("\n  %-5s %-15s %-22s %8s %10s %21s %10s %10s %12s  %s\n", "rank", "state", "address",
         "experts", "weights", "memory", "heartbeat", "steps", "expert rows", "kernels");
  for (const v1::RankStatus& rank : status.ranks()) {
    printf("  %-5d %-15s %-22s %8lld %10s %21s %10s %10llu %12llu  %s%s%s\n", rank.ep_rank(),
           State(rank).c_str(), rank.address().c_str(), static_cast<long long>(rank.num_experts()),
           Bytes(rank.weight_bytes()).c_str(), Memory(rank).c_str(),
           rank.heartbeat_age_micros() == 0 ? "-" : Age(rank.heartbeat_age_micros()).c_str(),
           static_cast<unsigned long long>(rank.num_steps()),
           static_cast<unsigned long long>(rank.num_expert_rows()), rank.instruction_set().c_str(),
           rank.detail().empty() || rank.instruction_set().empty() ? "" : ": ",
           rank.detail().c_str());
  }
}

void PrintStatus(const v1::GetStatusResponse& status) {
  const v1::QueueStatus& queue = status.queue();
  printf("%s: %s%s%s\n", status.model().empty() ? "(no model)" : status.model().c_str(),
         status.draining() ? "draining" : (status.ready() ? "ready" : "not ready"),
         status.detail().empty() ? "" : ", ", status.detail().c_str());
  printf("  epoch         %llu for %s, incarnation %016llx, up %s, version %s\n",
         static_cast<unsigned long long>(status.epoch()), Age(status.epoch_age_micros()).c_str(),
         static_cast<unsigned long long>(status.incarnation()), Age(status.uptime_micros()).c_str(),
         status.version().c_str());
  printf("  calls         %llu answered, %llu failed\n",
         static_cast<unsigned long long>(status.num_requests_ok()),
         static_cast<unsigned long long>(status.num_requests_failed()));
  printf("  steps         %llu done, %llu replayed, %d in flight on %d lane%s\n",
         static_cast<unsigned long long>(status.num_steps()),
         static_cast<unsigned long long>(status.num_replays()), queue.num_steps_in_flight(),
         status.num_lanes(), status.num_lanes() == 1 ? "" : "s");
  printf("  queue         %lld calls, %lld of %lld tokens, %s of %s%s\n",
         static_cast<long long>(queue.num_requests()), static_cast<long long>(queue.num_tokens()),
         static_cast<long long>(queue.max_tokens()), Bytes(queue.num_bytes()).c_str(),
         Bytes(queue.max_bytes()).c_str(),
         queue.oldest_age_micros() == 0
             ? ""
             : absl::StrCat(", oldest ", Age(queue.oldest_age_micros())).c_str());
  if (status.load_imbalance() > 0) {
    printf("  balance       most rows on one rank / mean: %.2f\n", status.load_imbalance());
  }
  PrintRanks(status);
}

absl::Status Run() {
  const absl::Duration interval = absl::GetFlag(FLAGS_watch);
  if (interval < absl::ZeroDuration() || interval == absl::InfiniteDuration()) {
    return FlagError(absl::StrCat("--watch is ", absl::FormatDuration(interval),
                                  "; it takes a time between two tables, e.g. 500ms or 2s"));
  }
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ClientFromFlags();
  if (!client.ok()) return client.status();
  while (true) {
    const absl::StatusOr<v1::GetStatusResponse> status =
        (*client)->GetStatus(CallOptionsFromFlags());
    // A server of ours that does not serve AdminService, or something else.
    if (absl::IsUnimplemented(status.status()) &&
        (*client)->ListModels(CallOptionsFromFlags()).ok()) {
      return absl::FailedPreconditionError(
          "the server at this address tells its status only if it is started with --allow_admin");
    }
    if (!status.ok()) return status.status();
    if (JsonWanted()) {
      if (absl::Status printed = PrintJson(*status); !printed.ok()) return printed;
    } else {
      PrintStatus(*status);
    }
    if (interval <= absl::ZeroDuration()) return absl::OkStatus();
    fflush(stdout);
    absl::SleepFor(interval);
  }
}

}  // namespace

const Command kStatusCommand = {
    "status",
    "what a server is doing: epoch, ranks, steps, queue, balance (--allow_admin on the server)",
    "  --watch=2s   print again every so often\n"
    "  --json       as JSON\n\n"
    "  expertmesh status\n",
    "status_command.cc json_output.cc connection_flags.cc", Run};

}  // namespace expertmesh
