#include "server/cluster/local_expert_group.h"

#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/base/steady_now.h"
#include "server/cluster/incarnation.h"
#include "server/cluster/memory_need.h"
#include "server/comm/in_process_communicator.h"
#include "server/rank/rank_backend.h"

namespace expertmesh {
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
  isa_ = options_.isa.value_or(SupportedCpuIsas().back());
  absl::StatusOr<std::unique_ptr<DirectStep>> direct = DirectStep::Create(isa_, options_.allocator);
  if (!direct.ok()) return direct.status();
  direct_ = *std::move(direct);

  const RankHardware hardware{.device = options_.device,
                              .isa = isa_,
                              .num_threads = options_.num_threads,
                              .num_ranks = options_.num_ranks,
                              .allocator = options_.allocator};
  threads_per_rank_ = ThreadsPerRank(hardware);
  for (int32_t rank = 0; rank < options_.num_ranks; ++rank) {
    absl::StatusOr<std::unique_ptr<RankBackend>> backend = NewRankBackend(hardware);
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

}  // namespace expertmesh
