#include "client/cli/latency_histogram.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/numeric/bits.h"

namespace expertmesh {
namespace {

// Each power of two from kExact on is cut into kPerOctave buckets, the first of which are as wide
// as two values: the middle of a bucket is at most 1 / (2 * kPerOctave) off.
constexpr int64_t kPerOctave = 128;
constexpr int64_t kExact = 2 * kPerOctave;
constexpr int kExactBits = 8;
constexpr int kValueBits = 63;
static_assert(kExact == int64_t{1} << kExactBits);

size_t BucketOf(int64_t value) {
  if (value < kExact) return static_cast<size_t>(value);
  const int shift = absl::bit_width(static_cast<uint64_t>(value)) - kExactBits;
  return static_cast<size_t>(shift * kPerOctave + (value >> shift));
}

int64_t MiddleOf(size_t bucket) {
  const auto index = static_cast<int64_t>(bucket);
  if (index < kExact) return index;
  const int64_t shift = index / kPerOctave - 1;
  const int64_t first = (index - shift * kPerOctave) << shift;
  return first + (int64_t{1} << shift) / 2;
}

}  // namespace

LatencyHistogram::LatencyHistogram()
    : counts_(static_cast<size_t>(kExact + (kValueBits - kExactBits) * kPerOctave)) {}

void LatencyHistogram::Add(int64_t value) {
  value = std::max<int64_t>(value, 0);
  ++counts_[BucketOf(value)];
  ++count_;
  max_ = std::max(max_, value);
}

void LatencyHistogram::Clear() {
  std::fill(counts_.begin(), counts_.end(), 0);
  count_ = max_ = 0;
}

int64_t LatencyHistogram::Percentile(double fraction) const {
  const double nearest = std::ceil(fraction * static_cast<double>(count_));
  if (nearest >= static_cast<double>(count_)) return max_;
  const int64_t rank = std::max<int64_t>(static_cast<int64_t>(nearest), 1);
  int64_t below = 0;
  for (size_t bucket = 0; bucket < counts_.size(); ++bucket) {
    below += counts_[bucket];
    if (below >= rank) return std::min(MiddleOf(bucket), max_);
  }
  return max_;
}

}  // namespace expertmesh
