#include "tests/gpu/bench_ffn.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/permute_rows.h"
#include "kernels/cuda/sum_rows.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/device_timer.h"
#include "tests/gpu/expert_ffn.h"
#include "tests/gpu/random_pattern.h"
#include "tests/gpu/routed_experts.h"

namespace expertmesh {
namespace {

// Relative errors: float32 sums; Hopper's float8 sums of 13 bits; an intermediate row rounded to
// bfloat16, or to float8.
constexpr double kSumError = 1e-4;
constexpr double kFloat8SumError = 3e-3;
constexpr double kFfnError = 1e-2;
constexpr double kFloat8FfnError = 6e-2;

constexpr double kFfnTarget = 0.65;
constexpr double kDecodeTarget = 0.80;
constexpr double kFloat8Target = 1.7;

std::vector<int64_t> EvenOffsets(int64_t num_experts, int64_t rows_per_expert) {
  std::vector<int64_t> offsets;
  for (int64_t e = 0; e <= num_experts; ++e) offsets.push_back(e * rows_per_expert);
  return offsets;
}

struct FfnCase {
  std::string name;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  std::vector<int64_t> expert_offsets;
  bool is_decode = false;  // held to bandwidth rather than to the matmul
  double target = 0;       // of the bfloat16 FFN against the matmul
};

Result FlopResult(const BenchContext& context, const std::string& name, double flop,
                  double seconds) {
  return {.name = name,
          .value = flop / seconds * 1e-12,
          .unit = "TFLOP/s",
          .limit = context.matmul_tflops,
          .limit_name = kMatmulLimit};
}

Result ByteResult(const BenchContext& context, const std::string& name, double bytes,
                  double seconds) {
  return {.name = name,
          .value = bytes / seconds * 1e-9,
          .unit = "GB/s",
          .limit = context.copy_gb_per_second,
          .limit_name = kCopyLimit};
}

void AddChecked(const BenchContext& context, Result result, double error, double bound) {
  result.check = "sampled outputs, relative error " + std::to_string(error);
  result.is_right = error < bound;
  context.table->Add(result);
}

// Returns the seconds of the whole FFN: fused, or in parts for float8.
double BenchOne(const BenchContext& context, const FfnCase& c, DType dtype,
                const FfnPatterns& patterns) {
  const bool is_float8 = dtype == DType::kFloat8E4M3;
  const std::string name = c.name + (is_float8 ? " fp8" : " bf16");
  ExpertFfn ffn({dtype, c.hidden_size, c.intermediate_size, c.expert_offsets}, patterns);
  const auto result = [&](const std::string& part, double flop, double bytes, double seconds) {
    return c.is_decode ? ByteResult(context, name + " " + part, bytes, seconds)
                       : FlopResult(context, name + " " + part, flop, seconds);
  };
  const double gate_up =
      SecondsPerLaunch(context.stream, [&] { return ffn.LaunchGateUp(context.stream); });
  Result gemm = result("gate_up", ffn.gate_up_flop(), ffn.gate_up_bytes(), gate_up);
  if (c.is_decode) gemm.target = kDecodeTarget;
  AddChecked(context, gemm, ffn.GateUpError(), is_float8 ? kFloat8SumError : kSumError);
  const double ffn_flop = ffn.gate_up_flop() + ffn.down_flop();
  const double ffn_bytes = ffn.gate_up_bytes() + ffn.down_bytes();
  const double ffn_error = is_float8 ? kFloat8FfnError : kFfnError;
  const double parts =
      SecondsPerLaunch(context.stream, [&] { return ffn.LaunchFfn(context.stream); });
  Result in_parts = result("FFN in parts", ffn_flop, ffn_bytes, parts);
  if (c.is_decode && is_float8) in_parts.target = kDecodeTarget;
  AddChecked(context, in_parts, ffn.OutputError(false), ffn_error);
  if (is_float8) return parts;
  const double all =
      SecondsPerLaunch(context.stream, [&] { return ffn.LaunchFusedFfn(context.stream); });
  Result whole = result("FFN fused", ffn_flop, ffn_bytes, all);
  whole.target = c.is_decode ? kDecodeTarget : c.target;
  AddChecked(context, whole, ffn.OutputError(true), ffn_error);
  if (context.cublas != nullptr) {
    const double loop = SecondsPerLaunch(
        context.stream, [&] { return ffn.LaunchCublasLoop(context.cublas, true, context.stream); });
    context.table->Add({.name = name + " FFN, speed beside a loop of cuBLAS",
                        .value = loop / all,
                        .unit = "x",
                        .limit = 1.0,
                        .limit_name = "cuBLAS, call by call",
                        .target = 1.0});
  }
  return all;
}

// All in bfloat16, then all in float8: a kernel of one type that takes the process with it leaves
// the figures of the other.
void BenchCases(const BenchContext& context, const std::vector<FfnCase>& cases) {
  std::vector<double> bf16_seconds;
  {
    const FfnPatterns bf16(DType::kBFloat16);
    for (const FfnCase& c : cases) {
      bf16_seconds.push_back(BenchOne(context, c, DType::kBFloat16, bf16));
    }
  }
  const FfnPatterns fp8(DType::kFloat8E4M3);
  for (size_t i = 0; i < cases.size(); ++i) {
    const FfnCase& c = cases[i];
    const double fp8_seconds = BenchOne(context, c, DType::kFloat8E4M3, fp8);
    Result ratio = {.name = c.name + " FFN, fp8 beside bf16",
                    .value = bf16_seconds[i] / fp8_seconds,
                    .unit = "x"};
    if (!c.is_decode) {
      ratio.limit = 1.0;
      ratio.limit_name = "bf16";
      ratio.target = kFloat8Target;
    }
    context.table->Add(ratio);
  }
}

void BenchTilesOf(const BenchContext& context, const FfnPatterns& patterns, DType dtype,
                  int64_t rows_per_expert) {
  const bool is_float8 = dtype == DType::kFloat8E4M3;
  ExpertFfn ffn({dtype, 7168, 2048, EvenOffsets(32, rows_per_expert)}, patterns);
  for (const GemmTile tile :
       {GemmTile::kRows16, GemmTile::kRows64, GemmTile::kRows128, GemmTile::kRows256}) {
    if (is_float8 && tile == GemmTile::kRows256) continue;
    ffn.set_tile(tile);
    const std::string name = "tile of " + std::to_string(GemmTileRows(tile)) +
                             " rows, E=32 rows=" + std::to_string(rows_per_expert) +
                             (is_float8 ? " fp8 gate_up" : " bf16 gate_up");
    const auto result = [&](const std::string& what, double seconds) {
      return rows_per_expert <= 64 ? ByteResult(context, what, ffn.gate_up_bytes(), seconds)
                                   : FlopResult(context, what, ffn.gate_up_flop(), seconds);
    };
    const double plain =
        SecondsPerLaunch(context.stream, [&] { return ffn.LaunchGateUp(context.stream); });
    AddChecked(context, result(name, plain), ffn.GateUpError(),
               is_float8 ? kFloat8SumError : kSumError);
    if (is_float8) continue;
    const double fused =
        SecondsPerLaunch(context.stream, [&] { return ffn.LaunchFusedGateUp(context.stream); });
    context.table->Add(result(name + ", fused", fused));
  }
}

// Of the host alone, the device being behind.
double SecondsToEnqueue(const BenchContext& context, const std::function<cudaError_t()>& step) {
  constexpr int kStepsPerRound = 20;
  double enqueue = INFINITY;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kStepsPerRound; ++i) CheckCuda(step(), "a step");
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    CheckCuda(cudaStreamSynchronize(context.stream), "a step");
    enqueue = std::min(enqueue, taken.count() / kStepsPerRound);
  }
  return enqueue;
}

// Of the device, for one graph that was launched: the mean of many, since it is taken in steps.
double BytesPerGraph(const BenchContext& context, cudaGraph_t graph) {
  constexpr size_t kGraphs = 256;
  const auto free_bytes = [] {
    size_t free = 0;
    size_t total = 0;
    CheckCuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<double>(free);
  };
  const double before = free_bytes();
  std::vector<cudaGraphExec_t> graphs(kGraphs);
  for (cudaGraphExec_t& exec : graphs) {
    CheckCuda(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    CheckCuda(cudaGraphLaunch(exec, context.stream), "a graph's launch");
  }
  CheckCuda(cudaStreamSynchronize(context.stream), "graphs");
  const double after = free_bytes();
  for (cudaGraphExec_t exec : graphs) CheckCuda(cudaGraphExecDestroy(exec), "a graph's end");
  return (before - after) / kGraphs;
}

// The FFN of a small decode step of a fixed capacity, with its counts on the device: launch by
// launch, and as CudaGraphCache does it, counts, graph and mark.
void BenchGraph(const BenchContext& context, const FfnPatterns& bf16, int64_t rows_per_expert) {
  ExpertFfn ffn({DType::kBFloat16, 2048, 768, EvenOffsets(16, rows_per_expert)}, bf16);
  ffn.UseDeviceCounts();
  const std::string name =
      "H=2048 I=768 E=16 rows=" + std::to_string(rows_per_expert) + " bf16 FFN, counts on device";
  const auto bench = [&](const std::string& what, const std::function<cudaError_t()>& step) {
    // NaNs: what stands there from before must not pass for an output.
    CheckCuda(
        cudaMemsetAsync(const_cast<std::byte*>(ffn.output()), 0xff,
                        static_cast<size_t>(ffn.num_rows()) * 2048 * sizeof(float), context.stream),
        "a memset");
    const double seconds = SecondsPerLaunch(context.stream, step);
    AddChecked(context, {.name = name + ", " + what, .value = seconds * 1e6, .unit = "us"},
               ffn.OutputError(true), kFfnError);
    context.table->Add({.name = name + ", " + what + ", host's time to enqueue",
                        .value = SecondsToEnqueue(context, step) * 1e6,
                        .unit = "us"});
  };
  bench("launch by launch", [&] {
    const cudaError_t error = ffn.LaunchCounts(context.stream);
    return error == cudaSuccess ? ffn.LaunchFusedFfn(context.stream) : error;
  });
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t passed = nullptr;
  CheckCuda(cudaStreamBeginCapture(context.stream, cudaStreamCaptureModeThreadLocal), "a capture");
  CheckCuda(ffn.LaunchFusedFfn(context.stream), "a captured launch");
  CheckCuda(cudaStreamEndCapture(context.stream, &graph), "a capture's end");
  CheckCuda(cudaGraphInstantiate(&exec, graph, 0), "a graph");
  CheckCuda(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming), "an event");
  bench("as a graph", [&] {
    cudaError_t error = ffn.LaunchCounts(context.stream);
    if (error == cudaSuccess) error = cudaGraphLaunch(exec, context.stream);
    return error == cudaSuccess ? cudaEventRecord(passed, context.stream) : error;
  });
  // No plan of memory counts it: CudaGraphCache::kMaxGraphs of them for each layer.
  context.table->Add({.name = name + ", memory of a graph",
                      .value = BytesPerGraph(context, graph) / 1024,
                      .unit = "KiB"});
  CheckCuda(cudaGraphExecDestroy(exec), "a graph's end");
  CheckCuda(cudaGraphDestroy(graph), "a captured graph's end");
  CheckCuda(cudaEventDestroy(passed), "an event's end");
}

// What a decode step of 64 tokens launches on a group's one rank (BenchRankStep): rows to their
// experts, the FFN, the rank's weighted sums, the sum of all ranks'.
void BenchStep(BenchContext& context, const FfnPatterns& bf16) {
  constexpr int64_t kTokens = 64;
  constexpr int64_t kTopK = 8;
  constexpr int64_t kHiddenSize = 2048;
  ExpertFfn ffn({DType::kBFloat16, kHiddenSize, 768, RoutedOffsets(128, kTokens, kTopK)}, bf16);
  const DeviceMemory hidden(kTokens * kHiddenSize * 2);
  const DeviceMemory output(kTokens * kHiddenSize * 2);
  bf16.rows.Fill(hidden.data(), kTokens * kHiddenSize);
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets;
  std::vector<int64_t> rows;
  for (int64_t t = 0; t <= kTokens; ++t) offsets.push_back(t * kTopK);
  for (int64_t row = 0; row < kTokens * kTopK; ++row) {
    tokens.push_back(static_cast<int32_t>(row * 37 % kTokens));
    rows.push_back(row * 101 % (kTokens * kTopK));
  }
  const DeviceMemory device_tokens(static_cast<int64_t>(tokens.size()) * 4);
  const DeviceMemory device_offsets(static_cast<int64_t>(offsets.size()) * 8);
  const DeviceMemory device_rows(static_cast<int64_t>(rows.size()) * 8);
  CopyToDevice(device_tokens, tokens);
  CopyToDevice(device_offsets, offsets);
  CopyToDevice(device_rows, rows);
  const std::vector<float> weights(rows.size(), 1.0f / kTopK);
  const DeviceMemory device_weights(static_cast<int64_t>(weights.size()) * 4);
  CopyToDevice(device_weights, weights);
  CudaPermuteRowsParams permute;
  permute.rows = hidden.data();
  permute.dtype = DType::kBFloat16;
  permute.hidden_size = kHiddenSize;
  permute.num_rows = kTokens * kTopK;
  permute.row_indices = device_tokens.As<int32_t>();
  permute.output = ffn.rows();
  CudaSumRowsParams sum;
  sum.rows = ffn.output();
  sum.rows_dtype = DType::kFloat32;
  sum.hidden_size = kHiddenSize;
  sum.num_outputs = kTokens;
  sum.offsets = device_offsets.As<int64_t>();
  sum.row_indices = device_rows.As<int64_t>();
  sum.weights = device_weights.As<float>();
  sum.output = output.data();
  sum.output_dtype = DType::kBFloat16;
  const DeviceMemory last_output(kTokens * kHiddenSize * 2);
  std::vector<int64_t> ones(kTokens + 1);
  std::iota(ones.begin(), ones.end(), 0);
  const DeviceMemory device_ones(static_cast<int64_t>(ones.size()) * 8);
  CopyToDevice(device_ones, ones);
  CudaSumRowsParams last = sum;
  last.rows = output.data();
  last.rows_dtype = DType::kBFloat16;
  last.offsets = last.row_indices = device_ones.As<int64_t>();
  last.weights = nullptr;
  last.output = last_output.data();
  const auto step = [&] {
    cudaError_t error = LaunchPermuteRows(permute, context.stream);
    if (error == cudaSuccess) error = ffn.LaunchFusedFfn(context.stream);
    if (error == cudaSuccess) error = LaunchSumRows(sum, context.stream);
    if (error == cudaSuccess) error = LaunchSumRows(last, context.stream);
    return error;
  };
  const double seconds = SecondsPerLaunch(context.stream, step);
  context.step_kernel_seconds = seconds;
  const std::string name = "step T=64 H=2048 I=768 E=128 k=8 bf16";
  context.table->Add(
      ByteResult(context, name + ", kernels", ffn.gate_up_bytes() + ffn.down_bytes(), seconds));
  context.table->Add({.name = name + ", kernels", .value = seconds * 1e6, .unit = "us"});
  context.table->Add({.name = name + ", host's time to enqueue",
                      .value = SecondsToEnqueue(context, step) * 1e6,
                      .unit = "us",
                      .limit = 60,
                      .limit_name = "us to stay below"});
}

}  // namespace

void BenchMatmul(BenchContext* context) {
  if (context->cublas == nullptr) return;
  constexpr int64_t kSize = 8192;
  const RandomPattern pattern(DType::kBFloat16, 1.0, 71);
  const DeviceMemory rows(kSize * kSize * 2);
  const DeviceMemory weights(kSize * kSize * 2);
  const DeviceMemory output(kSize * kSize * 2);
  pattern.Fill(rows.data(), kSize * kSize);
  pattern.Fill(weights.data(), kSize * kSize);
  const auto multiply = [&] {
    return context->cublas->Multiply(rows.data(), weights.data(), output.data(), kSize, kSize,
                                     kSize, context->stream)
               ? cudaSuccess
               : cudaErrorUnknown;
  };
  if (multiply() != cudaSuccess) {
    // Of all figures only its own are lost.
    std::printf("no limit from cuBLAS, which refuses to multiply\n");
    context->cublas = nullptr;
    return;
  }
  const double seconds = SecondsPerLaunch(context->stream, multiply);
  context->matmul_tflops = 2.0 * kSize * kSize * kSize / seconds * 1e-12;
  context->table->Add({.name = "cuBLAS bf16 matmul 8192 x 8192 x 8192",
                       .value = context->matmul_tflops,
                       .unit = "TFLOP/s"});
}

void BenchPrefill(const BenchContext& context) {
  constexpr int64_t kTokens = 32768;
  BenchCases(
      context,
      {{"I=1024 E=128 k=8 H=4096 T=32768", 4096, 1024, RoutedOffsets(128, kTokens, 8), false,
        kFfnTarget},
       {"I=2048 E=64 k=4 H=4096 T=32768", 4096, 2048, RoutedOffsets(64, kTokens, 4), false, 0},
       {"I=256 E=256 k=16 H=4096 T=32768", 4096, 256, RoutedOffsets(256, kTokens, 16), false, 0}});
}

void BenchDeepSeekRank(const BenchContext& context) {
  std::vector<FfnCase> cases;
  for (const int64_t rows : {1, 16, 64, 128}) {
    cases.push_back({"DeepSeek-V3 rank E=32 rows=" + std::to_string(rows), 7168, 2048,
                     EvenOffsets(32, rows), rows <= 16, 0});
  }
  // 8,192 tokens of the group, whose 8 of 256 experts each are this rank's 32 once in eight.
  cases.push_back(
      {"DeepSeek-V3 rank E=32 T=8192", 7168, 2048, RoutedOffsets(32, 8192, 1), false, 0});
  BenchCases(context, cases);
}

void BenchTiles(const BenchContext& context) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
    const FfnPatterns patterns(dtype);
    for (const int64_t rows : {1, 32, 256, 2048}) BenchTilesOf(context, patterns, dtype, rows);
  }
}

void BenchStepKernels(BenchContext* context) {
  const FfnPatterns bf16(DType::kBFloat16);
  for (const int64_t rows : {1, 8}) BenchGraph(*context, bf16, rows);
  BenchStep(*context, bf16);
}

}  // namespace expertmesh
