#ifndef EXPERTMESH_TESTS_BENCH_ONEDNN_EXPERT_FFN_H_
#define EXPERTMESH_TESTS_BENCH_ONEDNN_EXPERT_FFN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/parallel_for.h"

namespace expertmesh {

// What one would write with a library: a loop over the experts of two oneDNN bfloat16 matmuls with
// SiLU between, on weights that were reordered once to the format that oneDNN asks for. A thread
// takes one expert at a time, as our kernels do.
class OneDnnExpertFfn {
 public:
  // gate_up [2 * I, H] and down [H, I], bfloat16, the same for all experts (each has its own copy).
  OneDnnExpertFfn(int num_experts, int64_t hidden_size, int64_t intermediate_size,
                  const uint16_t* gate_up, const uint16_t* down, ParallelFor* parallel_for);
  ~OneDnnExpertFfn();

  // Creates the primitives for an expert with this many rows. Run does it too, at the cost of its
  // time.
  void Prepare(int64_t num_rows);

  // rows [N, H] bfloat16, output [N, H] float32, expert e has rows [offsets[e], offsets[e + 1]).
  void Run(const std::vector<int64_t>& offsets, const uint16_t* rows, float* output);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_BENCH_ONEDNN_EXPERT_FFN_H_
