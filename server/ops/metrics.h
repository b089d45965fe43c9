#ifndef EXPERTMESH_SERVER_OPS_METRICS_H_
#define EXPERTMESH_SERVER_OPS_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace expertmesh {

// Handles to series of a MetricsRegistry: copied freely, valid as long as the registry, thread
// safe, non-blocking. A default-made handle belongs to no series and ignores what it is told, so
// that code may run without metrics.
class Counter {
 public:
  Counter() = default;
  void Increment(int64_t by = 1) const;  // by >= 0
  double value() const;

 private:
  friend class MetricsRegistry;
  explicit Counter(void* impl) : impl_(impl) {}
  void* impl_ = nullptr;
};

class Gauge {
 public:
  Gauge() = default;
  void Set(double value) const;
  void Add(double delta) const;  // may be negative
  double value() const;

 private:
  friend class MetricsRegistry;
  explicit Gauge(void* impl) : impl_(impl) {}
  void* impl_ = nullptr;
};

class Histogram {
 public:
  Histogram() = default;
  void Observe(double value) const;

 private:
  friend class MetricsRegistry;
  explicit Histogram(void* impl) : impl_(impl) {}
  void* impl_ = nullptr;
};

using MetricLabels = std::vector<std::pair<std::string, std::string>>;

struct MetricSample {
  MetricLabels labels;
  double value = 0;
};

// A family of series that are looked up when they are read, so that they may come and go.
struct MetricFamily {
  enum class Kind : uint8_t { kCounter, kGauge };
  std::string name;
  std::string help;
  Kind kind = Kind::kGauge;
  std::vector<MetricSample> samples;
};

// Names follow Prometheus: snake case, base units, `_total` for counters. The same name and labels
// give the same series again; a name must keep its kind. Thread safe; adding takes a lock.
class MetricsRegistry {
 public:
  MetricsRegistry();
  ~MetricsRegistry();
  Counter AddCounter(const std::string& name, const std::string& help, const MetricLabels& labels);
  Gauge AddGauge(const std::string& name, const std::string& help, const MetricLabels& labels);
  // `upper_bounds` ascending; the last bucket (+Inf) is implied.
  Histogram AddHistogram(const std::string& name, const std::string& help,
                         const MetricLabels& labels, const std::vector<double>& upper_bounds);
  // `refresh` runs before every read (Serialize and scrapes), on the reading thread, to set gauges
  // that are cheaper to look up than to keep. Null ends that; when SetRefresh has returned, the
  // function set before is not running and will not run again.
  void SetRefresh(std::function<void()> refresh);
  // Likewise: `collect` gives families beside the registry's own, of other names.
  void SetCollector(std::function<std::vector<MetricFamily>()> collect);
  // Prometheus text format 0.0.4.
  std::string Serialize() const;

 private:
  friend class MetricsExposer;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// `count` bounds, each `factor` times the one before.
std::vector<double> ExponentialBounds(double first, double factor, int count);

// Serves GET /metrics on threads of its own until destroyed.
class MetricsExposer {
 public:
  // `address` "host:port", "[host]:port"; port 0: the kernel's choice. UNAVAILABLE when it cannot
  // be bound (the port is taken, the address is not this machine's). `registry` outlives it.
  static absl::StatusOr<std::unique_ptr<MetricsExposer>> Start(const MetricsRegistry* registry,
                                                               const std::string& address);
  ~MetricsExposer();
  int port() const;

 private:
  struct Impl;
  explicit MetricsExposer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_METRICS_H_
