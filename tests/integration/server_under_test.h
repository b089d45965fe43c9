#ifndef EXPERTMESH_TESTS_INTEGRATION_SERVER_UNDER_TEST_H_
#define EXPERTMESH_TESTS_INTEGRATION_SERVER_UNDER_TEST_H_

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "expertmesh/v1/admin.pb.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "tests/integration/process.h"

namespace expertmesh {

// How a call ended, with the google.rpc details of its error.
struct CallOutcome {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string message;
  std::string reason;
  std::string field;
  std::string value;
  std::string limit;
  std::string bad_request_field;  // of google.rpc.BadRequest
  absl::Duration retry_after = absl::ZeroDuration();
  v1::ForwardResponse response;

  bool ok() const { return code == absl::StatusCode::kOk; }
};
std::ostream& operator<<(std::ostream& out, const CallOutcome& outcome);

// A call in flight.
class PendingForward {
 public:
  struct State;
  explicit PendingForward(std::shared_ptr<State> state) : state_(std::move(state)) {}
  void Cancel();
  bool IsDone() const;
  CallOutcome Wait();  // its own deadline bounds it

 private:
  std::shared_ptr<State> state_;
};

// expertmesh-control-plane as a process of its own, on ports that the kernel chose, and a client of
// it that uses generated code alone.
class ServerUnderTest {
 public:
  struct Options {
    std::string program = "expertmesh-control-plane";
    std::string checkpoint;
    std::vector<std::string> args;  // besides checkpoint, listen, metrics_listen
    std::vector<std::string> environment;
    bool wait_until_serving = true;
  };
  // Fails the current test and returns null when the server does not come up.
  static std::unique_ptr<ServerUnderTest> Start(const Options& options);
  ~ServerUnderTest();

  ServerProcess& process() { return *process_; }
  int port() const { return port_; }
  std::string address() const;

  // No deadline at all with absl::InfiniteDuration().
  CallOutcome Forward(const v1::ForwardRequest& request,
                      absl::Duration timeout = absl::Seconds(60));
  PendingForward StartForward(const v1::ForwardRequest& request,
                              absl::Duration timeout = absl::Seconds(60));
  absl::StatusOr<v1::GetModelResponse> GetModel(const std::string& model);
  absl::StatusOr<v1::ListModelsResponse> ListModels();
  absl::StatusOr<v1::ExplainResponse> Explain(const v1::ExplainRequest& request);
  absl::StatusOr<v1::GetStatusResponse> GetStatus();
  // Zero: the server's own time.
  absl::StatusOr<v1::DrainResponse> Drain(absl::Duration timeout);
  // "SERVING", "NOT_SERVING", "NOT_FOUND", or the error.
  std::string Health(const std::string& service);
  std::string HealthOverNewConnection();
  // Names that reflection lists.
  std::vector<std::string> ReflectedServices();

  // The text of GET /metrics.
  std::string Metrics();
  // One series with its labels as written; -1 when it is not there.
  double Metric(const std::string& series);

 private:
  struct Stubs;
  ServerUnderTest() = default;

  std::unique_ptr<ServerProcess> process_;
  int port_ = 0;
  int metrics_port_ = 0;
  std::unique_ptr<Stubs> stubs_;
};

// Elements of an answer, whatever its type.
std::vector<double> OutputValues(const v1::Tensor& tensor);

// "GET path" by HTTP/1.1 on loopback; the whole answer, empty when nobody answers.
std::string HttpGet(int port, const std::string& path);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_SERVER_UNDER_TEST_H_
