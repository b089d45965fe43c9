#include "kernels/cuda/cuda_allocator.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <cassert>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"

namespace expertmesh {
namespace {

constexpr int64_t kBlockAlignment = 256;
constexpr int64_t kMaxBytes = int64_t{1} << 48;  // of a buffer

// The smallest k * 2^n with k in 4..7 that holds `size_bytes`, at least kBlockAlignment. Weights
// are large, allocated once and never freed for another size: they get what they ask for.
int64_t ClassBytes(int64_t size_bytes) {
  constexpr int64_t kExactBytes = 64 << 20;
  const auto round_up = [size_bytes](int64_t step) {
    return (size_bytes + step - 1) / step * step;
  };
  if (size_bytes <= 4 * kBlockAlignment || size_bytes > kExactBytes) {
    return round_up(size_bytes > kExactBytes ? 1 << 20 : kBlockAlignment);
  }
  return round_up(static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size_bytes - 1)) / 4));
}

const char* NameOf(CudaMemory memory) {
  return memory == CudaMemory::kDevice ? "cudaMalloc" : "cudaHostAlloc";
}

cudaError_t AllocateBlock(CudaMemory memory, int64_t class_bytes, void** block) {
  const size_t size = static_cast<size_t>(class_bytes);
  return memory == CudaMemory::kDevice
             ? cudaMalloc(block, size)
             : cudaHostAlloc(block, size, cudaHostAllocPortable | cudaHostAllocMapped);
}

// Waits for all work of the device. After a lost context there is nothing to give back.
void FreeBlock(CudaMemory memory, std::byte* block) {
  static_cast<void>(memory == CudaMemory::kDevice ? cudaFree(block) : cudaFreeHost(block));
}

}  // namespace

struct CudaAllocator::State {
  mutable std::mutex mutex;
  std::map<int64_t, std::vector<std::byte*>> free_blocks;  // by class
  std::map<const std::byte*, int64_t> blocks;              // all, with their class
  CudaMemoryUsage usage;
};

CudaAllocator::CudaAllocator(CudaMemory memory, int32_t device_index)
    : memory_(memory), device_index_(device_index), state_(std::make_unique<State>()) {}

CudaAllocator::~CudaAllocator() {
  assert(state_->usage.allocated_bytes == 0);
  ReleaseCached();
}

Device CudaAllocator::device() const {
  return memory_ == CudaMemory::kDevice ? Device{DeviceType::kCuda, device_index_} : Device{};
}

absl::StatusOr<Buffer> CudaAllocator::Allocate(int64_t size_bytes) {
  if (size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("buffer size ", size_bytes, " is negative"));
  }
  if (size_bytes == 0) return Buffer();
  if (size_bytes > kMaxBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("buffer of ", size_bytes, " bytes"));
  }
  const int64_t class_bytes = ClassBytes(size_bytes);
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    const auto found = state_->free_blocks.find(class_bytes);
    if (found != state_->free_blocks.end() && !found->second.empty()) {
      std::byte* block = found->second.back();
      found->second.pop_back();
      state_->usage.cached_bytes -= class_bytes;
      state_->usage.allocated_bytes += class_bytes;
      return Buffer(block, size_bytes, this);
    }
  }
  if (absl::Status status = UseCudaDevice(device_index_); !status.ok()) return status;
  void* block = nullptr;
  cudaError_t error = AllocateBlock(memory_, class_bytes, &block);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    ReleaseCached();
    error = AllocateBlock(memory_, class_bytes, &block);
  }
  absl::Status status =
      CudaStatus(error, absl::StrCat(NameOf(memory_), "(", class_bytes, ")"), device_index_);
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat(status.message(), ", ", usage().allocated_bytes,
                                                    " bytes in use"));
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->usage.allocated_bytes += class_bytes;
  state_->blocks.emplace(static_cast<std::byte*>(block), class_bytes);
  return Buffer(static_cast<std::byte*>(block), size_bytes, this);
}

int64_t CudaAllocator::TakenBytes(int64_t size_bytes) {
  return size_bytes <= 0 || size_bytes > kMaxBytes ? size_bytes : ClassBytes(size_bytes);
}

CudaMemoryUsage CudaAllocator::usage() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->usage;
}

bool CudaAllocator::Owns(const void* data) const {
  const std::byte* const address = static_cast<const std::byte*>(data);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  auto next = state_->blocks.upper_bound(address);
  return next != state_->blocks.begin() && address - (--next)->first < next->second;
}

void CudaAllocator::Free(std::byte* data, int64_t size_bytes) {
  const int64_t class_bytes = ClassBytes(size_bytes);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->free_blocks[class_bytes].push_back(data);
  state_->usage.allocated_bytes -= class_bytes;
  state_->usage.cached_bytes += class_bytes;
}

void CudaAllocator::ReleaseCached() {
  std::map<int64_t, std::vector<std::byte*>> released;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    released = std::exchange(state_->free_blocks, {});
    state_->usage.cached_bytes = 0;
    for (const auto& [class_bytes, blocks] : released) {
      for (const std::byte* block : blocks) state_->blocks.erase(block);
    }
  }
  for (const auto& [class_bytes, blocks] : released) {
    for (std::byte* block : blocks) FreeBlock(memory_, block);
  }
}

}  // namespace expertmesh
