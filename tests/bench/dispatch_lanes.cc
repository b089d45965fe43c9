#include "tests/bench/dispatch_lanes.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/comm/communicator.h"
#include "server/control/step_controller.h"
#include "server/model/synthetic_weight_source.h"
#include "tests/bench/bench_figures.h"
#include "tests/bench/delayed_communicator.h"
#include "tests/server/cluster/thread_cluster.h"
#include "tests/server/comm/tcp_group.h"

namespace expertmesh {
namespace {

struct BenchShape {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int32_t num_experts = 0;
  int32_t topk = 0;
};

std::unique_ptr<SyntheticWeightSource> MakeSource(const BenchShape& shape) {
  ModelSpec model;
  model.name = "bench";
  model.architecture = "Bench";
  model.hidden_size = shape.hidden_size;
  model.weight_dtype = DType::kBFloat16;
  LayerSpec& layer = model.layers.emplace_back();
  layer.num_experts = shape.num_experts;
  layer.topk = shape.topk;
  layer.intermediate_size = shape.intermediate_size;
  auto source = SyntheticWeightSource::Create(std::move(model), 1);
  Require(source.status());
  return *std::move(source);
}

Buffer Copy(Allocator& allocator, const void* data, size_t size_bytes) {
  absl::StatusOr<Buffer> buffer = allocator.Allocate(static_cast<int64_t>(size_bytes));
  Require(buffer.status());
  std::memcpy(buffer->data(), data, size_bytes);
  return *std::move(buffer);
}

// Calls of one step each, all at once.
class Calls {
 public:
  Calls(const ModelSpec& model, const BenchShape& shape, int64_t num_tokens)
      : model_(model),
        shape_(shape),
        num_tokens_(num_tokens),
        ids_(RandomTopk(num_tokens, shape.topk, shape.num_experts)),
        weights_(ids_.size(), 0.125f),
        hidden_(num_tokens * shape.hidden_size * 2) {
    for (int64_t i = 0; i < num_tokens * shape.hidden_size; ++i) {
      StoreFloat(hidden_.data(), DType::kBFloat16, i, static_cast<float>(i % 17) / 17 - 0.5f);
    }
  }
  const std::vector<int32_t>& ids() const { return ids_; }

  // Seconds for `num_calls` of them.
  double Run(ExpertGroup& group, int32_t lanes, int num_calls) {
    StepControllerOptions options;
    options.max_step_tokens = num_tokens_;
    options.max_rank_pairs = num_tokens_ * shape_.topk;
    options.max_inline_micros = -1;
    options.lanes = lanes;
    StepController controller(options, &group, nullptr, SteadyClock());
    std::mutex mutex;
    std::condition_variable changed;
    int num_left = num_calls;
    return Seconds([&] {
      for (int i = 0; i < num_calls; ++i) {
        auto call = std::make_unique<ForwardCall>();
        call->model = &model_;
        call->layer = &model_.layers[0];
        call->num_tokens = num_tokens_;
        call->activation_dtype = call->output_dtype = call->combine_dtype = DType::kBFloat16;
        call->routing = RoutingKind::kTopK;
        call->dispatch = DispatchMode::kAllToAll;
        call->topk = shape_.topk;
        Allocator& allocator = *group.request_allocator();
        call->topk_ids = Copy(allocator, ids_.data(), ids_.size() * 4);
        call->topk_weights = Copy(allocator, weights_.data(), weights_.size() * 4);
        call->hidden_states = Copy(allocator, hidden_.data(), hidden_.size());
        call->done = [&](absl::StatusOr<ForwardResult> result) {
          Require(result.status());
          const std::lock_guard<std::mutex> lock(mutex);
          if (--num_left == 0) changed.notify_all();
        };
        controller.Submit(std::move(call), false);
      }
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return num_left == 0; });
    });
  }

 private:
  const ModelSpec& model_;
  const BenchShape shape_;
  const int64_t num_tokens_;
  const std::vector<int32_t> ids_;
  const std::vector<float> weights_;
  std::vector<std::byte> hidden_;
};

std::unique_ptr<ThreadCluster> StartCluster(const WeightSource& source,
                                            const ThreadCluster::Options& options) {
  auto cluster = ThreadCluster::Start(source, options);
  Require(cluster.status());
  return *std::move(cluster);
}

}  // namespace

int64_t MeasureBytesOverFormula(int32_t ep_size) {
  const BenchShape shape = {256, 64, 32, 8};
  constexpr int64_t kTokens = 777;
  const auto source = MakeSource(shape);
  std::vector<const Communicator*> communicators;
  ThreadCluster::Options options;
  options.ep_size = ep_size;
  options.communicate = [](int32_t num_ranks) { return NewTcpGroup(num_ranks); };
  options.wrap = [&](std::unique_ptr<Communicator> real) {
    communicators.push_back(real.get());
    return real;
  };
  const auto cluster = StartCluster(*source, options);
  Calls calls(source->model(), shape, kTokens);
  calls.Run(cluster->group(), 1, 1);
  int64_t sent = 0;
  for (const Communicator* communicator : communicators) {
    for (const int64_t bytes : communicator->bytes_sent()) sent += bytes;
  }
  // Each message carries 64 bytes of its own: two operations, each with one from each to each.
  sent += int64_t{2} * 64 * ep_size * (ep_size - 1);

  const Placement placement = *Placement::Contiguous(shape.num_experts, ep_size);
  int64_t expected = 0;
  int64_t token = 0;
  for (int32_t source_rank = 0; source_rank < ep_size; ++source_rank) {
    const int64_t num_own = kTokens / ep_size + (source_rank < kTokens % ep_size);
    for (int64_t i = 0; i < num_own; ++i, ++token) {
      std::set<int32_t> owners;
      for (int32_t k = 0; k < shape.topk; ++k) {
        owners.insert(placement.owner_rank(calls.ids()[token * shape.topk + k]));
      }
      owners.erase(source_rank);
      expected += static_cast<int64_t>(owners.size()) * shape.hidden_size * (2 + 2);
    }
  }
  // Of the 1% that is allowed.
  return sent - expected - expected / 100;
}

void BenchLanes() {
  const BenchShape shape = {1024, 1024, 32, 8};
  // The first one starts before another is there to overlap with.
  constexpr int kCalls = 24;
  constexpr int kRounds = 7;
  const auto source = MakeSource(shape);
  Calls calls(source->model(), shape, 512);
  ThreadCluster::Options options;
  options.ep_size = 2;
  options.communicate = [](int32_t num_ranks) { return NewTcpGroup(num_ranks); };
  {
    const auto cluster = StartCluster(*source, options);
    calls.Run(cluster->group(), 2, 4);
    std::vector<double> ratios;
    for (int round = 0; round < kRounds; ++round) {
      const double one = calls.Run(cluster->group(), 1, kCalls);
      ratios.push_back(one / calls.Run(cluster->group(), 2, kCalls));
    }
    PrintAtLeast("throughput of two lanes against one, cores busy", Median(ratios), "x", 0.97);
  }
  std::atomic<int64_t> delay_nanos{0};
  options.communicate = nullptr;
  options.wrap = [&](std::unique_ptr<Communicator> real) {
    return std::make_unique<DelayedCommunicator>(std::move(real), &delay_nanos);
  };
  const auto cluster = StartCluster(*source, options);
  calls.Run(cluster->group(), 2, 4);
  std::vector<double> ratios;
  for (int round = 0; round < kRounds; ++round) {
    delay_nanos = 0;
    const double compute = calls.Run(cluster->group(), 1, kCalls) / kCalls;
    delay_nanos = static_cast<int64_t>(compute * 1e9 / 2);  // each way
    const double serial = calls.Run(cluster->group(), 1, kCalls);
    ratios.push_back(calls.Run(cluster->group(), 2, kCalls) / serial);
  }
  PrintAtMost("time of two lanes against one, the wire as slow as the experts", Median(ratios), "x",
              0.65);
}

}  // namespace expertmesh
