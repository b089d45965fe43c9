#include "server/rpc/explain.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/control/route_call.h"
#include "server/ops/call_error.h"
#include "server/planning/step_plan.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

constexpr int32_t kDefaultTokens = 16;
constexpr int32_t kMostTokens = 4096;
// As many (token, k) as fit a message that people still read.
constexpr int32_t kMostPairs = 65536;
// Rows per rank or expert at which unevenness is no accident.
constexpr int64_t kManyRows = 16;

void DescribeToken(const RoutingSegment& segment, const Placement& placement, int64_t token,
                   v1::ExplainedToken* out) {
  out->set_token(token);
  std::set<int32_t> owners;
  for (int32_t k = 0; k < segment.topk; ++k) {
    const int64_t pair = token * segment.topk + k;
    v1::ExplainedExpert* expert = out->add_experts();
    const int32_t id = segment.topk_ids[pair];
    expert->set_k(k);
    expert->set_expert_id(id);
    if (id < 0) continue;
    expert->set_weight(segment.topk_weights[pair]);
    expert->set_owner_rank(placement.owner_rank(id));
    expert->set_local_expert_id(placement.local_expert_id(id));
    owners.insert(placement.owner_rank(id));
  }
  out->mutable_owner_ranks()->Add(owners.begin(), owners.end());
}

// Sums over a request's steps.
class Explanation {
 public:
  Explanation(const ExplainParams& params, v1::ExplainResponse* response)
      : call_(*params.forward->call), placement_(*params.placement), response_(response) {
    for (int32_t rank = 0; rank < placement_.ep_size(); ++rank) {
      v1::ExplainedRank* out = response->add_ranks();
      out->set_ep_rank(rank);
      out->mutable_send_counts()->Resize(placement_.ep_size(), 0);
    }
    active_.resize(static_cast<size_t>(placement_.ep_size()));
  }

  void AddStep(const StepPlan& plan) {
    for (const StepSlice& slice : plan.slices) AddSlice(slice);
  }

  void Finish() {
    int64_t most_rows = 0;
    int64_t rows = 0;
    for (int32_t rank = 0; rank < placement_.ep_size(); ++rank) {
      v1::ExplainedRank* out = response_->mutable_ranks(rank);
      const int64_t expert_rows = out->num_expert_rows();
      out->set_num_active_experts(static_cast<int32_t>(active_[rank].size()));
      const int64_t shared_columns =
          call_.include_shared_experts
              ? call_.layer->shared_intermediate_size * out->num_source_tokens()
              : 0;
      out->set_estimated_flops(6 * call_.model->hidden_size *
                               (call_.layer->intermediate_size * expert_rows + shared_columns));
      most_rows = std::max(most_rows, expert_rows);
      rows += expert_rows;
      response_->set_dispatch_bytes(response_->dispatch_bytes() + out->dispatch_bytes());
      response_->set_combine_bytes(response_->combine_bytes() + out->combine_bytes());
      response_->set_estimated_flops(response_->estimated_flops() + out->estimated_flops());
    }
    if (rows > 0) {
      response_->set_load_imbalance(static_cast<double>(most_rows) * placement_.ep_size() /
                                    static_cast<double>(rows));
    }
  }

 private:
  void AddSlice(const StepSlice& slice) {
    v1::ExplainedRank* out = response_->mutable_ranks(slice.ep_rank);
    if (slice.header.strategy != DispatchMode::kDirect) {
      out->set_num_source_tokens(out->num_source_tokens() + slice.num_source_tokens);
    }
    const bool with_logits =
        slice.header.strategy == DispatchMode::kAllGatherReduceScatterMonolithic;
    const int64_t num_logits =
        int64_t{call_.layer->num_experts} + call_.layer->router.num_zero_experts;
    const int64_t row_bytes = call_.model->hidden_size * DTypeBytes(call_.activation_dtype) +
                              (with_logits ? num_logits * int64_t{sizeof(float)} : 0);
    const int64_t partial_bytes = call_.model->hidden_size * DTypeBytes(call_.combine_dtype);
    for (int32_t peer = 0; peer < slice.ep_size; ++peer) {
      out->set_send_counts(peer, out->send_counts(peer) + slice.send_counts[peer]);
      if (peer == slice.ep_rank) continue;
      const bool has_slots = slice.max_num_tokens > 0;
      const int64_t num_sent = has_slots                     ? slice.max_num_tokens
                               : with_logits                 ? slice.num_source_tokens
                               : slice.gather_counts.empty() ? slice.send_counts[peer]
                                                             : slice.gather_counts[slice.ep_rank];
      const int64_t num_returned =
          has_slots ? slice.max_return_rows() : slice.return_send_counts[peer];
      out->set_dispatch_bytes(out->dispatch_bytes() + num_sent * row_bytes);
      out->set_combine_bytes(out->combine_bytes() + num_returned * partial_bytes);
    }
    // An expert that occurs twice in a row computes it once, unless each weight makes an input row
    // of its own.
    std::vector<int32_t> experts;
    for (int64_t row = 0; row < slice.num_received_rows(); ++row) {
      experts.assign(slice.pair_local_expert.begin() + slice.pair_offsets[row],
                     slice.pair_local_expert.begin() + slice.pair_offsets[row + 1]);
      std::sort(experts.begin(), experts.end());
      if (!call_.apply_router_weight_on_input) {
        experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
      }
      out->set_num_expert_rows(out->num_expert_rows() + static_cast<int64_t>(experts.size()));
      active_[slice.ep_rank].insert(experts.begin(), experts.end());
    }
  }

  const ForwardCall& call_;
  const Placement& placement_;
  v1::ExplainResponse* const response_;
  std::vector<std::set<int32_t>> active_;
};

void AddWarnings(const ValidForward& forward, v1::ExplainResponse* response) {
  const ForwardCall& call = *forward.call;
  if (response->epoch() == 0) {
    response->add_warnings(
        "no epoch stands: a call would wait until all ranks are there, at most until its deadline, "
        "and run as told here");
  }
  if (response->num_steps() > 1) {
    response->add_warnings(
        absl::StrCat("the request is split over ", response->num_steps(), " steps"));
  }
  // Few rows are never even, and leave experts without one: nobody's fault, so nothing to tell.
  const int64_t num_pairs = std::accumulate(response->tokens_per_expert().begin(),
                                            response->tokens_per_expert().end(), int64_t{0});
  if (response->load_imbalance() > 1.5 && num_pairs >= kManyRows * response->ep_size()) {
    response->add_warnings(
        absl::StrFormat("the busiest rank computes %.2f times the mean number of rows",
                        response->load_imbalance()));
  }
  const int64_t idle =
      std::count(response->tokens_per_expert().begin(), response->tokens_per_expert().end(), 0);
  if (idle > 0 && num_pairs >= kManyRows * call.layer->num_experts) {
    response->add_warnings(
        absl::StrCat(idle, " of ", call.layer->num_experts, " experts get no row"));
  }
  if (forward.num_tokens_without_expert > 0) {
    response->add_warnings(
        absl::StrCat(forward.num_tokens_without_expert, " tokens have no expert; their output is ",
                     call.include_shared_experts ? "the shared experts' alone" : "zeros"));
  }
  if (call.activation_dtype != DefaultActivationDType(*call.model)) {
    const std::string weights(DTypeName(call.model->weight_dtype));
    const std::string hidden(DTypeName(call.activation_dtype));
    response->add_warnings(absl::StrCat("hidden_states are ", hidden, ", the weights ", weights));
  }
}

}  // namespace

absl::StatusOr<RoutedForward> RouteForward(const ForwardCall& call, const RouterTable* routers) {
  RoutedForward routed;
  RoutingSegment& segment = routed.segment;
  segment.num_tokens = call.num_tokens;
  segment.topk = call.topk;
  if (call.routing == RoutingKind::kTopK) {
    segment.topk_ids = reinterpret_cast<const int32_t*>(call.topk_ids.data());
    segment.topk_weights = reinterpret_cast<const float*>(call.topk_weights.data());
    return routed;
  }
  routed.ids.resize(static_cast<size_t>(call.num_tokens * call.topk));
  routed.weights.resize(routed.ids.size());
  segment.topk_ids = routed.ids.data();
  segment.topk_weights = routed.weights.data();
  absl::Status status = RouteCall(call, 0, call.num_tokens, routers, absl::MakeSpan(routed.ids),
                                  absl::MakeSpan(routed.weights));
  if (!status.ok()) return status;
  return routed;
}

absl::StatusOr<v1::ExplainResponse> ExplainForward(const ExplainParams& params) {
  if (params.max_tokens < 0) {
    return InvalidFieldError("max_tokens", params.max_tokens, "0 or more");
  }
  const ForwardCall& call = *params.forward->call;
  const Placement& placement = *params.placement;
  absl::StatusOr<RoutedForward> routed = RouteForward(call, params.routers);
  if (!routed.ok()) return routed.status();
  const RoutingSegment& segment = routed->segment;

  v1::ExplainResponse response;
  response.set_model(call.model->name);
  response.set_layer(call.layer->index);
  response.set_num_tokens(call.num_tokens);
  response.set_topk(call.topk);
  response.set_ep_size(placement.ep_size());
  response.set_epoch(params.epoch);
  const int64_t shown = std::min<int64_t>(
      call.num_tokens, std::min(params.max_tokens == 0 ? kDefaultTokens : params.max_tokens,
                                std::min(kMostTokens, kMostPairs / std::max(call.topk, 1))));
  for (int64_t token = 0; token < shown; ++token) {
    DescribeToken(segment, placement, token, response.add_tokens());
  }
  std::vector<int64_t> tokens_per_expert(static_cast<size_t>(call.layer->num_experts), 0);

  StepPlanParams plan_params;
  plan_params.header.model = call.model->name;
  plan_params.header.layer = call.layer->index;
  plan_params.header.strategy = call.dispatch;
  plan_params.header.combine = call.combine;
  plan_params.header.activation_dtype = call.activation_dtype;
  plan_params.header.combine_dtype = call.combine_dtype;
  plan_params.header.output_dtype = call.output_dtype;
  plan_params.header.apply_router_weight_on_input = call.apply_router_weight_on_input;
  plan_params.header.include_shared_experts = call.include_shared_experts;
  plan_params.placement = &placement;
  plan_params.hidden_size = call.model->hidden_size;
  plan_params.remote_ranks = params.remote_ranks;
  plan_params.max_num_tokens = params.max_num_tokens;
  StepLimits limits;
  limits.max_tokens = params.max_step_tokens;
  limits.max_rank_pairs = params.max_rank_pairs;
  if (call.dispatch == DispatchMode::kAllToAllFixedCapacity) {
    limits.max_num_tokens = params.max_num_tokens;
  }
  Explanation explanation(params, &response);
  int32_t num_steps = 0;
  for (int64_t first = 0; first < call.num_tokens || num_steps == 0; ++num_steps) {
    RoutingSegment piece = segment;
    piece.num_tokens =
        call.num_tokens == 0 ? 0 : CountTokensThatFit({&segment, 1}, placement, first, limits);
    piece.topk_ids += first * piece.topk;
    piece.topk_weights += first * piece.topk;
    plan_params.segments = absl::MakeConstSpan(&piece, 1);
    absl::StatusOr<StepPlan> plan = PlanStep(plan_params);
    if (!plan.ok()) return plan.status();
    explanation.AddStep(*plan);
    for (size_t e = 0; e < tokens_per_expert.size(); ++e) {
      tokens_per_expert[e] += plan->tokens_per_expert[e];
    }
    if (num_steps == 0) {
      response.set_strategy(DispatchModeToWire(plan->slices.front().header.strategy));
      response.set_strategy_reason(plan->strategy_reason);
    }
    for (int32_t rank = 0; rank < placement.ep_size(); ++rank) {
      const int64_t end = std::min(shown, first + plan->shard_offsets[rank + 1]);
      for (int64_t token = first + plan->shard_offsets[rank]; token < end; ++token) {
        response.mutable_tokens(static_cast<int>(token))->set_step(num_steps);
        response.mutable_tokens(static_cast<int>(token))
            ->set_source_rank(plan->direct.has_value() ? -1 : rank);
      }
    }
    first += piece.num_tokens;
    if (call.num_tokens == 0) break;
  }
  response.set_num_steps(call.num_tokens == 0 ? 0 : num_steps);
  response.mutable_tokens_per_expert()->Add(tokens_per_expert.begin(), tokens_per_expert.end());
  explanation.Finish();
  AddWarnings(*params.forward, &response);
  return response;
}

}  // namespace expertmesh
