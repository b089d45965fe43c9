#ifndef EXPERTMESH_KERNELS_BASE_BUFFER_H_
#define EXPERTMESH_KERNELS_BASE_BUFFER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace expertmesh {

enum class DeviceType : uint8_t {
  kHost,
  kCuda,
  kFake,  // tests: memory that faults when the host touches it outside a stream operation
};

struct Device {
  DeviceType type = DeviceType::kHost;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

class Allocator;

// Owns bytes at one device and gives them back to its allocator, which must outlive it. Move-only;
// not thread safe.
class Buffer {
 public:
  Buffer() = default;
  // Takes over `data`, which `allocator` allocated. Called by allocators only.
  Buffer(std::byte* data, int64_t size_bytes, Allocator* allocator)
      : data_(data), size_bytes_(size_bytes), allocator_(allocator) {}
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  // Aligned to Allocator::kAlignment; null when empty.
  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  bool empty() const { return size_bytes_ == 0; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  Allocator* allocator_ = nullptr;
};

// Source of buffers on one device. Thread safe.
class Allocator {
 public:
  static constexpr int64_t kAlignment = 64;

  virtual ~Allocator() = default;
  virtual Device device() const = 0;
  // size_bytes >= 0; 0 gives an empty buffer. The bytes are not initialized.
  // RESOURCE_EXHAUSTED when the memory is not to be had, INVALID_ARGUMENT for a negative size.
  virtual absl::StatusOr<Buffer> Allocate(int64_t size_bytes) = 0;
  // Tells that the holder of a buffer starts to use [data, data + size_bytes) of it afresh, as if
  // it had just been allocated: a poisoning allocator poisons the bytes again.
  virtual void Reuse(std::byte* /*data*/, int64_t /*size_bytes*/) {}

 protected:
  friend class Buffer;
  virtual void Free(std::byte* data, int64_t size_bytes) = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_BUFFER_H_
