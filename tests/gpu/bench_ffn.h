#ifndef EXPERTMESH_TESTS_GPU_BENCH_FFN_H_
#define EXPERTMESH_TESTS_GPU_BENCH_FFN_H_

#include "tests/gpu/bench_context.h"

namespace expertmesh {

// cuBLAS on one large bfloat16 matmul; sets context->matmul_tflops. A cuBLAS that refuses to is
// taken out of the context.
void BenchMatmul(BenchContext* context);
// Grouped GEMMs and the FFN made of them, in bfloat16 and float8, each checked on sampled outputs:
// at the shapes of prefill, and at those of DeepSeek-V3's rank.
void BenchPrefill(const BenchContext& context);
void BenchDeepSeekRank(const BenchContext& context);
// Every tile at shapes from decode to prefill, what ChooseGemmTile chose from: the figures to
// change it by.
void BenchTiles(const BenchContext& context);
// What small steps launch, in bfloat16: the FFN of a fixed capacity, with a CUDA graph and without,
// and the kernels of BenchRankStep's step; sets context->step_kernel_seconds.
void BenchStepKernels(BenchContext* context);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_BENCH_FFN_H_
