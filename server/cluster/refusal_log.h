#ifndef EXPERTMESH_SERVER_CLUSTER_REFUSAL_LOG_H_
#define EXPERTMESH_SERVER_CLUSTER_REFUSAL_LOG_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/ops/clock.h"

namespace expertmesh {

// The log's lines about ranks that were refused. One that is tries again twice a second, so there
// is a line at once for each of them and reason, then at most one every kInterval, which says how
// often that was. Thread safe; blocks as long as stderr does. Memory is bounded, whatever comes.
class RefusalLog {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(10);
  // Told one by one; more are counted together.
  static constexpr size_t kMaxKinds = 64;

  // `clock` outlives this object.
  explicit RefusalLog(const Clock* clock) : clock_(*clock) {}

  // `address`: for people, may be empty.
  void Add(int32_t ep_rank, const std::string& address, absl::string_view why);
  // The rest of those that have ended; Add does it as well.
  void TellDue();

 private:
  struct Kind {
    int64_t num_untold = 0;
    absl::Time told_at;
  };
  using Key = std::tuple<int32_t, std::string, std::string>;  // rank, address, why
  struct Line {
    Key key;
    int64_t times = 0;
  };

  // With mutex_; forgets those of whom nothing has been heard for kInterval.
  std::vector<Line> TakeDue(absl::Time now);
  static void Tell(const std::vector<Line>& lines);

  const Clock& clock_;
  std::mutex mutex_;
  std::map<Key, Kind> kinds_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_REFUSAL_LOG_H_
