#ifndef EXPERTMESH_TESTS_GPU_BENCH_ROWS_H_
#define EXPERTMESH_TESTS_GPU_BENCH_ROWS_H_

#include "tests/gpu/bench_context.h"

namespace expertmesh {

// A device copy of 1 GiB; sets context->copy_gb_per_second.
void BenchCopy(BenchContext* context);
// Permute, reduce, quantize, activation and router, each checked on sampled rows and timed in GB/s
// of what it must read and write.
void BenchRows(const BenchContext& context);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_BENCH_ROWS_H_
