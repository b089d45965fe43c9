#include "server/cluster/local_expert_group.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/base/steady_now.h"
#include "server/cluster/memory_need.h"
#include "server/comm/in_process_communicator.h"
#include "server/ops/call_error.h"
#include "server/rank/rank_backend.h"
#include "server/rank/rank_step.h"

namespace expertmesh {
namespace {

// How long an idle thread of a rank may spin where cores are left over.
constexpr int64_t kSpinMicros = 50;
// Cores that gRPC's poller and the clients' side of a machine need for themselves.
constexpr int kSpareCores = 2;

uint64_t NewIncarnation() {
  std::random_device random;
  uint64_t incarnation = 0;
  while (incarnation == 0) incarnation = (uint64_t{random()} << 32) | random();
  return incarnation;
}

int64_t NowMicros() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The error that explains the others: what peers see of a failed rank is only that it aborted.
absl::Status FirstCause(absl::Span<const absl::Status> errors) {
  absl::Status aborted;
  for (const absl::Status& error : errors) {
    if (error.ok()) continue;
    if (!absl::IsAborted(error)) return error;
    aborted.Update(error);
  }
  return CallError(ErrorReason::kStepLost, aborted.message());
}

}  // namespace

LocalExpertGroup::LocalExpertGroup(LocalExpertGroupOptions options)
    : options_(std::move(options)), incarnation_(NewIncarnation()), usage_(options_.num_ranks) {}

LocalExpertGroup::~LocalExpertGroup() = default;

absl::StatusOr<std::unique_ptr<LocalExpertGroup>> LocalExpertGroup::Create(
    const LocalExpertGroupOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > kMaxLocalRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_ranks: ", options.num_ranks, " must be 1 to ", kMaxLocalRanks));
  }
  std::unique_ptr<LocalExpertGroup> group(new LocalExpertGroup(options));
  // What std::thread throws ends here.
  try {
    if (absl::Status status = group->CreateRanks(); !status.ok()) return status;
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start the threads of ", options.num_ranks, " ranks: ", error.what()));
  }
  return group;
}

absl::Status LocalExpertGroup::CreateRanks() {
  if (options_.device != nullptr) options_.allocator = options_.device->pinned_allocator();
  if (options_.allocator == nullptr) options_.allocator = std::make_shared<HostBufferPool>();
  if (!options_.place) {
    options_.place = [](const ModelSpec&, const LayerSpec& layer, int32_t ep_size) {
      return Placement::Contiguous(layer.num_experts, ep_size);
    };
  }
  const int num_cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int num_threads = options_.num_threads > 0 ? options_.num_threads : num_cores;
  isa_ = options_.isa.value_or(SupportedCpuIsas().back());
  threads_per_rank_ = std::max(1, num_threads / options_.num_ranks);
  absl::StatusOr<std::unique_ptr<DirectStep>> direct = DirectStep::Create(isa_, options_.allocator);
  if (!direct.ok()) return direct.status();
  direct_ = *std::move(direct);

  ParallelForOptions threads;
  threads.num_threads = threads_per_rank_;
  threads.spin_micros =
      num_cores - threads_per_rank_ * options_.num_ranks >= kSpareCores ? kSpinMicros : 0;
  for (int32_t rank = 0; rank < options_.num_ranks; ++rank) {
    absl::StatusOr<std::unique_ptr<RankBackend>> backend = NewBackend(threads);
    if (!backend.ok()) return backend.status();
    RankEngineOptions engine_options;
    engine_options.ep_rank = rank;
    engine_options.ep_size = options_.num_ranks;
    engine_options.backend = *std::move(backend);
    engine_options.format = options_.format;
    engines_.push_back(std::make_unique<RankEngine>(std::move(engine_options)));
    clients_.push_back(NewInProcessRankClient(engines_.back().get()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RankBackend>> LocalExpertGroup::NewBackend(
    const ParallelForOptions& threads) const {
  if (options_.device != nullptr) {
    ParallelForOptions load_threads = threads;
    load_threads.spin_micros = 0;  // they pack weights; then they have nothing to do
    return NewCudaRankBackend(options_.device, load_threads);
  }
  CpuRankBackendOptions backend_options;
  backend_options.isa = isa_;
  backend_options.threads = threads;
  backend_options.allocator = options_.allocator;
  return NewCpuRankBackend(backend_options);
}

std::string LocalExpertGroup::instruction_set() const {
  return engines_.front()->backend().instruction_set();
}

DType LocalExpertGroup::weight_dtype(std::string_view model) const {
  const auto found = weight_dtypes_.find(model);
  return found == weight_dtypes_.end() ? DType::kInvalid : found->second;
}

absl::StatusOr<int64_t> LocalExpertGroup::AvailableBytes() const {
  const std::optional<int64_t> on_device = engines_.front()->backend().device_free_bytes();
  if (on_device.has_value()) return *on_device;
  return AvailableMemoryBytes();
}

absl::Status LocalExpertGroup::PlaceLayers(absl::Span<const WeightSource* const> sources) {
  for (const WeightSource* source : sources) {
    const ModelSpec& model = source->model();
    std::map<int32_t, Placement>& layers = placements_[model.name];
    hidden_sizes_[model.name] = model.hidden_size;
    weight_dtypes_[model.name] = model.weight_dtype;
    for (const LayerSpec& layer : model.layers) {
      if (layers.count(layer.index) > 0) continue;
      absl::StatusOr<Placement> placement = options_.place(model, layer, ep_size());
      if (!placement.ok()) return placement.status();
      layers.emplace(layer.index, *std::move(placement));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> LocalExpertGroup::NeedBytes(
    absl::Span<const WeightSource* const> sources) {
  return SumLayers(sources, PackedLayerBytes);
}

absl::Status LocalExpertGroup::CheckMemory(absl::Span<const WeightSource* const> sources,
                                           int64_t available_bytes) {
  const RankBackend& backend = engines_.front()->backend();
  const absl::StatusOr<std::vector<int64_t>> taken =
      SumLayers(sources, [&backend](const ModelSpec& model, const LayerSpec& layer,
                                    const Placement& placement, int32_t rank) {
        return TakenLayerBytes(model, layer, placement, rank, [&backend](int64_t size_bytes) {
          return backend.TakenBytes(size_bytes);
        });
      });
  if (!taken.ok()) return taken.status();
  std::optional<int64_t> need = 0;
  for (const int64_t bytes : *taken) {
    if (need) need = CheckedAdd(*need, bytes);
  }
  if (!need) return absl::OutOfRangeError("the experts fit no memory");
  return CheckMemoryNeed(*need, available_bytes,
                         options_.device == nullptr ? 0 : DeviceReserveBytes(available_bytes));
}

absl::StatusOr<std::vector<int64_t>> LocalExpertGroup::SumLayers(
    absl::Span<const WeightSource* const> sources,
    absl::FunctionRef<absl::StatusOr<int64_t>(const ModelSpec&, const LayerSpec&, const Placement&,
                                              int32_t rank)>
        layer_bytes) {
  if (absl::Status status = PlaceLayers(sources); !status.ok()) return status;
  std::vector<int64_t> need(ep_size());
  for (const WeightSource* source : sources) {
    const ModelSpec& model = source->model();
    for (const LayerSpec& layer : model.layers) {
      for (int32_t rank = 0; rank < ep_size(); ++rank) {
        absl::StatusOr<int64_t> bytes =
            layer_bytes(model, layer, *placement(model.name, layer.index), rank);
        if (!bytes.ok()) return bytes.status();
        const std::optional<int64_t> sum = CheckedAdd(need[rank], *bytes);
        if (!sum) return absl::OutOfRangeError("the experts fit no memory");
        need[rank] = *sum;
      }
    }
  }
  return need;
}

absl::Status LocalExpertGroup::Load(absl::Span<const WeightSource* const> sources,
                                    const std::function<void(const LoadProgress&)>& progress,
                                    std::optional<int64_t> available_bytes) {
  if (epoch() != 0) return absl::FailedPreconditionError("the group is loaded already");
  absl::StatusOr<std::vector<int64_t>> need = NeedBytes(sources);
  if (!need.ok()) return need.status();
  LoadProgress done;
  for (const int64_t bytes : *need) {
    const std::optional<int64_t> sum = CheckedAdd(done.total_bytes, bytes);
    if (!sum) return absl::OutOfRangeError("the experts fit no memory");
    done.total_bytes = *sum;
  }
  if (!available_bytes) {
    absl::StatusOr<int64_t> available = AvailableBytes();
    if (!available.ok()) return available.status();
    available_bytes = *available;
  }
  if (absl::Status status = CheckMemory(sources, *available_bytes); !status.ok()) return status;

  std::mutex mutex;
  const auto report = [&](int64_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    done.loaded_bytes += num_bytes;
    if (progress) progress(done);
  };
  std::vector<absl::Status> errors(engines_.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    const auto load = [&, rank] {
      for (const WeightSource* source : sources) {
        for (const LayerSpec& layer : source->model().layers) {
          errors[rank].Update(engines_[rank]->LoadLayer(
              *source, layer, *placement(source->model().name, layer.index), report));
          if (!errors[rank].ok()) return;
        }
      }
    };
    try {
      threads.emplace_back(load);
    } catch (const std::system_error&) {
      load();  // in turn, where the machine gives no more threads
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& error : errors) {
    if (!error.ok()) return error;
  }
  for (const std::unique_ptr<RankEngine>& engine : engines_) {
    weight_bytes_.push_back(engine->weight_bytes());
  }
  FormEpoch();
  return absl::OkStatus();
}

void LocalExpertGroup::FormEpoch() {
  const uint64_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  std::vector<std::unique_ptr<Communicator>> communicators =
      NewInProcessCommunicators(ep_size(), engines_.front()->backend().copy_bytes());
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    engines_[rank]->EnterEpoch(incarnation_, epoch, std::move(communicators[rank]));
  }
  usage_.BeginEpoch(SteadyNow());
  epoch_.store(epoch, std::memory_order_release);
}

const Placement* LocalExpertGroup::placement(std::string_view model, int32_t layer) const {
  const auto layers = placements_.find(model);
  if (layers == placements_.end()) return nullptr;
  const auto found = layers->second.find(layer);
  return found == layers->second.end() ? nullptr : &found->second;
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunStep(GroupStep step, bool on_caller,
                                                          absl::Time step_deadline) {
  if (epoch() == 0) {
    return CallError(ErrorReason::kNoEpoch, "the experts are not loaded yet");
  }
  if (step.plan.slices.size() != engines_.size() || step.shards.size() != engines_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("step: ", step.plan.slices.size(),
                                                   " slices and ", step.shards.size(),
                                                   " shards for ", ep_size(), " ranks"));
  }
  for (const StepSlice& slice : step.plan.slices) {
    if (slice.header.incarnation != incarnation_ || slice.header.epoch != epoch()) {
      return CallError(
          ErrorReason::kStepLost,
          absl::StrCat("the step was planned for incarnation ", slice.header.incarnation, " epoch ",
                       slice.header.epoch, "; the group is in ", incarnation_, " epoch ", epoch()));
    }
  }
  absl::StatusOr<GroupStepResult> result =
      step.plan.direct.has_value() ? RunDirect(std::move(step), on_caller, step_deadline)
                                   : RunOnRanks(std::move(step), on_caller, step_deadline);
  if (!result.ok()) {
    if (options_.on_device_lost != nullptr) {
      const absl::Status device = engines_.front()->backend().device_status();
      if (!device.ok()) options_.on_device_lost(device);
    }
    FormEpoch();
  }
  return result;
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunDirect(GroupStep step, bool on_caller,
                                                            absl::Time deadline) {
  const StepHeader& header = step.plan.slices.front().header;
  const auto hidden_size = hidden_sizes_.find(header.model);
  if (hidden_size == hidden_sizes_.end()) {
    return absl::NotFoundError(absl::StrCat("no rank holds model ", header.model));
  }
  const DType combine_dtype = header.combine_dtype;
  if (absl::Status status = direct_->Scatter(hidden_size->second, step); !status.ok()) {
    return status;
  }
  const DirectSource source = *std::move(step.plan.direct);
  absl::StatusOr<GroupStepResult> partials = RunOnRanks(std::move(step), on_caller, deadline);
  if (!partials.ok()) return partials.status();
  return direct_->Combine(source, combine_dtype, hidden_size->second, *std::move(partials));
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunOnRanks(GroupStep step, bool on_caller,
                                                             absl::Time deadline) {
  // With one rank there is no one to run beside the caller, who waits anyway.
  return on_caller || ep_size() == 1 ? RunOnCaller(std::move(step), deadline)
                                     : RunOnRankThreads(std::move(step), deadline);
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunOnCaller(GroupStep step, absl::Time deadline) {
  const int64_t begun = NowMicros();
  std::vector<std::unique_ptr<RankStep>> steps;
  steps.reserve(engines_.size());
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    absl::StatusOr<std::unique_ptr<RankStep>> rank_step =
        engines_[rank]->Begin(std::move(step.plan.slices[rank]), std::move(step.shards[rank]));
    if (!rank_step.ok()) return rank_step.status();
    steps.push_back(*std::move(rank_step));
  }
  const int64_t dispatched = NowMicros();
  for (const std::unique_ptr<RankStep>& rank_step : steps) {
    if (absl::Status status = rank_step->Compute(); !status.ok()) return status;
  }
  GroupStepResult result;
  result.shards.reserve(steps.size());
  std::vector<absl::Status> errors;
  for (size_t rank = 0; rank < steps.size(); ++rank) {
    absl::StatusOr<RankStepResult> rank_result = steps[rank]->Finish(deadline);
    if (!rank_result.ok()) {
      errors.push_back(rank_result.status());
      continue;
    }
    usage_.CountStep(static_cast<int32_t>(rank), *rank_result);
    result.shards.push_back(std::move(rank_result->output));
    result.timings.compute_micros += rank_result->timings.compute_micros;
  }
  if (!errors.empty()) return FirstCause(errors);
  // The ranks took turns, so their times add up instead of overlapping.
  const int64_t took = NowMicros() - begun;
  const int64_t compute = std::min(result.timings.compute_micros, took);
  // What was computed while rows were on their way is no dispatch.
  const int64_t dispatch = std::min(dispatched - begun, took - compute);
  result.timings = {dispatch, compute, took - compute - dispatch};
  return result;
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunOnRankThreads(GroupStep step,
                                                                   absl::Time deadline) {
  std::vector<absl::StatusOr<RankStepResult>> rank_results(engines_.size());
  std::mutex mutex;
  std::condition_variable all_done;
  size_t num_running = engines_.size();
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    clients_[rank]->RunStep(std::move(step.plan.slices[rank]), std::move(step.shards[rank]),
                            deadline, [&, rank](absl::StatusOr<RankStepResult> rank_result) {
                              const std::lock_guard<std::mutex> lock(mutex);
                              rank_results[rank] = std::move(rank_result);
                              if (--num_running == 0) all_done.notify_one();
                            });
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [&] { return num_running == 0; });
  }

  GroupStepResult result;
  std::vector<absl::Status> errors;
  for (size_t rank = 0; rank < rank_results.size(); ++rank) {
    absl::StatusOr<RankStepResult>& rank_result = rank_results[rank];
    if (!rank_result.ok()) {
      errors.push_back(rank_result.status());
      continue;
    }
    const StepTimings& timings = rank_result->timings;
    usage_.CountStep(static_cast<int32_t>(rank), *rank_result);
    result.shards.push_back(std::move(rank_result->output));
    // Each stage's maximum would count twice what overlaps: one rank computes while another waits
    // for its partials.
    if (timings.compute_micros >= result.timings.compute_micros) result.timings = timings;
  }
  if (!errors.empty()) return FirstCause(errors);
  return result;
}

}  // namespace expertmesh
