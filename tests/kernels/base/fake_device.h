#ifndef EXPERTMESH_TESTS_KERNELS_BASE_FAKE_DEVICE_H_
#define EXPERTMESH_TESTS_KERNELS_BASE_FAKE_DEVICE_H_

#include <cstdint>
#include <memory>

#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"

namespace expertmesh {

// A device without hardware: its memory is host memory whose pages refuse every access except while
// an operation of one of the device's streams runs. Code that touches device memory from the host,
// or before the stream's order allows, dies by SIGSEGV as it would with a GPU. Every buffer ends at
// a guard page, so running past its end (rounded up to kAlignment) dies too. Thread safe; must
// outlive its buffers and streams.
class FakeDevice : public Allocator {
 public:
  explicit FakeDevice(int32_t index = 0);
  ~FakeDevice() override;

  Device device() const override;
  // Fills new memory with 0xff.
  absl::StatusOr<Buffer> Allocate(int64_t size_bytes) override;
  int64_t num_live_buffers() const;

  // Work runs on a thread of the stream's own, as a device's does: never inside the call that
  // enqueues it.
  std::unique_ptr<Stream> NewStream();

 protected:
  void Free(std::byte* data, int64_t size_bytes) override;

 private:
  class DeviceStream;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_BASE_FAKE_DEVICE_H_
