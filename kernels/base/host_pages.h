#ifndef EXPERTMESH_KERNELS_BASE_HOST_PAGES_H_
#define EXPERTMESH_KERNELS_BASE_HOST_PAGES_H_

#include <cstddef>
#include <cstdint>

namespace expertmesh {

// Maps at least `size_bytes` > 0 bytes of zeroed, page-aligned host memory and asks for transparent
// huge pages when it is large enough for them. Null when the system refuses. Thread safe.
std::byte* MapHostPages(int64_t size_bytes);

// Touches the pages now, so that the first step does not pay for it (a page fault costs more than
// copying a page). Contents are kept.
void PrefaultHostPages(std::byte* data, int64_t size_bytes);

// `size_bytes` as given to MapHostPages.
void UnmapHostPages(std::byte* data, int64_t size_bytes);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_HOST_PAGES_H_
