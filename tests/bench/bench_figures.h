#ifndef EXPERTMESH_TESTS_BENCH_BENCH_FIGURES_H_
#define EXPERTMESH_TESTS_BENCH_BENCH_FIGURES_H_

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace expertmesh {

inline void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::_Exit(1);
}

inline double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

template <typename Run>
double Seconds(Run run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of this thread's core, whatever else wants it.
template <typename Run>
double CoreSeconds(Run run) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  run();
  return now() - start;
}

// One line: what was measured, in its unit, and the figure that it must reach.
inline void PrintFigure(const std::string& what, double value, const char* unit, const char* must,
                        double limit, bool reached) {
  std::printf("%-66s %10.3f %-9s (%s %.2f)%s\n", what.c_str(), value, unit, must, limit,
              reached ? "" : "  NOT REACHED");
  std::fflush(stdout);
}
inline void PrintAtMost(const std::string& what, double value, const char* unit, double limit) {
  PrintFigure(what, value, unit, "at most", limit, value <= limit);
}
inline void PrintAtLeast(const std::string& what, double value, const char* unit, double limit) {
  PrintFigure(what, value, unit, "at least", limit, value >= limit);
}

// [num_tokens, topk] different experts for each token.
inline std::vector<int32_t> RandomTopk(int64_t num_tokens, int32_t topk, int32_t num_experts) {
  std::mt19937_64 random(1);
  std::vector<int32_t> ids;
  ids.reserve(num_tokens * topk);
  for (int64_t token = 0; token < num_tokens; ++token) {
    while (static_cast<int64_t>(ids.size()) < (token + 1) * topk) {
      const auto id = static_cast<int32_t>(random() % num_experts);
      if (std::find(ids.begin() + token * topk, ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_BENCH_BENCH_FIGURES_H_
