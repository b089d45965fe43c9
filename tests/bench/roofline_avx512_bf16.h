#ifndef EXPERTMESH_TESTS_BENCH_ROOFLINE_AVX512_BF16_H_
#define EXPERTMESH_TESTS_BENCH_ROOFLINE_AVX512_BF16_H_

#include <stdint.h>

namespace expertmesh {

// What this machine can do at best, for benchmarks. Need AVX-512 BF16.

// `iterations` times 24 independent bfloat16 dot products in registers: 24 * 64 floating-point
// operations each. Returns a value to use, so that nothing is optimized away.
float RunDotProducts(int64_t iterations);
inline constexpr int64_t kFlopsPerIteration = 24 * 64;

// Reads `size_bytes` (a multiple of 1024) from four distant places at once, the fastest way found
// here.
int64_t ReadMemory(const void* data, int64_t size_bytes);

// out[i] = bfloat16(silu(gate_up[i]) * gate_up[count + i]): what stands between the two products of
// the compared loop.
void SiluMul(const float* gate_up, int64_t count, uint16_t* out);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_BENCH_ROOFLINE_AVX512_BF16_H_
