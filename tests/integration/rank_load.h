#ifndef EXPERTMESH_TESTS_INTEGRATION_RANK_LOAD_H_
#define EXPERTMESH_TESTS_INTEGRATION_RANK_LOAD_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {

// Small, with two layers of 12 experts.
inline constexpr char kRankCheckpoint[] = "tests/golden/qwen3_moe_bfloat16";
// For what must come, however busy the machine is.
inline constexpr absl::Duration kPlenty = absl::Seconds(60);
// Short, for tests that wait until a silent rank is lost; instrumented processes take longer to say
// their first word.
inline constexpr int kHeartbeatTimeoutMillis = kResidentBytesMeanSomething ? 500 : 3000;
std::string HeartbeatFlag();

// Up to 59 tokens, with ids of -1 and ids that come twice among them.
v1::ForwardRequest RandomRequest(const v1::GetModelResponse& model, uint64_t seed);
// Router logits, float16 or float32, for the request's layer and as many tokens as it has.
void AddRandomLogits(const v1::GetModelResponse& model, v1::DataType dtype, uint64_t seed,
                     v1::ForwardRequest* request);

// What one process with as many ranks inside answers.
class Oracle {
 public:
  explicit Oracle(int32_t num_ranks, const char* checkpoint = kRankCheckpoint)
      : Oracle(num_ranks, {.checkpoint = checkpoint}) {}
  Oracle(int32_t num_ranks, ServerUnderTest::Options options);
  bool ok() const { return server_ != nullptr && model.layers_size() > 0; }
  std::string Answer(const v1::ForwardRequest& request);

  v1::GetModelResponse model;

 private:
  std::unique_ptr<ServerUnderTest> server_;
};

// Callers that never rest. Each call must end OK with the right bytes, or UNAVAILABLE, in time.
class RankLoad {
 public:
  struct Options {
    // The control plane may die as well, and connections with it.
    bool control_may_die = false;
    int num_callers = 3;
    // Of each call. A rank that stops is noticed, and its step lost, well within it. Long also
    // because the answer that nobody could be found comes a fiftieth of it before its end, which a
    // busy machine may need to bring it.
    absl::Duration timeout = kPlenty / 2;
  };
  RankLoad(RankCluster* cluster, Oracle* oracle, uint64_t seed, Options options);
  RankLoad(RankCluster* cluster, Oracle* oracle, uint64_t seed)
      : RankLoad(cluster, oracle, seed, Options()) {}
  ~RankLoad() { Stop(); }
  void Stop();
  int64_t num_ok() const { return num_ok_; }
  int64_t num_unavailable() const { return num_unavailable_; }
  // Until so many more calls have been answered.
  bool WaitForAnswers(int64_t count) const;

 private:
  void Run(size_t first);

  RankCluster* const cluster_;
  const Options options_;
  std::vector<v1::ForwardRequest> requests_;
  std::vector<std::string> answers_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> num_ok_{0};
  std::atomic<int64_t> num_unavailable_{0};
  std::vector<std::thread> threads_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_RANK_LOAD_H_
