#include "kernels/base/buffer.h"

#include <utility>

namespace expertmesh {

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      allocator_(std::exchange(other.allocator_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) allocator_->Free(data_, size_bytes_);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    allocator_ = std::exchange(other.allocator_, nullptr);
  }
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) allocator_->Free(data_, size_bytes_);
}

}  // namespace expertmesh
