#include "server/cluster/refusal_log.h"

#include <utility>

#include "server/ops/logging.h"
#include "server/ops/shown_text.h"

namespace expertmesh {
namespace {

constexpr size_t kMaxWhyBytes = 512;

}  // namespace

void RefusalLog::Add(int32_t ep_rank, const std::string& address, absl::string_view why) {
  Key key(ep_rank, address, ShownText(why, kMaxWhyBytes));
  std::vector<Line> lines;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const absl::Time now = clock_.Now();
    lines = TakeDue(now);
    auto found = kinds_.find(key);
    if (found == kinds_.end() && kinds_.size() >= kMaxKinds) {
      key = Key(-1, "", "others, of which there are too many to name");
      found = kinds_.find(key);
    }
    if (found != kinds_.end()) {
      ++found->second.num_untold;
    } else {
      kinds_[key].told_at = now;
      lines.push_back({std::move(key), 1});
    }
  }
  Tell(lines);
}

void RefusalLog::TellDue() {
  std::vector<Line> lines;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    lines = TakeDue(clock_.Now());
  }
  Tell(lines);
}

std::vector<RefusalLog::Line> RefusalLog::TakeDue(absl::Time now) {
  std::vector<Line> lines;
  for (auto kind = kinds_.begin(); kind != kinds_.end();) {
    auto& [key, state] = *kind;
    if (now < state.told_at + kInterval) {
      ++kind;
    } else if (state.num_untold == 0) {
      kind = kinds_.erase(kind);
    } else {
      lines.push_back({key, std::exchange(state.num_untold, 0)});
      state.told_at = now;
      ++kind;
    }
  }
  return lines;
}

void RefusalLog::Tell(const std::vector<Line>& lines) {
  for (const Line& line : lines) {
    const auto& [ep_rank, address, why] = line.key;
    LogWarning("a rank was refused",
               {{"ep_rank", ep_rank}, {"address", address}, {"why", why}, {"times", line.times}});
  }
}

}  // namespace expertmesh
