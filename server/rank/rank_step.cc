#include "server/rank/rank_step.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/planning/slice_check.h"
#include "server/rank/output_memory.h"

namespace expertmesh {
namespace {

int64_t NowNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Says what the time went by with; other errors say that themselves.
absl::Status Late(absl::Status status, const char* what) {
  if (!absl::IsDeadlineExceeded(status)) return status;
  return absl::DeadlineExceededError(absl::StrCat(what, ": ", status.message()));
}

}  // namespace

RankStep::RankStep(RankEngine& engine, StepSlice slice, TokenShard shard)
    : engine_(engine), slice_(std::move(slice)), shard_(std::move(shard)) {}

RankStep::~RankStep() {
  if (!finished_) {
    engine_.Abort(first_error_.ok() ? absl::CancelledError("the step was given up") : first_error_);
  }
  // Drops work that names the arenas' memory.
  shared_stream_.reset();
  stream_.reset();
}

absl::Status RankStep::Keep(absl::Status status) {
  if (first_error_.ok()) first_error_ = status;
  return status;
}

absl::Status RankStep::Mark(Stream& stream, int64_t* nanos) {
  // By an event rather than by work: a GPU goes on meanwhile.
  const Event reached;
  reached.OnDone([nanos] { *nanos = NowNanos(); });
  return stream.Record(reached);
}

absl::Status RankStep::CheckShard() const {
  int64_t num_rows = 0;
  for (const RowSpan& span : shard_.rows) {
    if (span.num_rows < 0 || span.num_rows > slice_.num_source_tokens - num_rows ||
        (span.data == nullptr && span.num_rows > 0)) {
      return absl::InvalidArgumentError(absl::StrCat("shard: a span of ", span.num_rows,
                                                     " rows after ", num_rows, " others of ",
                                                     slice_.num_source_tokens));
    }
    num_rows += span.num_rows;
  }
  if (num_rows != slice_.num_source_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shard: ", num_rows, " rows, slice.num_source_tokens is ", slice_.num_source_tokens));
  }
  return absl::OkStatus();
}

absl::Status RankStep::CheckLayer() const {
  const StepHeader& header = slice_.header;
  if (header.include_shared_experts && layer_->shared == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("slice.include_shared_experts: layer ",
                                                   header.layer, " of model ", header.model,
                                                   " has no shared experts"));
  }
  std::vector<const ExpertKernels*> kernels = {layer_->kernels.get()};
  if (header.include_shared_experts) kernels.push_back(&layer_->shared->kernels());
  for (const ExpertKernels* each : kernels) {
    if (each == nullptr) continue;
    const ExpertKernels::Capabilities& capabilities = each->capabilities();
    const std::vector<DType>& dtypes = capabilities.activation_dtypes;
    if (std::find(dtypes.begin(), dtypes.end(), header.activation_dtype) == dtypes.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("slice.activation_dtype: ", std::string(DTypeName(header.activation_dtype)),
                       " is not supported by the ", capabilities.instruction_set, " kernels"));
    }
  }
  return absl::OkStatus();
}

absl::Status RankStep::CheckOrder() const {
  const StepHeader& header = slice_.header;
  if (header.dispatch_order == -1 && header.combine_order == -1) return absl::OkStatus();
  if (header.dispatch_order >= 0 && header.combine_order > header.dispatch_order) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("slice.combine_order: ", header.combine_order,
                                                 " must be above slice.dispatch_order ",
                                                 header.dispatch_order));
}

void RankStep::CloseOrder(int64_t order) {
  if (order >= 0 && engine_.communicator_ != nullptr) engine_.communicator_->CloseOrder(order);
}

absl::Status RankStep::AcquireArenas() {
  RankBackend& backend = engine_.backend();
  device_arena_ = engine_.device_arenas_.Acquire();
  const bool is_host = backend.device_allocator() == backend.host_allocator();
  host_arena_ = is_host ? device_arena_ : engine_.host_arenas_.Acquire();
  expert_arena_ =
      is_host || slice_.max_num_tokens == 0 ? device_arena_ : engine_.expert_arenas_.Acquire();
  absl::StatusOr<ShardOutput> output =
      AllocateOutput(backend.host_allocator(), slice_.num_output_rows(), layer_->hidden_size,
                     slice_.header.output_dtype);
  if (!output.ok()) return output.status();
  output_ = *std::move(output);
  return absl::OkStatus();
}

absl::Status RankStep::UploadShard() {
  if (stream_->device() == Device{}) {
    hidden_states_ = shard_.rows;
    return absl::OkStatus();
  }
  const DType dtype = slice_.header.activation_dtype;
  absl::StatusOr<std::byte*> rows =
      AllocateRows(*device_arena_, slice_.num_source_tokens, layer_->hidden_size, dtype);
  if (!rows.ok()) return rows.status();
  hidden_states_ = {{*rows, slice_.num_source_tokens}};
  UploadRowsParams params;
  params.sources = shard_.rows;
  params.row_bytes = layer_->hidden_size * DTypeBytes(dtype);
  params.output = *rows;
  params.host_arena = host_arena_.get();
  absl::Status status = engine_.backend().row_ops().UploadRows(params, *stream_);
  if (!status.ok() || !slice_.header.include_shared_experts) return status;
  return stream_->Record(uploaded_);
}

absl::Status RankStep::Begin() {
  begun_nanos_ = NowNanos();
  const StepHeader& header = slice_.header;
  layer_ = engine_.FindLayer(header.model, header.layer);
  if (layer_ == nullptr) {
    return absl::NotFoundError(absl::StrCat("rank ", engine_.ep_rank(), " holds no layer ",
                                            header.layer, " of model ", header.model));
  }
  absl::Status status =
      CheckSlice(slice_, engine_.ep_rank(), engine_.ep_size(), layer_->num_local_experts);
  if (status.ok()) status = CheckOrder();
  if (status.ok()) status = CheckShard();
  if (status.ok()) status = CheckLayer();
  if (!status.ok()) return status;
  absl::StatusOr<const DispatchStrategy*> strategy = FindDispatchStrategy(header.strategy);
  if (!strategy.ok()) return strategy.status();
  status = AcquireArenas();
  if (!status.ok()) return status;

  stream_ = engine_.backend().NewStream();
  status = UploadShard();
  if (!status.ok()) return status;
  DispatchContext context;
  context.hidden_size = layer_->hidden_size;
  context.num_local_experts = layer_->num_local_experts;
  context.format = engine_.options_.format;
  context.row_ops = &engine_.backend().row_ops();
  context.stream = stream_.get();
  context.communicator = engine_.communicator_.get();
  context.arena = device_arena_.get();
  context.host_arena = host_arena_.get();
  context.expert_arena = expert_arena_.get();
  context.router = layer_->router.get();
  context.placement = &*layer_->placement;
  absl::StatusOr<std::unique_ptr<DispatchHandle>> handle =
      (*strategy)->Dispatch(slice_, hidden_states_, context);
  if (!handle.ok()) return handle.status();
  CloseOrder(header.dispatch_order);
  handle_ = *std::move(handle);
  return Mark(*stream_, &arrived_nanos_);
}

absl::Status RankStep::Compute() {
  compute_begun_nanos_ = NowNanos();
  absl::Status status = EnqueueSharedExperts();
  if (status.ok()) status = EnqueueExperts();
  return Keep(std::move(status));
}

absl::Status RankStep::ComputeInTurn(ComputeTurns::Turn turn, absl::Time deadline) {
  turn.Wait();
  compute_begun_nanos_ = NowNanos();
  absl::Status status = EnqueueSharedExperts();
  // A device waits for the rows by itself, and needs no host between them and the experts. On the
  // host, once the rows are there nothing of the experts' work is left to run in Finish, without
  // the turn.
  const bool waits = stream_->device() == Device{} ||
                     slice_.header.strategy == DispatchMode::kAllGatherReduceScatterMonolithic;
  if (status.ok() && waits) {
    status = Late(stream_->Wait(deadline), "waiting for the other ranks' rows");
  }
  if (status.ok()) status = EnqueueExperts();
  return Keep(std::move(status));
}

absl::Status RankStep::EnqueueSharedExperts() {
  if (!slice_.header.include_shared_experts || slice_.num_source_tokens == 0) {
    return absl::OkStatus();
  }
  // On a stream of its own: the step's waits for the rows of other ranks.
  shared_stream_ = engine_.backend().NewStream();
  absl::Status status;
  if (shared_stream_->device() != Device{}) status = shared_stream_->WaitFor(uploaded_);
  if (status.ok()) status = Mark(*shared_stream_, &shared_begun_nanos_);
  if (!status.ok()) return status;
  SharedExperts::Rows rows;
  rows.hidden_states = hidden_states_;
  rows.num_rows = slice_.num_source_tokens;
  rows.activation_dtype = slice_.header.activation_dtype;
  rows.arena = device_arena_.get();
  rows.host_arena = host_arena_.get();
  absl::StatusOr<SourceAddend> addend =
      layer_->shared->Compute(rows, engine_.backend().row_ops(), *shared_stream_);
  if (!addend.ok()) return addend.status();
  addend_ = *addend;
  status = Mark(*shared_stream_, &shared_done_nanos_);
  if (!status.ok()) return status;
  return shared_stream_->Record(shared_done_);
}

absl::Status RankStep::EnqueueExperts() {
  absl::StatusOr<ExpertRows> rows = handle_->Permute();
  if (!rows.ok()) return rows.status();
  absl::StatusOr<std::byte*> memory =
      AllocateRows(*expert_arena_, rows->num_rows, layer_->hidden_size, DType::kFloat32);
  if (!memory.ok()) return memory.status();
  num_expert_rows_ = rows->format == ActivationFormat::kContiguous
                         ? rows->num_rows
                         : std::accumulate(rows->expert_num_tokens.begin(),
                                           rows->expert_num_tokens.end(), int64_t{0});
  float* const output = reinterpret_cast<float*>(*memory);
  if (rows->num_rows > 0) {
    GroupedFfnParams params;
    params.format = rows->format;
    params.activation_dtype = slice_.header.activation_dtype;
    params.rows = rows->rows;
    params.expert_offsets = rows->expert_offsets;
    params.expert_num_tokens = rows->expert_num_tokens;
    params.max_rows_per_expert = rows->max_rows_per_expert;
    params.output = output;
    params.arena = expert_arena_.get();
    absl::Status status = layer_->kernels->GroupedFfn(params, *stream_);
    if (!status.ok()) return status;
  }
  absl::Status status = Mark(*stream_, &computed_nanos_);
  if (!status.ok()) return status;
  status = handle_->Combine(output);
  if (status.ok()) CloseOrder(slice_.header.combine_order);
  return status;
}

absl::StatusOr<RankStepResult> RankStep::Finish(absl::Time deadline) {
  absl::Status status = EnqueueFinish();
  if (status.ok()) {
    status = Late(stream_->Wait(deadline), "computing, or waiting for the other ranks' rows");
  }
  if (!status.ok()) return Keep(status);
  finished_ = true;
  finished_nanos_ = NowNanos();
  RankStepResult result;
  result.output = std::move(output_);
  result.timings = Timings();
  result.num_expert_rows = num_expert_rows_;
  result.traffic = engine_.TakeTraffic();
  return result;
}

StepTimings RankStep::Timings() const {
  // While the shared experts run nothing is waited for, whether or not the rows have arrived.
  const int64_t computed_meanwhile =
      shared_stream_ == nullptr
          ? 0
          : std::max<int64_t>(0, std::min(arrived_nanos_, shared_done_nanos_) -
                                     std::max(begun_nanos_, shared_begun_nanos_));
  StepTimings timings;
  timings.dispatch_micros = (arrived_nanos_ - begun_nanos_ - computed_meanwhile) / 1000;
  // A thread that drives several ranks comes to this one later than the rows.
  const int64_t begun_computing = std::max(arrived_nanos_, compute_begun_nanos_);
  timings.compute_micros = (computed_nanos_ - begun_computing + computed_meanwhile) / 1000;
  timings.combine_micros = (finished_nanos_ - computed_nanos_) / 1000;
  return timings;
}

absl::Status RankStep::EnqueueFinish() {
  std::byte* const output = const_cast<std::byte*>(output_.rows);
  if (shared_stream_ != nullptr) {
    if (absl::Status status = stream_->WaitFor(shared_done_); !status.ok()) return status;
  }
  if (stream_->device() == Device{}) return handle_->Finish(addend_, output);
  absl::StatusOr<std::byte*> rows = AllocateRows(*device_arena_, output_.num_rows,
                                                 layer_->hidden_size, slice_.header.output_dtype);
  if (!rows.ok()) return rows.status();
  absl::Status status = handle_->Finish(addend_, *rows);
  if (!status.ok()) return status;
  return stream_->Copy(
      output, *rows,
      output_.num_rows * layer_->hidden_size * DTypeBytes(slice_.header.output_dtype));
}

}  // namespace expertmesh
