#ifndef EXPERTMESH_TESTS_BENCH_DISPATCH_LANES_H_
#define EXPERTMESH_TESTS_BENCH_DISPATCH_LANES_H_

#include <cstdint>

namespace expertmesh {

// Parts of bench_dispatch over a whole group: sequencer, group and engines, whose ranks are
// threads.

// Payload bytes of one step of 777 random tokens over all_to_all, less one row for each (token,
// owner that is not its source) out, and the same in combine_dtype back.
int64_t MeasureBytesOverFormula(int32_t ep_size);

void BenchLanes();

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_BENCH_DISPATCH_LANES_H_
