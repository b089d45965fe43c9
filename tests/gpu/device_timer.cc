#include "tests/gpu/device_timer.h"

#include <algorithm>
#include <array>

#include "tests/gpu/device_memory.h"

namespace expertmesh {
namespace {

constexpr double kSecondsPerRound = 0.05;
constexpr int kRounds = 5;
constexpr int kMaxLaunches = 1000;

class Events {
 public:
  Events() {
    CheckCuda(cudaEventCreate(&begin_), "cudaEventCreate");
    CheckCuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Events() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  double Seconds(cudaStream_t stream, int launches, const std::function<cudaError_t()>& launch) {
    CheckCuda(cudaEventRecord(begin_, stream), "cudaEventRecord");
    for (int i = 0; i < launches; ++i) CheckCuda(launch(), "launch");
    CheckCuda(cudaEventRecord(end_, stream), "cudaEventRecord");
    CheckCuda(cudaEventSynchronize(end_), "what was launched");
    float milliseconds = 0;
    CheckCuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace

double SecondsPerLaunch(cudaStream_t stream, const std::function<cudaError_t()>& launch) {
  Events events;
  static_cast<void>(events.Seconds(stream, 2, launch));
  const double once = std::max(events.Seconds(stream, 2, launch) / 2, 1e-7);
  const int launches =
      static_cast<int>(std::clamp(kSecondsPerRound / once, 1.0, static_cast<double>(kMaxLaunches)));
  std::array<double, kRounds> rounds;
  for (double& seconds : rounds) seconds = events.Seconds(stream, launches, launch) / launches;
  std::sort(rounds.begin(), rounds.end());
  return rounds[kRounds / 2];
}

}  // namespace expertmesh
