#include "kernels/base/host_buffer_pool.h"

#include <bit>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/address_sanitizer.h"
#include "kernels/base/host_pages.h"

namespace expertmesh {
namespace {

// From here on a block is mapped by itself: it goes back to the system when freed, and starts at a
// page.
constexpr int64_t kMinMappedBytes = 256 << 10;

// The smallest class that holds `size_bytes` > 0: k * 2^n with k in 4..7, at least kAlignment.
std::optional<int64_t> ClassBytes(int64_t size_bytes) {
  if (size_bytes <= 4 * Allocator::kAlignment) {
    return (size_bytes + Allocator::kAlignment - 1) / Allocator::kAlignment * Allocator::kAlignment;
  }
  if (size_bytes > int64_t{1} << 61) return std::nullopt;
  const int64_t step =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size_bytes - 1)) / 4);
  assert(step > 0);
  return (size_bytes + step - 1) / step * step;
}

std::byte* AllocateBlock(int64_t class_bytes) {
  if (class_bytes >= kMinMappedBytes) return MapHostPages(class_bytes);
  return static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(Allocator::kAlignment),
                                                    static_cast<size_t>(class_bytes)));
}

void FreeBlock(std::byte* data, int64_t class_bytes) {
  AllowAccess(data, class_bytes);
  if (class_bytes >= kMinMappedBytes) {
    UnmapHostPages(data, class_bytes);
  } else {
    std::free(data);
  }
}

}  // namespace

struct HostBufferPool::State {
  struct SizeClass {
    std::vector<std::byte*> free_blocks;
    uint64_t last_use = 0;
  };
  using Blocks = std::vector<std::pair<std::byte*, int64_t>>;  // and their class

  const HostBufferPoolOptions options;
  mutable std::mutex mutex;
  std::map<int64_t, SizeClass> classes;
  uint64_t num_uses = 0;
  int64_t allocated_bytes = 0;
  int64_t cached_bytes = 0;

  explicit State(const HostBufferPoolOptions& pool_options) : options(pool_options) {}

  SizeClass& Use(int64_t class_bytes) {
    SizeClass& used = classes[class_bytes];
    used.last_use = ++num_uses;
    return used;
  }

  // Takes cached blocks out until one of `class_bytes`, the class used last, fits the limit.
  Blocks MakeRoom(int64_t class_bytes) {
    Blocks evicted;
    while (class_bytes > options.max_cached_bytes - cached_bytes) {
      auto oldest = classes.end();
      for (auto it = classes.begin(); it != classes.end(); ++it) {
        if (it->second.free_blocks.empty()) continue;
        if (oldest == classes.end() || it->second.last_use < oldest->second.last_use) oldest = it;
      }
      assert(oldest != classes.end());
      evicted.emplace_back(oldest->second.free_blocks.back(), oldest->first);
      oldest->second.free_blocks.pop_back();
      cached_bytes -= oldest->first;
    }
    return evicted;
  }
};

HostBufferPool::HostBufferPool(const HostBufferPoolOptions& options)
    : state_(std::make_unique<State>(options)) {}

HostBufferPool::~HostBufferPool() {
  for (const auto& [class_bytes, size_class] : state_->classes) {
    for (std::byte* block : size_class.free_blocks) FreeBlock(block, class_bytes);
  }
}

absl::StatusOr<Buffer> HostBufferPool::Allocate(int64_t size_bytes) {
  if (size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("buffer size ", size_bytes, " is negative"));
  }
  if (size_bytes == 0) return Buffer();
  const std::optional<int64_t> class_bytes = ClassBytes(size_bytes);
  std::byte* data = nullptr;
  if (class_bytes.has_value()) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    std::vector<std::byte*>& free_blocks = state_->Use(*class_bytes).free_blocks;
    if (!free_blocks.empty()) {
      data = free_blocks.back();
      free_blocks.pop_back();
      state_->cached_bytes -= *class_bytes;
      state_->allocated_bytes += *class_bytes;
    }
  }
  if (data == nullptr && class_bytes.has_value()) {
    data = AllocateBlock(*class_bytes);
    if (data != nullptr) {
      // Only what was asked for: the rest of the class costs no memory until a larger buffer reuses
      // the block.
      if (*class_bytes >= kMinMappedBytes) PrefaultHostPages(data, size_bytes);
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->allocated_bytes += *class_bytes;
    }
  }
  if (data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no host memory for a buffer of ", size_bytes,
                                                     " bytes (", allocated_bytes(),
                                                     " bytes in use)"));
  }
  AllowAccess(data, *class_bytes);
  Reuse(data, size_bytes);
  ForbidAccess(data + size_bytes, *class_bytes - size_bytes);
  return Buffer(data, size_bytes, this);
}

void HostBufferPool::Reuse(std::byte* data, int64_t size_bytes) {
  if (state_->options.poison_byte < 0) return;
  std::memset(data, state_->options.poison_byte, static_cast<size_t>(size_bytes));
}

void HostBufferPool::Free(std::byte* data, int64_t size_bytes) {
  const int64_t class_bytes = ClassBytes(size_bytes).value();
  State::Blocks evicted;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->allocated_bytes -= class_bytes;
    if (class_bytes <= state_->options.max_cached_bytes) {
      State::SizeClass& used = state_->Use(class_bytes);
      evicted = state_->MakeRoom(class_bytes);
      ForbidAccess(data, class_bytes);
      used.free_blocks.push_back(data);
      state_->cached_bytes += class_bytes;
    } else {
      evicted.emplace_back(data, class_bytes);
    }
  }
  for (const auto& [block, block_bytes] : evicted) FreeBlock(block, block_bytes);
}

int64_t HostBufferPool::allocated_bytes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->allocated_bytes;
}

int64_t HostBufferPool::cached_bytes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->cached_bytes;
}

}  // namespace expertmesh
