#include "server/ops/metrics.h"

#include <civetweb.h>
#include <netdb.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {

void Counter::Increment(int64_t by) const {
  if (impl_ != nullptr) {
    static_cast<prometheus::Counter*>(impl_)->Increment(static_cast<double>(by));
  }
}

double Counter::value() const {
  return impl_ == nullptr ? 0 : static_cast<prometheus::Counter*>(impl_)->Value();
}

void Gauge::Set(double value) const {
  if (impl_ != nullptr) static_cast<prometheus::Gauge*>(impl_)->Set(value);
}

void Gauge::Add(double delta) const {
  if (impl_ != nullptr) static_cast<prometheus::Gauge*>(impl_)->Increment(delta);
}

double Gauge::value() const {
  return impl_ == nullptr ? 0 : static_cast<prometheus::Gauge*>(impl_)->Value();
}

void Histogram::Observe(double value) const {
  if (impl_ != nullptr) static_cast<prometheus::Histogram*>(impl_)->Observe(value);
}

namespace {

prometheus::MetricFamily ToPrometheus(MetricFamily family) {
  prometheus::MetricFamily out;
  out.name = std::move(family.name);
  out.help = std::move(family.help);
  const bool is_counter = family.kind == MetricFamily::Kind::kCounter;
  out.type = is_counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
  for (MetricSample& sample : family.samples) {
    prometheus::ClientMetric& metric = out.metric.emplace_back();
    for (auto& [name, value] : sample.labels) {
      metric.label.push_back({std::move(name), std::move(value)});
    }
    (is_counter ? metric.counter.value : metric.gauge.value) = sample.value;
  }
  return out;
}

}  // namespace

struct MetricsRegistry::Impl : prometheus::Collectable {
  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<MetricFamily> collected;
    {
      const std::lock_guard<std::mutex> lock(refresh_mutex);
      if (refresh) refresh();
      if (collect) collected = collect();
    }
    std::vector<prometheus::MetricFamily> families = registry.Collect();
    for (MetricFamily& family : collected) families.push_back(ToPrometheus(std::move(family)));
    return families;
  }

  prometheus::Registry registry;
  mutable std::mutex refresh_mutex;
  std::function<void()> refresh;
  std::function<std::vector<MetricFamily>()> collect;
};

namespace {

prometheus::Labels ToLabels(const MetricLabels& labels) {
  return prometheus::Labels(labels.begin(), labels.end());
}

}  // namespace

MetricsRegistry::MetricsRegistry() : impl_(std::make_shared<Impl>()) {}
MetricsRegistry::~MetricsRegistry() = default;

Counter MetricsRegistry::AddCounter(const std::string& name, const std::string& help,
                                    const MetricLabels& labels) {
  return Counter(&prometheus::BuildCounter()
                      .Name(name)
                      .Help(help)
                      .Register(impl_->registry)
                      .Add(ToLabels(labels)));
}

Gauge MetricsRegistry::AddGauge(const std::string& name, const std::string& help,
                                const MetricLabels& labels) {
  return Gauge(&prometheus::BuildGauge()
                    .Name(name)
                    .Help(help)
                    .Register(impl_->registry)
                    .Add(ToLabels(labels)));
}

Histogram MetricsRegistry::AddHistogram(const std::string& name, const std::string& help,
                                        const MetricLabels& labels,
                                        const std::vector<double>& upper_bounds) {
  return Histogram(&prometheus::BuildHistogram()
                        .Name(name)
                        .Help(help)
                        .Register(impl_->registry)
                        .Add(ToLabels(labels), upper_bounds));
}

void MetricsRegistry::SetRefresh(std::function<void()> refresh) {
  const std::lock_guard<std::mutex> lock(impl_->refresh_mutex);
  impl_->refresh = std::move(refresh);
}

void MetricsRegistry::SetCollector(std::function<std::vector<MetricFamily>()> collect) {
  const std::lock_guard<std::mutex> lock(impl_->refresh_mutex);
  impl_->collect = std::move(collect);
}

std::string MetricsRegistry::Serialize() const {
  return prometheus::TextSerializer().Serialize(impl_->Collect());
}

std::vector<double> ExponentialBounds(double first, double factor, int count) {
  std::vector<double> bounds;
  for (double bound = first; count > 0; --count, bound *= factor) bounds.push_back(bound);
  return bounds;
}

namespace {

// Connects to a numeric "host:port" and hangs up.
void Knock(const std::string& address, int port) {
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    (void)connect(fd, found->ai_addr, found->ai_addrlen);
    close(fd);
  }
  freeaddrinfo(found);
}

}  // namespace

struct MetricsExposer::Impl {
  ~Impl() { mg_stop(server); }

  const MetricsRegistry* registry = nullptr;
  mg_context* server = nullptr;
  std::string address;
  int port = 0;
};

MetricsExposer::MetricsExposer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// civetweb looks for its stop flag when somebody connects, else every two seconds.
MetricsExposer::~MetricsExposer() {
  std::future<void> stopped =
      std::async(std::launch::async, [this] { mg_stop(std::exchange(impl_->server, nullptr)); });
  while (stopped.wait_for(std::chrono::milliseconds(10)) == std::future_status::timeout) {
    Knock(impl_->address, impl_->port);
  }
}

int MetricsExposer::port() const { return impl_->port; }

// prometheus-cpp's own exposer would add series about itself, with quantiles that are NaN until
// somebody has scraped for a while.
absl::StatusOr<std::unique_ptr<MetricsExposer>> MetricsExposer::Start(
    const MetricsRegistry* registry, const std::string& address) {
  auto impl = std::make_unique<Impl>();
  impl->registry = registry;
  impl->address = address;
  const mg_callbacks callbacks = {};
  const char* const options[] = {"listening_ports", address.c_str(), "num_threads", "2", nullptr};
  static const bool initialized = (mg_init_library(0), true);
  static_cast<void>(initialized);
  impl->server = mg_start(&callbacks, nullptr, const_cast<const char**>(options));
  mg_server_port port = {};
  if (impl->server == nullptr || mg_get_server_ports(impl->server, 1, &port) != 1) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address,
                     " (taken, or not an address of this machine); port 0: the "
                     "system chooses one"));
  }
  impl->port = port.port;
  mg_set_request_handler(
      impl->server, "/metrics$",
      [](mg_connection* connection, void* user) {
        const std::string text = static_cast<const MetricsRegistry*>(user)->Serialize();
        mg_printf(connection,
                  "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                  "Content-Length: %zu\r\n\r\n",
                  text.size());
        mg_write(connection, text.data(), text.size());
        return 200;
      },
      const_cast<MetricsRegistry*>(registry));
  return std::unique_ptr<MetricsExposer>(new MetricsExposer(std::move(impl)));
}

}  // namespace expertmesh
