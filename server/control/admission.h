#ifndef EXPERTMESH_SERVER_CONTROL_ADMISSION_H_
#define EXPERTMESH_SERVER_CONTROL_ADMISSION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace expertmesh {

struct AdmissionLimits {
  int64_t max_bytes_in_flight = int64_t{4} << 30;
  int64_t max_tokens_in_flight = int64_t{1} << 20;
};

// Counts what admitted calls hold, and how fast it goes. Not thread safe.
class Admission {
 public:
  explicit Admission(const AdmissionLimits& limits) : limits_(limits) {}

  // OK: counted until Release. RESOURCE_EXHAUSTED: QUEUE_FULL, advising to come back when, at the
  // recent pace, there will be room; or MESSAGE_TOO_LARGE, naming value and limit, when the call
  // would not fit an idle server.
  absl::Status Admit(int64_t bytes, int64_t tokens, absl::Time now);
  // `now` feeds the pace: what is released was worked off.
  void Release(int64_t bytes, int64_t tokens, absl::Time now);

  int64_t bytes_in_flight() const { return bytes_in_flight_; }
  int64_t tokens_in_flight() const { return tokens_in_flight_; }

 private:
  // A sum that forgets: what was added t ago counts exp(-t / kMemory).
  struct Pace {
    double sum = 0.0;
    absl::Time at = absl::InfinitePast();
    void Add(double amount, absl::Time now);
    double PerSecond(absl::Time now) const;
  };
  absl::Duration TimeToFree(double excess, const Pace& pace, absl::Time now) const;

  const AdmissionLimits limits_;
  int64_t bytes_in_flight_ = 0;
  int64_t tokens_in_flight_ = 0;
  Pace bytes_pace_;
  Pace tokens_pace_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_ADMISSION_H_
