// Checks CUDA's kernels on random data and times them against limits found in the same run: a
// device copy, and cuBLAS where it is found. Prints one table, a row as soon as it is known, in
// parts that can be run in a process each, for a kernel that fails takes its process with it. Exits
// with 0 when all outputs were right, 1 when one was not or a call failed, 2 for wrong arguments,
// 77 when there is no GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>

#include "tests/gpu/bench_context.h"
#include "tests/gpu/bench_ffn.h"
#include "tests/gpu/bench_rank_step.h"
#include "tests/gpu/bench_rows.h"
#include "tests/gpu/cublas_library.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/result_table.h"

namespace expertmesh {
namespace {

constexpr int kNoGpu = 77;

constexpr const char* kParts[] = {"rows", "prefill", "deepseek", "step", "tiles"};

struct Options {
  std::string json_path;
  std::string cublas_path;
  std::string only;  // one of kParts; empty: all

  bool Runs(const std::string& part) const { return only.empty() || only == part; }
};

bool Parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--json=", 0) == 0) {
      options->json_path = argument.substr(std::strlen("--json="));
    } else if (argument.rfind("--cublas=", 0) == 0) {
      options->cublas_path = argument.substr(std::strlen("--cublas="));
    } else if (argument.rfind("--only=", 0) == 0 &&
               std::count(std::begin(kParts), std::end(kParts),
                          argument.substr(std::strlen("--only="))) == 1) {
      options->only = argument.substr(std::strlen("--only="));
    } else {
      std::fprintf(stderr,
                   "gpu_bench: '%s' is not known\n"
                   "usage: gpu_bench [--json=FILE] [--cublas=PATH of libcublas.so.13 or .12] "
                   "[--only=rows|prefill|deepseek|step|tiles]\n",
                   argument.c_str());
      return false;
    }
  }
  return true;
}

int Run(const Options& options) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::fprintf(stderr, "gpu_bench: there is no GPU here: %s\n",
                 error == cudaSuccess ? "no device" : cudaGetErrorString(error));
    return kNoGpu;
  }
  cudaDeviceProp properties = {};
  CheckCuda(cudaSetDevice(0), "cudaSetDevice");
  CheckCuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const std::string device = std::string(properties.name) + ", sm_" +
                             std::to_string(properties.major * 10 + properties.minor) + ", " +
                             std::to_string(properties.multiProcessorCount) + " multiprocessors";
  std::printf("%s\n", device.c_str());
  if (properties.major != 9) std::printf("not sm_90: no tensor core kernels here\n");

  ResultTable table(options.json_path, device);
  BenchContext context;
  context.table = &table;
  CheckCuda(cudaStreamCreateWithFlags(&context.stream, cudaStreamNonBlocking), "a stream");
  std::string why;
  const std::unique_ptr<CublasLibrary> cublas = CublasLibrary::Open(options.cublas_path, &why);
  context.cublas = cublas.get();
  if (cublas == nullptr) std::printf("no cuBLAS, so no limit from it: %s\n", why.c_str());

  BenchCopy(&context);
  BenchMatmul(&context);
  if (options.Runs("rows")) BenchRows(context);
  if (options.Runs("prefill")) BenchPrefill(context);
  if (options.Runs("deepseek")) BenchDeepSeekRank(context);
  if (options.Runs("step")) {
    BenchStepKernels(&context);
    BenchRankStep(context, {});
  }
  if (options.Runs("tiles")) BenchTiles(context);
  CheckCuda(cudaStreamDestroy(context.stream), "the stream's end");
  if (!table.is_written()) {
    std::fprintf(stderr, "gpu_bench: cannot write %s\n", options.json_path.c_str());
    return 1;
  }
  if (!table.all_right()) {
    std::fprintf(stderr, "gpu_bench: an output was wrong\n");
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) {
  expertmesh::Options options;
  if (!expertmesh::Parse(argc, argv, &options)) return 2;
  return expertmesh::Run(options);
}
