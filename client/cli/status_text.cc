#include "client/cli/status_text.h"

#include <cstdint>
#include <iterator>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "client/cli/text_table.h"

namespace expertmesh {
namespace {

std::string Bytes(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return absl::StrFormat(unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
}

// As exact as a person reads it.
std::string Age(int64_t micros) {
  const absl::Duration age = absl::Microseconds(micros);
  const absl::Duration unit = age < absl::Seconds(1)    ? absl::Milliseconds(1)
                              : age < absl::Seconds(60) ? absl::Milliseconds(100)
                                                        : absl::Seconds(1);
  const absl::Duration shown = absl::Trunc(age, unit);
  return shown == absl::ZeroDuration() ? "0s" : absl::FormatDuration(shown);
}

std::string Memory(const v1::RankStatus& rank) {
  if (rank.memory_used_bytes() == 0) return "";
  if (rank.memory_limit_bytes() == 0) return Bytes(rank.memory_used_bytes());
  return absl::StrCat(Bytes(rank.memory_used_bytes()), " of ", Bytes(rank.memory_limit_bytes()));
}

// RANK_STATE_STANDING_BY -> standing by.
std::string State(const v1::RankStatus& rank) {
  std::string state = absl::StrReplaceAll(
      absl::AsciiStrToLower(absl::StripPrefix(v1::RankState_Name(rank.state()), "RANK_STATE_")),
      {{"_", " "}});
  if (rank.state() == v1::RANK_STATE_LOADING) {
    absl::StrAppendFormat(&state, " %.0f%%", 100 * rank.load_progress());
  }
  return state;
}

// What the group waits for.
std::string WhyNotReady(const v1::GetStatusResponse& status) {
  std::vector<std::string> missing;
  for (const v1::RankStatus& rank : status.ranks()) {
    if (rank.state() == v1::RANK_STATE_ACTIVE || rank.state() == v1::RANK_STATE_STANDING_BY ||
        rank.state() == v1::RANK_STATE_TEARING_DOWN) {
      continue;
    }
    missing.push_back(absl::StrCat(rank.ep_rank(), " (", State(rank), ")"));
  }
  if (status.draining() || missing.empty()) return status.detail();
  return absl::StrCat("waiting for rank", missing.size() == 1 ? " " : "s ",
                      absl::StrJoin(missing, ", "));
}

std::string RankTable(const v1::GetStatusResponse& status) {
  TextTable table({{"rank", ColumnAlign::kRight},
                   {"state"},
                   {"host"},
                   {"heartbeat", ColumnAlign::kRight},
                   {"experts x layers", ColumnAlign::kRight},
                   {"weights", ColumnAlign::kRight},
                   {"memory", ColumnAlign::kRight},
                   {"steps", ColumnAlign::kRight},
                   {"expert rows", ColumnAlign::kRight},
                   {"kernels"},
                   {"why"}});
  for (const v1::RankStatus& rank : status.ranks()) {
    const bool is_there =
        rank.state() != v1::RANK_STATE_MISSING && rank.state() != v1::RANK_STATE_LOST &&
        rank.state() != v1::RANK_STATE_LEFT && rank.state() != v1::RANK_STATE_REFUSED;
    const bool is_remote = rank.address() != "in-process";
    table.AddRow(
        {absl::StrCat(rank.ep_rank()), State(rank), rank.address(),
         is_there && is_remote ? absl::StrCat(Age(rank.heartbeat_age_micros()), " ago") : "",
         rank.num_experts() > 0 ? absl::StrCat(rank.num_experts()) : "",
         rank.weight_bytes() > 0 ? Bytes(rank.weight_bytes()) : "", Memory(rank),
         is_there ? absl::StrCat(rank.num_steps()) : "",
         is_there ? absl::StrCat(rank.num_expert_rows()) : "", rank.instruction_set(),
         rank.detail()});
  }
  return table.Text();
}

}  // namespace

std::string StatusText(const v1::GetStatusResponse& status) {
  const v1::QueueStatus& queue = status.queue();
  std::string text =
      absl::StrCat(status.model().empty() ? "(no model)" : status.model(), ": ",
                   status.draining() ? absl::StrCat("draining, ", WhyNotReady(status))
                   : status.ready()  ? "ready"
                                     : absl::StrCat("not ready, ", WhyNotReady(status)),
                   "\n");
  const auto line = [&text](const char* name, const std::string& words) {
    absl::StrAppendFormat(&text, "  %-13s %s\n", name, words);
  };
  line("epoch", status.epoch() == 0
                    ? "none: calls wait for one until their deadline"
                    : absl::StrFormat("%d, for %s, %d rank%s", status.epoch(),
                                      Age(status.epoch_age_micros()), status.ep_size(),
                                      status.ep_size() == 1 ? "" : "s"));
  line("control plane",
       absl::StrFormat("up %s, version %s, incarnation %016x", Age(status.uptime_micros()),
                       status.version(), status.incarnation()));
  line("calls", absl::StrFormat("%d answered, %d failed", status.num_requests_ok(),
                                status.num_requests_failed()));
  line("steps", absl::StrFormat("%d done, %d replayed, %d in flight%s", status.num_steps(),
                                status.num_replays(), queue.num_steps_in_flight(),
                                status.num_lanes() == 0
                                    ? ""
                                    : absl::StrFormat(" on %d lane%s", status.num_lanes(),
                                                      status.num_lanes() == 1 ? "" : "s")));
  if (queue.max_bytes() > 0) {
    line("queue",
         absl::StrFormat("%d call%s, %d of %d tokens, %s of %s%s", queue.num_requests(),
                         queue.num_requests() == 1 ? "" : "s", queue.num_tokens(),
                         queue.max_tokens(), Bytes(queue.num_bytes()), Bytes(queue.max_bytes()),
                         queue.oldest_age_micros() == 0
                             ? ""
                             : absl::StrCat(", the oldest for ", Age(queue.oldest_age_micros()))));
  }
  if (status.load_imbalance() > 0) {
    line("balance", absl::StrFormat("the busiest rank has %.2f times the mean of expert rows",
                                    status.load_imbalance()));
  }
  return absl::StrCat(text, "\n", RankTable(status));
}

}  // namespace expertmesh
