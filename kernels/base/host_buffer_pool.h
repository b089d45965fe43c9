#ifndef EXPERTMESH_KERNELS_BASE_HOST_BUFFER_POOL_H_
#define EXPERTMESH_KERNELS_BASE_HOST_BUFFER_POOL_H_

#include <cstdint>
#include <memory>

#include "kernels/base/buffer.h"

namespace expertmesh {

struct HostBufferPoolOptions {
  // Freed buffers kept for reuse, because the first touch of fresh pages costs more than the copy
  // into them. Beyond this those of the sizes that were not in use for longest go back to the
  // system.
  int64_t max_cached_bytes = int64_t{1} << 30;
  // Tests: fill every allocation with this byte, so that a row that was never written shows (0xff
  // makes NaNs).
  int poison_byte = -1;
};

// Host memory in size classes (powers of two with four steps between, at least one page for large
// ones), reused.
class HostBufferPool : public Allocator {
 public:
  explicit HostBufferPool(const HostBufferPoolOptions& options = {});
  ~HostBufferPool() override;

  Device device() const override { return Device{}; }
  absl::StatusOr<Buffer> Allocate(int64_t size_bytes) override;
  void Reuse(std::byte* data, int64_t size_bytes) override;

  // Bytes in buffers that are out, and bytes kept for reuse.
  int64_t allocated_bytes() const;
  int64_t cached_bytes() const;

 protected:
  void Free(std::byte* data, int64_t size_bytes) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_HOST_BUFFER_POOL_H_
