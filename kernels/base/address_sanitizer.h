#ifndef EXPERTMESH_KERNELS_BASE_ADDRESS_SANITIZER_H_
#define EXPERTMESH_KERNELS_BASE_ADDRESS_SANITIZER_H_

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define EXPERTMESH_HAS_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EXPERTMESH_HAS_ADDRESS_SANITIZER 1
#endif
#endif

#if defined(EXPERTMESH_HAS_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

namespace expertmesh {

// Memory that a pool or an arena holds but has not given out: touching it is an error that
// AddressSanitizer reports. Without the sanitizer both do nothing.
inline void ForbidAccess(const std::byte* data, int64_t size_bytes) {
#if defined(EXPERTMESH_HAS_ADDRESS_SANITIZER)
  __asan_poison_memory_region(data, static_cast<size_t>(size_bytes));
#else
  (void)data;
  (void)size_bytes;
#endif
}
inline void AllowAccess(const std::byte* data, int64_t size_bytes) {
#if defined(EXPERTMESH_HAS_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(data, static_cast<size_t>(size_bytes));
#else
  (void)data;
  (void)size_bytes;
#endif
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_ADDRESS_SANITIZER_H_
