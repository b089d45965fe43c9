#include "tests/gpu/random_pattern.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <random>

#include "tests/gpu/device_memory.h"

namespace expertmesh {
namespace {

std::vector<float> Draw(int64_t count) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace

RandomPattern::RandomPattern(DType dtype, double deviation, uint64_t seed)
    : dtype_(dtype),
      values_(static_cast<size_t>(kSize)),
      bytes_(static_cast<size_t>(kSize * DTypeBytes(dtype))) {
  // Of a prime number of values any step meets each once.
  static const std::vector<float>* const drawn = new std::vector<float>(Draw(kSize));
  const int64_t step = 1 + static_cast<int64_t>(seed % 8191) * 1021;
  int64_t at = 0;
  for (int64_t i = 0; i < kSize; ++i) {
    const float value = (*drawn)[static_cast<size_t>(at)] * static_cast<float>(deviation);
    at = (at + step) % kSize;
    if (dtype == DType::kFloat8E4M3) {
      bytes_[static_cast<size_t>(i)] = std::byte{FloatToFloat8E4M3(value)};
    } else {
      StoreFloat(bytes_.data(), dtype, i, value);
    }
    values_[static_cast<size_t>(i)] = LoadElement(bytes_.data(), dtype, i);
  }
}

void RandomPattern::Fill(void* device, int64_t count) const {
  const int64_t element_bytes = DTypeBytes(dtype_);
  auto* bytes = static_cast<std::byte*>(device);
  int64_t filled = std::min(count, kSize);
  CopyBlocking(bytes, bytes_.data(), filled * element_bytes, cudaMemcpyHostToDevice);
  while (filled < count) {
    const int64_t more = std::min(filled, count - filled);
    CopyBlocking(bytes + filled * element_bytes, bytes, more * element_bytes,
                 cudaMemcpyDeviceToDevice);
    filled += more;
  }
}

float LoadElement(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat8E4M3) {
    return Float8E4M3ToFloat(static_cast<const uint8_t*>(data)[index]);
  }
  if (dtype == DType::kInt8) return static_cast<const int8_t*>(data)[index];
  return LoadFloat(data, dtype, index);
}

}  // namespace expertmesh
