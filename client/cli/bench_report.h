#ifndef EXPERTMESH_CLIENT_CLI_BENCH_REPORT_H_
#define EXPERTMESH_CLIENT_CLI_BENCH_REPORT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/bench_load.h"
#include "client/cli/bench_run.h"

namespace expertmesh {

// What became of the answers that were kept.
struct BenchVerification {
  int num_same = 0;  // the bytes that the same request gets when it is alone
  int num_different = 0;
  int num_not_comparable = 0;  // another placement or instruction set served it alone
  int num_right = 0;           // --check: agree with the checkpoint
  int num_wrong = 0;
  double max_error = 0;

  bool ok() const { return num_different == 0 && num_wrong == 0; }
};

// One line on standard error that is drawn again and again on a terminal; elsewhere only what one
// must know, once.
class BenchProgressLine {
 public:
  // `timeout`: of each call.
  explicit BenchProgressLine(absl::Duration timeout);
  void Show(const BenchProgress& progress);
  void Draw(const std::string& text);
  void Erase();

 private:
  void Say(const BenchProgress& progress);
  std::string WhatItWaitsFor(const BenchProgress& progress) const;

  const absl::Duration timeout_;
  const bool is_terminal_;
  bool has_said_wait_ = false;
  bool has_said_error_ = false;
};

// All of a run.
struct BenchReport {
  std::string model;
  int64_t hidden_size = 0;
  std::string skew;
  BenchLoadOptions load;
  BenchRunOptions run;
  BenchResult result;
  // An error: not done, calls made for it failed; CANCELLED: interrupted.
  absl::StatusOr<BenchVerification> verification = BenchVerification();
};

// To standard output. A figure that nothing was measured for is left out, in JSON null.
void PrintBenchText(const BenchReport& report);
void PrintBenchJson(const BenchReport& report);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_BENCH_REPORT_H_
