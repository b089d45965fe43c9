// The grouped FFN of one layer against a loop of oneDNN matmuls and against what the machine can
// do, measured in the same run in turns, since a shared machine's speed changes from minute to
// minute. Only the ratios mean something.
//
//   bench_expert_ffn [rounds [tokens...]]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/bench/onednn_expert_ffn.h"
#include "tests/bench/roofline_avx512_bf16.h"

namespace expertmesh {
namespace {

constexpr int32_t kNumExperts = 128;
constexpr int64_t kHiddenSize = 2048;
constexpr int64_t kIntermediateSize = 768;
constexpr int kTopk = 8;
constexpr int kNumThreads = 2;
constexpr double kExpertBytes = 3.0 * kHiddenSize * kIntermediateSize * 2;
constexpr double kFlopsPerRow = 6.0 * kHiddenSize * kIntermediateSize;

template <typename Work>
double Seconds(Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<uint16_t> RandomBFloat16(std::mt19937_64& random, int64_t count, float deviation) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = FloatToBFloat16(normal(random));
  return values;
}

// Rows by expert when every token takes kTopk experts at random.
std::vector<int64_t> RandomOffsets(std::mt19937_64& random, int64_t num_tokens) {
  std::vector<int64_t> num_rows(kNumExperts, 0);
  std::vector<int32_t> experts(kNumExperts);
  std::iota(experts.begin(), experts.end(), 0);
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (int k = 0; k < kTopk; ++k)
      ++num_rows[static_cast<size_t>(experts[static_cast<size_t>(k)])];
  }
  std::vector<int64_t> offsets = {0};
  for (const int64_t n : num_rows) offsets.push_back(offsets.back() + n);
  return offsets;
}

double BytesPerSecond(ParallelFor& parallel_for, const std::vector<char>& memory) {
  constexpr int64_t kPieces = 64;
  const int64_t piece_bytes = static_cast<int64_t>(memory.size()) / kPieces;
  std::vector<int64_t> sums(kPieces);
  const double seconds = Seconds([&] {
    parallel_for.Run(kPieces, 1e6, [&](int64_t piece, int) {
      sums[static_cast<size_t>(piece)] =
          ReadMemory(memory.data() + piece * piece_bytes, piece_bytes);
    });
  });
  if (std::accumulate(sums.begin(), sums.end(), int64_t{0}) == 1) std::puts("");
  return static_cast<double>(piece_bytes * kPieces) / seconds;
}

double FlopsPerSecond(ParallelFor& parallel_for) {
  constexpr int64_t kPieces = 16;
  constexpr int64_t kIterations = 100000;
  std::vector<float> sums(kPieces);
  const double seconds = Seconds([&] {
    parallel_for.Run(kPieces, 1e6, [&](int64_t piece, int) {
      sums[static_cast<size_t>(piece)] = RunDotProducts(kIterations);
    });
  });
  if (std::accumulate(sums.begin(), sums.end(), 0.0f) == 1.0f) std::puts("");
  return static_cast<double>(kPieces * kIterations * kFlopsPerIteration) / seconds;
}

int Run(int rounds, const std::vector<int64_t>& token_counts) {
  const std::vector<CpuIsa> isas = SupportedCpuIsas();
  if (isas.back() != CpuIsa::kAvx512Bf16) {
    std::puts("bench_expert_ffn: this machine has no AVX-512 BF16");
    return 0;
  }
  ParallelForOptions options;
  options.num_threads = kNumThreads;
  ParallelFor parallel_for(options);
  std::mt19937_64 random(1);
  const std::vector<uint16_t> gate_up =
      RandomBFloat16(random, 2 * kIntermediateSize * kHiddenSize, 0.03f);
  const std::vector<uint16_t> down = RandomBFloat16(random, kHiddenSize * kIntermediateSize, 0.03f);

  ExpertLayerShape shape;
  shape.num_local_experts = kNumExperts;
  shape.hidden_size = kHiddenSize;
  shape.intermediate_size = kIntermediateSize;
  shape.weight_dtype = DType::kBFloat16;
  const std::unique_ptr<ExpertKernels> kernels =
      NewCpuExpertKernels(shape, CpuIsa::kAvx512Bf16, &parallel_for).value();
  ExpertWeights weights;
  weights.gate = {gate_up.data(), kHiddenSize, 1};
  weights.up = {gate_up.data() + kIntermediateSize * kHiddenSize, kHiddenSize, 1};
  weights.down = {down.data(), kIntermediateSize, 1};
  const double load_seconds = Seconds([&] {
    for (int32_t e = 0; e < kNumExperts; ++e) {
      if (!kernels->LoadExpert(e, weights).ok()) std::abort();
    }
  });
  std::printf("packing: %.2f GB/s on one thread\n",
              kNumExperts * kExpertBytes / load_seconds / 1e9);
  OneDnnExpertFfn onednn(kNumExperts, kHiddenSize, kIntermediateSize, gate_up.data(), down.data(),
                         &parallel_for);
  const std::vector<char> memory(size_t{1} << 28, 1);
  HostBufferPool pool;
  StepArena arena(&pool);
  const std::unique_ptr<Stream> stream = NewInlineHostStream();

  std::printf("E=%d H=%ld I=%ld top-%d bfloat16, %d threads; medians of %d rounds\n", kNumExperts,
              kHiddenSize, kIntermediateSize, kTopk, kNumThreads, rounds);
  std::printf("%7s %12s %12s %12s %14s %14s\n", "tokens", "roofline ms", "ours ms", "oneDNN ms",
              "ours/roofline", "oneDNN/ours");
  for (const int64_t num_tokens : token_counts) {
    const int64_t num_rows = num_tokens * kTopk;
    const std::vector<uint16_t> rows = RandomBFloat16(random, num_rows * kHiddenSize, 1.0f);
    std::vector<float> ours(static_cast<size_t>(num_rows * kHiddenSize));
    std::vector<float> theirs(ours.size());
    std::vector<double> roofline_seconds, our_seconds, their_seconds, roofline_ratios, ratios;
    for (int round = -1; round < rounds; ++round) {  // the first warms up
      const std::vector<int64_t> offsets = RandomOffsets(random, num_tokens);
      int64_t num_active = 0;
      for (size_t e = 0; e < kNumExperts; ++e) {
        num_active += offsets[e + 1] > offsets[e] ? 1 : 0;
        onednn.Prepare(offsets[e + 1] - offsets[e]);
      }
      const double memory_seconds =
          static_cast<double>(num_active) * kExpertBytes / BytesPerSecond(parallel_for, memory);
      const double compute_seconds =
          static_cast<double>(num_rows) * kFlopsPerRow / FlopsPerSecond(parallel_for);
      GroupedFfnParams params;
      params.activation_dtype = DType::kBFloat16;
      params.rows = reinterpret_cast<const std::byte*>(rows.data());
      params.expert_offsets = offsets;
      params.output = ours.data();
      params.arena = &arena;
      arena.Reset();
      double ours_now = 0;
      double theirs_now = 0;
      // In turns, since who comes first on a busy machine is preempted less often, or more.
      for (const bool our_turn : {round % 2 == 0, round % 2 != 0}) {
        if (!our_turn) {
          theirs_now = Seconds([&] { onednn.Run(offsets, rows.data(), theirs.data()); });
          continue;
        }
        ours_now = Seconds([&] {
          if (!kernels->GroupedFfn(params, *stream).ok() ||
              !stream->Wait(absl::InfiniteFuture()).ok()) {
            std::abort();
          }
        });
      }
      for (size_t i = 0; i < ours.size(); i += 97) {
        if (std::abs(ours[i] - theirs[i]) > 0.05f * (1.0f + std::abs(ours[i]))) {
          std::printf("results differ: %g and %g\n", static_cast<double>(ours[i]),
                      static_cast<double>(theirs[i]));
          return 1;
        }
      }
      if (round < 0) continue;
      roofline_seconds.push_back(std::max(memory_seconds, compute_seconds));
      our_seconds.push_back(ours_now);
      their_seconds.push_back(theirs_now);
      roofline_ratios.push_back(roofline_seconds.back() / ours_now);
      ratios.push_back(theirs_now / ours_now);
    }
    std::printf("%7ld %12.3f %12.3f %12.3f %14.2f %14.2f\n", num_tokens,
                Median(roofline_seconds) * 1e3, Median(our_seconds) * 1e3,
                Median(their_seconds) * 1e3, Median(roofline_ratios), Median(ratios));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) {
  std::vector<int64_t> token_counts;
  for (int i = 2; i < argc; ++i) token_counts.push_back(std::atoll(argv[i]));
  if (token_counts.empty()) token_counts = {1, 4, 16, 64, 256, 1024};
  return expertmesh::Run(argc > 1 ? std::atoi(argv[1]) : 15, token_counts);
}
