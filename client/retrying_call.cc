#include "client/retrying_call.h"

#include <grpcpp/alarm.h>
#include <grpcpp/client_context.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_error.h"

namespace expertmesh {
namespace {

double RandomUnit() {
  thread_local std::minstd_rand generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(0.0, 1.0)(generator);
}

// Nobody cancels these calls here, and the service gives its errors details: a bare CANCELLED is
// gRPC's own, of a server that was shut down between a request's first byte and its handler.
absl::Status StatusOfAttempt(const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::CANCELLED && status.error_details().empty()) {
    return absl::UnavailableError("the server stopped before it took the call");
  }
  return StatusOfServer(status);
}

struct Attempt {
  grpc::ClientContext context;
  grpc::ByteBuffer response;
};

struct Operation : std::enable_shared_from_this<Operation> {
  std::shared_ptr<grpc::GenericStub> stub;
  std::string method;
  grpc::ByteBuffer request;
  RetryPolicy policy;
  // On the steady clock: no change of the wall clock ends the retries or prolongs them.
  std::chrono::steady_clock::time_point deadline;
  RetryingCall::Done done;
  int attempt = 0;
  absl::Status attempt_before;
  std::unique_ptr<Attempt> running;
  grpc::Alarm alarm;

  absl::Duration TimeLeft() const {
    return absl::FromChrono(deadline - std::chrono::steady_clock::now());
  }

  void StartAttempt() {
    running = std::make_unique<Attempt>();
    running->context.set_deadline(absl::ToChronoTime(absl::Now() + TimeLeft()));
    stub->UnaryCall(&running->context, method, grpc::StubOptions(), &request, &running->response,
                    [self = shared_from_this()](grpc::Status status) { self->Finished(status); });
  }

  // Lets go of the channel first: whoever waits for the answer may drop it next, and gRPC 1.51
  // aborts when a channel's last reference goes on one of its own threads.
  void Answer(absl::StatusOr<grpc::ByteBuffer> answer) {
    running.reset();
    stub.reset();
    done(std::move(answer));
  }

  void Finished(const grpc::Status& grpc_status) {
    if (grpc_status.ok()) return Answer(std::move(running->response));
    const absl::Status status = WithAttemptBefore(StatusOfAttempt(grpc_status), attempt_before);
    ++attempt;
    const absl::Time now = absl::Now();
    const std::optional<absl::Duration> backoff =
        BackoffBeforeRetry(policy, status, attempt, now, now + TimeLeft(), RandomUnit());
    if (!backoff.has_value()) {
      return Answer(absl::IsResourceExhausted(status)
                        ? WithRequestBytes(status, static_cast<int64_t>(request.Length()))
                        : status);
    }
    attempt_before = status;
    // gRPC 1.51 keeps an alarm's callback after it has run, and the alarm is this object's: a
    // reference left in it would keep both, and the request, for ever.
    alarm.Set(absl::ToChronoTime(absl::Now() + *backoff),
              [self = shared_from_this()](bool) mutable {
                const std::shared_ptr<Operation> operation = std::exchange(self, nullptr);
                operation->StartAttempt();
              });
  }
};

}  // namespace

std::optional<absl::Duration> BackoffBeforeRetry(const RetryPolicy& policy,
                                                 const absl::Status& status, int attempt,
                                                 absl::Time now, absl::Time deadline,
                                                 double random) {
  if (attempt >= policy.max_attempts) return std::nullopt;
  std::optional<absl::Duration> advice;
  if (const auto details = GetServerErrorDetails(status)) advice = details->retry_after;
  const bool retryable =
      absl::IsUnavailable(status) || (absl::IsResourceExhausted(status) && advice.has_value());
  if (!retryable) return std::nullopt;
  const absl::Duration full =
      std::min(policy.max_backoff,
               policy.initial_backoff * std::pow(policy.backoff_multiplier, attempt - 1));
  const absl::Duration backoff =
      std::max(full * (0.5 + 0.5 * random), advice.value_or(absl::ZeroDuration()));
  if (now + backoff >= deadline) return std::nullopt;
  return backoff;
}

absl::Status WithAttemptBefore(const absl::Status& status, const absl::Status& before) {
  if (!absl::IsDeadlineExceeded(status) || before.ok() ||
      GetServerErrorDetails(status).has_value()) {
    return status;
  }
  return absl::DeadlineExceededError(absl::StrCat(status.message(), " (the attempt before ended ",
                                                  absl::StatusCodeToString(before.code()), ": ",
                                                  before.message(), ")"));
}

void RetryingCall::Start(std::shared_ptr<grpc::GenericStub> stub, std::string method,
                         grpc::ByteBuffer request, const RetryPolicy& policy, absl::Time deadline,
                         Done done) {
  auto operation = std::make_shared<Operation>();
  operation->stub = std::move(stub);
  operation->method = std::move(method);
  operation->request = std::move(request);
  operation->policy = policy;
  // A thousand hours, so that the sum cannot overflow.
  operation->deadline =
      std::chrono::steady_clock::now() +
      absl::ToChronoNanoseconds(std::min(deadline - absl::Now(), absl::Hours(1000)));
  operation->done = std::move(done);
  operation->StartAttempt();
}

}  // namespace expertmesh
