#ifndef EXPERTMESH_TESTS_GPU_RANDOM_PATTERN_H_
#define EXPERTMESH_TESTS_GPU_RANDOM_PATTERN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/base/dtype.h"

namespace expertmesh {

// Gigabytes of normally distributed values that the host knows without keeping them: a block of a
// prime number of values, repeated, so that no two rows or experts of a tensor are alike. The
// values are drawn once in a process; patterns take them in steps of their own.
class RandomPattern {
 public:
  // `seed` from 1 on: patterns of different seeds are unlike each other.
  RandomPattern(DType dtype, double deviation, uint64_t seed);

  // Blocking.
  void Fill(void* device, int64_t count) const;
  // Element `index` of what Fill wrote.
  float At(int64_t index) const { return values_[static_cast<size_t>(index % kSize)]; }

 private:
  static constexpr int64_t kSize = 8388593;  // the largest prime below 2^23

  DType dtype_;
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
};

// Reads element `index` of `data` on the host; any dtype but integers wider than a byte.
float LoadElement(const void* data, DType dtype, int64_t index);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_RANDOM_PATTERN_H_
