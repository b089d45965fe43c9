// What one warm step asks of CUDA's driver, call by call: each costs the host microseconds, however
// small the step. The figures are exact, so that nobody adds a call unseen; who saves one lowers
// them.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/comm/in_process_communicator.h"
#include "server/model/synthetic_weight_source.h"
#include "server/rank/rank_engine.h"
#include "server/rank/rank_step.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/kernels/cuda/test_device.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {
namespace {

constexpr int32_t kExperts = 8;
constexpr int32_t kTopk = 2;
constexpr int64_t kHidden = 1024;
constexpr int64_t kRowBytes = 2 * kHidden;
constexpr int64_t kTokens = 128;  // 128 KiB for each of two ranks
constexpr int64_t kFewTokens = 4;
constexpr int64_t kManyTokens = 1200;
// Rows to their experts 2 * 4 bytes a token, the rank's sums 8 + 2 * (8 + 4), the last sum 8 + 8,
// and the ends of two lists of offsets.
constexpr int64_t kListBytes = kTokens * (8 + 32 + 16) + 2 * 16;

// What happened between two counts, or is to happen.
struct Calls {
  int64_t launches = 0;
  int64_t graph_launches = 0;
  int64_t copies_to_device = 0;
  int64_t bytes_to_device = 0;
  int64_t copies_to_host = 0;
  int64_t bytes_to_host = 0;
  // Upper bounds: an event that is recorded with nothing behind it costs no call.
  int64_t event_records = 0;
  int64_t event_waits = 0;
  // Of these a warm step makes none.
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t stream_creations = 0;
  int64_t synchronizations = 0;
  int64_t pageable_copies = 0;

  static Calls Between(const EmulatedCudaCounts& before, const EmulatedCudaCounts& after) {
    const auto calls = [&](std::initializer_list<const char*> functions) {
      int64_t count = 0;
      for (const char* function : functions)
        count += after.Calls(function) - before.Calls(function);
      return count;
    };
    Calls calls_made;
    calls_made.launches = after.launches - before.launches;
    calls_made.graph_launches = after.graph_launches - before.graph_launches;
    calls_made.copies_to_device = after.host_to_device.number - before.host_to_device.number;
    calls_made.bytes_to_device = after.host_to_device.size_bytes - before.host_to_device.size_bytes;
    calls_made.copies_to_host = after.device_to_host.number - before.device_to_host.number;
    calls_made.bytes_to_host = after.device_to_host.size_bytes - before.device_to_host.size_bytes;
    calls_made.event_records = calls({"cudaEventRecord"});
    calls_made.event_waits = calls({"cudaStreamWaitEvent"});
    calls_made.allocations = calls({"cudaMalloc", "cudaHostAlloc"});
    calls_made.frees = calls({"cudaFree", "cudaFreeHost"});
    calls_made.stream_creations =
        calls({"cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority"});
    calls_made.synchronizations =
        calls({"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"});
    calls_made.pageable_copies = after.pageable_copies - before.pageable_copies;
    return calls_made;
  }

  void Print(const std::string& what) const {
    std::printf(
        "%-44s launches %2d  graphs %d  to device %2d (%7d B)  to host %d (%6d B)  event records "
        "%2d\n",
        what.c_str(), static_cast<int>(launches), static_cast<int>(graph_launches),
        static_cast<int>(copies_to_device), static_cast<int>(bytes_to_device),
        static_cast<int>(copies_to_host), static_cast<int>(bytes_to_host),
        static_cast<int>(event_records));
  }
};

void ExpectCalls(const Calls& actual, const Calls& expected) {
  EXPECT_EQ(actual.launches, expected.launches);
  EXPECT_EQ(actual.graph_launches, expected.graph_launches);
  EXPECT_EQ(actual.copies_to_device, expected.copies_to_device);
  EXPECT_EQ(actual.bytes_to_device, expected.bytes_to_device);
  EXPECT_EQ(actual.copies_to_host, expected.copies_to_host);
  EXPECT_EQ(actual.bytes_to_host, expected.bytes_to_host);
  EXPECT_LE(actual.event_records, expected.event_records);
  EXPECT_LE(actual.event_waits, expected.event_waits);
  EXPECT_EQ(actual.allocations, 0);
  EXPECT_EQ(actual.frees, 0);
  EXPECT_EQ(actual.stream_creations, 0);
  EXPECT_EQ(actual.synchronizations, 0);
  EXPECT_EQ(actual.pageable_copies, 0);
}

// Ranks of one process on the emulated device, and steps over a layer of bfloat16.
class CudaStepCallsTest : public testing::Test {
 protected:
  CudaStepCallsTest() { ResetTestDevice(1); }
  ~CudaStepCallsTest() override {
    shards_.clear();
    engines_.clear();
    device_.reset();
    ResetTestDevice(1);
  }

  void MakeRanks(int32_t ep_size, int64_t num_tokens, bool shared, int64_t hidden_size = kHidden) {
    row_bytes_ = 2 * hidden_size;
    ModelSpec model;
    model.name = "m";
    model.architecture = "CallsForCausalLM";
    model.hidden_size = hidden_size;
    model.weight_dtype = DType::kBFloat16;
    LayerSpec layer;
    layer.num_experts = kExperts;
    layer.topk = kTopk;
    layer.intermediate_size = 8;
    layer.shared_intermediate_size = shared ? 8 : 0;
    layer.shared_gated = shared;
    model.layers.push_back(layer);
    const std::unique_ptr<SyntheticWeightSource> source =
        *SyntheticWeightSource::Create(std::move(model), 3);
    placement_.emplace(*Placement::Contiguous(kExperts, ep_size));
    device_ = OpenCudaDevice(0).value();
    std::vector<std::unique_ptr<Communicator>> communicators = NewInProcessCommunicators(
        ep_size, [this](std::byte* to, const std::byte* from, int64_t size_bytes) {
          return device_->CopyNow(to, from, size_bytes);
        });
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      RankEngineOptions options;
      options.ep_rank = rank;
      options.ep_size = ep_size;
      options.backend = NewCudaRankBackend(device_, ParallelForOptions{});
      engines_.push_back(std::make_unique<RankEngine>(std::move(options)));
      const absl::Status status =
          engines_[rank]->LoadLayer(*source, layer, *placement_, [](int64_t) {});
      ASSERT_TRUE(status.ok()) << status;
      engines_[rank]->EnterEpoch(8, 9, std::move(communicators[rank]));
    }
    num_tokens_ = num_tokens;
    shared_ = shared;
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int32_t k = 0; k < kTopk; ++k) {
        routing_.topk_ids.push_back(static_cast<int32_t>((3 * token + 5 * k) % kExperts));
        routing_.topk_weights.push_back(0.5f);
      }
    }
    routing_.topk = kTopk;
    // The in-process communicator borrows streams by the threads that happen to copy at once.
    std::vector<std::unique_ptr<Stream>> streams;
    for (int i = 0; i < 12; ++i) streams.push_back(device_->NewStream());
  }

  void PlanStepOf(DispatchMode strategy) {
    const RoutingSegment segment = routing_.Segment(0, num_tokens_);
    StepPlanParams params;
    params.header.incarnation = 8;
    params.header.epoch = 9;
    params.header.model = "m";
    params.header.layer = 0;
    params.header.activation_dtype = DType::kBFloat16;
    params.header.combine_dtype = DType::kBFloat16;
    params.header.output_dtype = DType::kBFloat16;
    params.header.include_shared_experts = shared_;
    params.segments = absl::MakeConstSpan(&segment, 1);
    params.placement = &*placement_;
    params.header.strategy = strategy;
    params.max_num_tokens = num_tokens_;
    plan_ = *PlanStep(params);
    shards_.clear();
    for (const StepSlice& slice : plan_.slices) {
      // Where a request's payload is received.
      shards_.push_back(
          device_->pinned_allocator()->Allocate(slice.num_source_tokens * row_bytes_).value());
    }
  }

  TokenShard Shard(size_t rank) const {
    TokenShard shard;
    shard.rows = {{shards_[rank].data(), plan_.slices[rank].num_source_tokens}};
    return shard;
  }

  void RunStep() {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < engines_.size(); ++rank) {
      threads.emplace_back([this, rank] {
        const absl::StatusOr<RankStepResult> result =
            engines_[rank]->RunStep(plan_.slices[rank], Shard(rank), Soon());
        EXPECT_TRUE(result.ok()) << result.status();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Of all ranks together.
  Calls CallsOfWarmStep(const std::string& what, DispatchMode strategy) {
    PlanStepOf(strategy);
    // An arena merges what it took into one block after its first step.
    for (int i = 0; i < 3; ++i) RunStep();
    const EmulatedCudaCounts before = CountEmulatedCuda();
    RunStep();
    const Calls calls = Calls::Between(before, CountEmulatedCuda());
    calls.Print(what);
    return calls;
  }

  static absl::Time Soon() { return absl::Now() + absl::Minutes(2); }

  int64_t row_bytes_ = 0;
  int64_t num_tokens_ = 0;
  bool shared_ = false;
  RandomRouting routing_;
  std::optional<Placement> placement_;
  std::shared_ptr<CudaDevice> device_;
  std::vector<std::unique_ptr<RankEngine>> engines_;
  StepPlan plan_;
  std::vector<Buffer> shards_;
};

TEST_F(CudaStepCallsTest, OneRankPhaseByPhase) {
  MakeRanks(1, kTokens, /*shared=*/false);
  ExpectCalls(CallsOfWarmStep("passthrough", DispatchMode::kPassthrough),
              {.launches = 7,
               .copies_to_device = 2,
               .bytes_to_device = kTokens * kRowBytes + kListBytes,
               .copies_to_host = 1,
               .bytes_to_host = kTokens * kRowBytes,
               .event_records = 3});
  const EmulatedCudaCounts start = CountEmulatedCuda();
  std::unique_ptr<RankStep> step = *engines_[0]->Begin(plan_.slices[0], Shard(0));
  const EmulatedCudaCounts begun = CountEmulatedCuda();
  ASSERT_TRUE(step->Compute().ok());
  const EmulatedCudaCounts computed = CountEmulatedCuda();
  ASSERT_TRUE(step->Finish(Soon()).ok());
  const EmulatedCudaCounts finished = CountEmulatedCuda();
  const Calls begin = Calls::Between(start, begun);
  const Calls compute = Calls::Between(begun, computed);
  const Calls finish = Calls::Between(computed, finished);
  begin.Print("passthrough, Begin");
  compute.Print("passthrough, Compute");
  finish.Print("passthrough, Finish");
  // Told, not held: what was enqueued in one phase may reach the device in the next.
}

TEST_F(CudaStepCallsTest, OneRankWithFewTokens) {
  MakeRanks(1, kFewTokens, /*shared=*/false);
  ExpectCalls(CallsOfWarmStep("passthrough, few tokens", DispatchMode::kPassthrough),
              {.launches = 7,
               .copies_to_device = 2,
               .bytes_to_device = kFewTokens * kRowBytes + 256,
               .copies_to_host = 1,
               .bytes_to_host = kFewTokens * kRowBytes,
               .event_records = 3});
}

TEST_F(CudaStepCallsTest, OneRankWithSharedExperts) {
  MakeRanks(1, kTokens, /*shared=*/true);
  // Four launches for their products, one for their gate; not a byte more to the device.
  ExpectCalls(CallsOfWarmStep("passthrough, shared experts", DispatchMode::kPassthrough),
              {.launches = 12,
               .copies_to_device = 2,
               .bytes_to_device = kTokens * kRowBytes + kListBytes,
               .copies_to_host = 1,
               .bytes_to_host = kTokens * kRowBytes,
               .event_records = 8,
               .event_waits = 2});
}

// Of both together; what the in-process communicator itself copies is within the device.
TEST_F(CudaStepCallsTest, TwoRanks) {
  MakeRanks(2, kTokens, /*shared=*/false);
  Calls expected = {.launches = 2 * 8,
                    .copies_to_device = 2 * 2,
                    .bytes_to_device = kTokens * kRowBytes + 11008,
                    .copies_to_host = 2,
                    .bytes_to_host = kTokens * kRowBytes,
                    .event_records = 2 * 7};
  ExpectCalls(CallsOfWarmStep("all_to_all, 2 ranks", DispatchMode::kAllToAll), expected);
  // The counts of the batched format are written, as a kernel's parameters; the four kernels behind
  // them are one graph, with a mark.
  Calls batched = expected;
  batched.launches = 2 * 5;
  batched.graph_launches = 2;
  batched.event_records = 2 * 8;
  batched.bytes_to_device = kTokens * kRowBytes + 13952;
  ExpectCalls(CallsOfWarmStep("fixed capacity, 2 ranks", DispatchMode::kAllToAllFixedCapacity),
              batched);
  expected.launches = 2 * 8;
  expected.bytes_to_device = kTokens * kRowBytes + 11072;
  ExpectCalls(
      CallsOfWarmStep("allgather_reducescatter, 2 ranks", DispatchMode::kAllGatherReduceScatter),
      expected);
}

// Above 1,024 pairs rows leave before the step is planned: their list crosses by itself.
TEST_F(CudaStepCallsTest, TwoRanksWithManyTokens) {
  MakeRanks(2, kManyTokens, /*shared=*/false, /*hidden_size=*/16);
  const Calls calls = CallsOfWarmStep("all_to_all, 2 ranks, many tokens", DispatchMode::kAllToAll);
  EXPECT_EQ(calls.launches, 2 * 8);
  EXPECT_EQ(calls.copies_to_device, 2 * 3);
}

TEST_F(CudaStepCallsTest, TwoRanksWithSharedExperts) {
  MakeRanks(2, kTokens, /*shared=*/true);
  ExpectCalls(CallsOfWarmStep("all_to_all, 2 ranks, shared experts", DispatchMode::kAllToAll),
              {.launches = 2 * 13,
               .copies_to_device = 2 * 2,
               .bytes_to_device = kTokens * kRowBytes + 11008,
               .copies_to_host = 2,
               .bytes_to_host = kTokens * kRowBytes,
               .event_records = 2 * 12,
               .event_waits = 2 * 2});
}

}  // namespace
}  // namespace expertmesh
