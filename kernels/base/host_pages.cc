#include "kernels/base/host_pages.h"

#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE \
  23  // Linux 5.14; older kernels answer EINVAL and the pages are touched by hand
#endif

namespace expertmesh {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::byte* MapHostPages(int64_t size_bytes) {
  if (size_bytes > INT64_MAX - 2 * kHugePageBytes) return nullptr;
  const bool huge = size_bytes >= kHugePageBytes;
  const int64_t needed_bytes = RoundUp(size_bytes, kPageBytes);
  // Huge pages need an aligned address: map more and cut off both ends.
  const int64_t mapped_bytes = needed_bytes + (huge ? kHugePageBytes : 0);
  void* mapped = mmap(nullptr, static_cast<size_t>(mapped_bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  std::byte* data = static_cast<std::byte*>(mapped);
  if (!huge) return data;
  const int64_t address = static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
  const int64_t head_bytes = RoundUp(address, kHugePageBytes) - address;
  const int64_t tail_bytes = kHugePageBytes - head_bytes;
  if (head_bytes > 0) munmap(data, static_cast<size_t>(head_bytes));
  data += head_bytes;
  if (tail_bytes > 0) munmap(data + needed_bytes, static_cast<size_t>(tail_bytes));
  madvise(data, static_cast<size_t>(needed_bytes), MADV_HUGEPAGE);  // advice: failing is fine
  return data;
}

void PrefaultHostPages(std::byte* data, int64_t size_bytes) {
  if (size_bytes <= 0) return;
  if (madvise(data, static_cast<size_t>(RoundUp(size_bytes, kPageBytes)), MADV_POPULATE_WRITE) ==
      0) {
    return;
  }
  for (int64_t offset = 0; offset < size_bytes; offset += kPageBytes) {
    volatile std::byte* page = data + offset;
    *page = *page;
  }
}

void UnmapHostPages(std::byte* data, int64_t size_bytes) {
  munmap(data, static_cast<size_t>(RoundUp(size_bytes, kPageBytes)));
}

}  // namespace expertmesh
