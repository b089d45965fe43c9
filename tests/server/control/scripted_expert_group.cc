#include "tests/server/control/scripted_expert_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using Row = std::vector<float>;

// The shard's rows, one by one.
std::vector<const std::byte*> RowPointers(const TokenShard& shard, int64_t row_bytes) {
  std::vector<const std::byte*> pointers;
  for (const RowSpan& span : shard.rows) {
    for (int64_t i = 0; i < span.num_rows; ++i) pointers.push_back(span.data + i * row_bytes);
  }
  return pointers;
}

Row Scaled(const std::byte* data, int64_t hidden_size, float factor) {
  Row row(hidden_size);
  std::memcpy(row.data(), data, hidden_size * sizeof(float));
  for (float& value : row) value *= factor;
  return row;
}

void Add(const Row& row, Row& sum) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += row[i];
}

int64_t Offset(const std::vector<int64_t>& counts, int32_t rank) {
  int64_t offset = 0;
  for (int32_t r = 0; r < rank; ++r) offset += counts[r];
  return offset;
}

}  // namespace

ScriptedExpertGroup::ScriptedExpertGroup(const ModelSpec& model, int32_t ep_size)
    : model_(model), ep_size_(ep_size), pool_({.poison_byte = 0xff}) {
  for (const LayerSpec& layer : model.layers) {
    placements_.emplace(layer.index, *Placement::Contiguous(layer.num_experts, ep_size));
  }
}

std::vector<SeenStep> ScriptedExpertGroup::seen() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return seen_;
}

const Placement* ScriptedExpertGroup::placement(std::string_view model, int32_t layer) const {
  const auto found = placements_.find(layer);
  return model != model_.name || found == placements_.end() ? nullptr : &found->second;
}

int ScriptedExpertGroup::Remember(const GroupStep& step, bool on_caller) {
  SeenStep seen;
  seen.header = step.plan.slices[0].header;
  seen.on_caller = on_caller;
  seen.thread = std::this_thread::get_id();
  for (int32_t r = 0; r < ep_size_; ++r) {
    const StepSlice& slice = step.plan.slices[r];
    seen.shard_tokens.push_back(slice.num_source_tokens);
    seen.num_tokens += slice.num_source_tokens;
    seen.max_rank_pairs =
        std::max<int64_t>(seen.max_rank_pairs, static_cast<int64_t>(slice.pair_k.size()));
    seen.rows.insert(seen.rows.end(), step.shards[r].rows.begin(), step.shards[r].rows.end());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  seen_.push_back(std::move(seen));
  return static_cast<int>(seen_.size()) - 1;
}

absl::StatusOr<GroupStepResult> ScriptedExpertGroup::RunStep(GroupStep step, bool on_caller,
                                                             absl::Time /*step_deadline*/) {
  EXPECT_FALSE(running_.exchange(true)) << "two steps at once";
  absl::StatusOr<GroupStepResult> result = Run(step, on_caller);
  running_ = false;
  return result;
}

class ScriptedExpertGroup::Flight : public StepInFlight {
 public:
  Flight(ScriptedExpertGroup* group, GroupStep step, std::shared_ptr<bool> promise)
      : group_(group), step_(std::move(step)), promise_(std::move(promise)) {}
  bool is_decided() const override { return true; }
  absl::StatusOr<GroupStepResult> Finish() override {
    // A step whose follower neither came nor was skipped would never end.
    EXPECT_TRUE(promise_ == nullptr || promise_ != group_->open_promise_);
    absl::StatusOr<GroupStepResult> result = group_->Run(step_, false);
    --group_->num_in_flight_;
    return result;
  }

 private:
  ScriptedExpertGroup* const group_;
  const GroupStep step_;
  const std::shared_ptr<bool> promise_;
};

absl::StatusOr<std::unique_ptr<StepInFlight>> ScriptedExpertGroup::StartStep(
    GroupStep step, bool has_follower, absl::Time /*step_deadline*/,
    absl::AnyInvocable<void()> on_decided) {
  if (step.plan.slices[0].header.epoch != epoch_) return absl::UnavailableError("stale epoch");
  if (start_script) {
    if (absl::Status status = start_script(); !status.ok()) return status;
  }
  const int64_t in_flight = ++num_in_flight_;
  EXPECT_LE(in_flight, lanes);
  num_overlaps_ += in_flight > 1;
  open_promise_ = has_follower ? std::make_shared<bool>() : nullptr;
  if (on_decided != nullptr) on_decided();
  return std::make_unique<Flight>(this, std::move(step), open_promise_);
}

absl::StatusOr<GroupStepResult> ScriptedExpertGroup::Run(const GroupStep& step, bool on_caller) {
  const int number = Remember(step, on_caller);
  absl::Status status;
  if (script) status = script(step, number);
  const uint64_t epoch = step.plan.slices[0].header.epoch;
  if (forms_epochs && (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status))) {
    epoch_ = epoch + 1;
  }
  if (status.ok() && epoch != epoch_) status = absl::UnavailableError("stale epoch");
  absl::StatusOr<GroupStepResult> result = absl::UnknownError("not run");
  if (status.ok()) {
    result = Compute(step);
  } else {
    result = status;
  }
  return result;
}

GroupStepResult ScriptedExpertGroup::Compute(const GroupStep& step) {
  const int64_t hidden_size = model_.hidden_size;
  const int64_t row_bytes = hidden_size * static_cast<int64_t>(sizeof(float));
  const std::vector<StepSlice>& slices = step.plan.slices;
  const Placement& placement = *this->placement(slices[0].header.model, slices[0].header.layer);

  std::vector<std::vector<const std::byte*>> tokens;
  for (const TokenShard& shard : step.shards) tokens.push_back(RowPointers(shard, row_bytes));

  // What owner rank d sends back, grouped by source.
  std::vector<std::vector<Row>> partials(ep_size_);
  for (int32_t d = 0; d < ep_size_; ++d) {
    const StepSlice& owner = slices[d];
    int64_t received = 0;
    for (int32_t s = 0; s < ep_size_; ++s) {
      const int64_t first = Offset(slices[s].send_counts, d);
      EXPECT_EQ(slices[s].send_counts[d], owner.recv_counts[s]);
      for (int64_t i = 0; i < owner.recv_counts[s]; ++i, ++received) {
        const std::byte* x = tokens[s][slices[s].send_rows[first + i]];
        Row partial(hidden_size, 0.0f);
        for (int64_t p = owner.pair_offsets[received]; p < owner.pair_offsets[received + 1]; ++p) {
          const int32_t expert = placement.local_experts(d)[owner.pair_local_expert[p]];
          Add(Scaled(x, hidden_size, owner.pair_weights[p] * static_cast<float>(expert + 1)),
              partial);
        }
        partials[d].push_back(std::move(partial));
      }
    }
  }

  GroupStepResult result;
  for (int32_t s = 0; s < ep_size_; ++s) {
    const StepSlice& source = slices[s];
    std::vector<const Row*> returned;
    for (int32_t d = 0; d < ep_size_; ++d) {
      const int64_t first = Offset(slices[d].return_send_counts, s);
      for (int64_t i = 0; i < source.return_recv_counts[d]; ++i) {
        returned.push_back(&partials[d][first + i]);
      }
    }
    ShardOutput output;
    output.arena = arenas_.Acquire();
    output.num_rows = source.num_source_tokens;
    std::byte* rows = *output.arena->Allocate(output.num_rows * row_bytes);
    for (int64_t t = 0; t < output.num_rows; ++t) {
      Row sum(hidden_size, 0.0f);
      for (int64_t i = source.sum_offsets[t]; i < source.sum_offsets[t + 1]; ++i) {
        Add(*returned[source.sum_rows[i]], sum);
      }
      std::memcpy(rows + t * row_bytes, sum.data(), row_bytes);
    }
    output.rows = rows;
    result.shards.push_back(std::move(output));
  }
  result.timings = {.dispatch_micros = 1, .compute_micros = 2, .combine_micros = 3};
  return result;
}

void Gate::Open() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = true;
  cv_.notify_all();
}

void Gate::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!open_) cv_.wait(lock);
}

}  // namespace expertmesh
