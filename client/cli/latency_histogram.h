#ifndef EXPERTMESH_CLIENT_CLI_LATENCY_HISTOGRAM_H_
#define EXPERTMESH_CLIENT_CLI_LATENCY_HISTOGRAM_H_

#include <cstdint>
#include <vector>

namespace expertmesh {

// Counts of values in buckets that grow with them: of a fixed size, however many values there are
// and however large. Count and maximum are exact, and so are values below 256; a percentile of
// larger ones is within 0.4 % of the exact one. Not thread safe.
class LatencyHistogram {
 public:
  LatencyHistogram();

  // Of a negative value 0 is counted.
  void Add(int64_t value);
  void Clear();

  int64_t count() const { return count_; }
  int64_t max() const { return max_; }  // 0 of none
  // The value that `fraction` of the values do not exceed (nearest rank); 0 of none.
  int64_t Percentile(double fraction) const;

 private:
  std::vector<int64_t> counts_;
  int64_t count_ = 0;
  int64_t max_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_LATENCY_HISTOGRAM_H_
