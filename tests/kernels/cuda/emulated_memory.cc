#include "tests/kernels/cuda/emulated_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace expertmesh {
namespace {

constexpr int64_t kAlignment = 256;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t PageBytes() {
  static const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  return page_bytes;
}

}  // namespace

std::byte* EmulatedMemory::Allocate(int64_t size_bytes, int device) {
  Block block;
  block.size_bytes = size_bytes;
  block.device = device;
  block.open_bytes = RoundUp(size_bytes, PageBytes());
  void* mapped = mmap(nullptr, static_cast<size_t>(block.open_bytes + PageBytes()), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  block.pages = static_cast<std::byte*>(mapped);
  Protect(block, PROT_READ | PROT_WRITE);
  std::memset(block.pages, 0xff, static_cast<size_t>(block.open_bytes));
  if (!is_open_) Protect(block, PROT_NONE);
  std::byte* data = block.pages + (block.open_bytes - RoundUp(size_bytes, kAlignment));
  blocks_.emplace(data, block);
  return data;
}

bool EmulatedMemory::Free(std::byte* data) {
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return false;
  const Block& block = found->second;
  if (munmap(block.pages, static_cast<size_t>(block.open_bytes + PageBytes())) != 0) std::abort();
  blocks_.erase(found);
  return true;
}

void EmulatedMemory::Open() {
  is_open_ = true;
  for (const auto& [data, block] : blocks_) Protect(block, PROT_READ | PROT_WRITE);
}

void EmulatedMemory::Close() {
  is_open_ = false;
  for (const auto& [data, block] : blocks_) Protect(block, PROT_NONE);
}

const EmulatedMemory::Block* EmulatedMemory::Find(const void* data) const {
  std::byte* const address = static_cast<std::byte*>(const_cast<void*>(data));
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  const auto& [first, block] = *--next;
  return address < first + block.size_bytes ? &block : nullptr;
}

bool EmulatedMemory::IsWhole(const void* data, int64_t size_bytes) const {
  const Block* block = Find(data);
  if (block == nullptr) return true;
  const std::byte* end = block->pages + block->open_bytes -
                         (RoundUp(block->size_bytes, kAlignment) - block->size_bytes);
  return size_bytes <= end - static_cast<const std::byte*>(data);
}

int64_t EmulatedMemory::allocated_bytes(int device) const {
  int64_t total = 0;
  for (const auto& [data, block] : blocks_) total += block.device == device ? block.size_bytes : 0;
  return total;
}

void EmulatedMemory::Protect(const Block& block, int protection) const {
  if (mprotect(block.pages, static_cast<size_t>(block.open_bytes), protection) != 0) std::abort();
}

}  // namespace expertmesh
