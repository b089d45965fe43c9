#ifndef EXPERTMESH_TESTS_GPU_BENCH_FFN_H_
#define EXPERTMESH_TESTS_GPU_BENCH_FFN_H_

#include "tests/gpu/bench_context.h"

namespace expertmesh {

// cuBLAS on one large bfloat16 matmul; sets context->matmul_tflops. Says so when there is no
// cuBLAS.
void BenchMatmul(BenchContext* context);
// Grouped GEMMs and the FFN made of them, in bfloat16 and float8, at the shapes of prefill and of
// DeepSeek-V3's rank, each checked on sampled outputs; every tile at a prefill and a decode shape;
// sets context->step_kernel_seconds.
void BenchFfn(BenchContext* context);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_BENCH_FFN_H_
