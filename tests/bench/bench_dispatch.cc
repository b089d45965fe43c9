// What issue 4 asks of steps over several ranks, each figure beside its limit, measured in the same
// run; alternating rounds, medians. Wants an idle machine of two cores or more.
//
// usage: bench_dispatch [bytes] [planning] [exchange] [ranks] [lanes]   (default: all)
//   bytes     on the communicator per step, against the sum over (token, owner != source)
//   planning  PlanStep, slices included, for each (token, k) pair on one core
//   exchange  AllToAllV with its header and checksum against a bare exchange of the same bytes
//   ranks     two rank processes with a core each against one rank with both cores
//   lanes     two lanes against one: with busy cores, and with a wire that takes as long as the
//             experts

#include <malloc.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/comm/in_process_communicator.h"
#include "server/planning/step_plan.h"
#include "tests/bench/bench_figures.h"
#include "tests/bench/dispatch_lanes.h"
#include "tests/bench/dispatch_processes.h"

namespace expertmesh {
namespace {

StepPlan MakePlan(int64_t num_tokens, int32_t topk, int32_t num_experts, int32_t ep_size,
                  const std::vector<int32_t>& ids, const std::vector<float>& weights) {
  const absl::StatusOr<Placement> placement = Placement::Contiguous(num_experts, ep_size);
  Require(placement.status());
  const RoutingSegment segment{ids.data(), weights.data(), num_tokens, topk};
  StepPlanParams params;
  params.header.strategy = DispatchMode::kAllToAll;
  params.header.activation_dtype = DType::kBFloat16;
  params.header.combine_dtype = DType::kFloat16;
  params.header.output_dtype = DType::kBFloat16;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &*placement;
  absl::StatusOr<StepPlan> plan = PlanStep(params);
  Require(plan.status());
  return *std::move(plan);
}

void BenchPlanning() {
  constexpr int32_t kTopk = 8;
  constexpr int32_t kExperts = 256;
  double at_4096 = 0;
  for (const int64_t num_tokens : {4096, 65536}) {
    const std::vector<int32_t> ids = RandomTopk(num_tokens, kTopk, kExperts);
    const std::vector<float> weights(ids.size(), 0.125f);
    for (const int32_t ep_size : {8, 16, 32, 64}) {
      std::vector<double> nanos;
      for (int round = 0; round < (num_tokens > 4096 ? 101 : 41); ++round) {
        nanos.push_back(
            Seconds([&] { MakePlan(num_tokens, kTopk, kExperts, ep_size, ids, weights); }) * 1e9 /
            static_cast<double>(ids.size()));
      }
      const double median = Median(nanos);
      const std::string what =
          absl::StrCat("planning, ", num_tokens, " tokens, ", ep_size, " ranks");
      if (num_tokens == 4096) {
        at_4096 = std::max(at_4096, median);
        PrintAtMost(what, median, "ns/pair", 15);
      } else {
        // Linear: the same time for each pair, but for the caches that the tokens leave.
        PrintAtMost(what + ", against the most of 4096", median / at_4096, "x", 1.5);
      }
    }
  }
}

void BenchBytes() {
  for (const int32_t ep_size : {2, 4, 7}) {
    const int64_t bytes_over_formula = MeasureBytesOverFormula(ep_size);
    PrintAtMost(absl::StrCat("bytes per step above one row per (token, owner), ", ep_size,
                             " ranks, of each pair of ranks"),
                static_cast<double>(bytes_over_formula) / (ep_size * (ep_size - 1)), "bytes", 64);
  }
}

int Main(int argc, char** argv) {
  // As the servers' mains do: without it everything pays for fresh pages.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
  const auto is_asked_for = [&](const char* name) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], name) == 0) return true;
    }
    return argc == 1;
  };
  // What forks comes before there are threads.
  if (is_asked_for("exchange")) BenchExchange();
  if (is_asked_for("ranks")) BenchRankProcesses();
  if (is_asked_for("bytes")) BenchBytes();
  if (is_asked_for("planning")) BenchPlanning();
  if (is_asked_for("lanes")) BenchLanes();
  return 0;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) { return expertmesh::Main(argc, argv); }
