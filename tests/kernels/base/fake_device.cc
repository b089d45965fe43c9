#include "tests/kernels/base/fake_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void ProtectOrDie(std::byte* data, int64_t size_bytes, int protection) {
  if (mprotect(data, static_cast<size_t>(size_bytes), protection) != 0) std::abort();
}

}  // namespace

struct FakeDevice::State {
  struct Mapping {
    int64_t accessible_bytes;  // whole pages; one guard page follows
  };

  const int32_t index;
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  mutable std::mutex mutex;
  std::map<std::byte*, Mapping> mappings;  // by first page
  int num_running_operations = 0;

  explicit State(int32_t device_index) : index(device_index) {}

  void Open() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (num_running_operations++ > 0) return;
    for (const auto& [pages, mapping] : mappings) {
      ProtectOrDie(pages, mapping.accessible_bytes, PROT_READ | PROT_WRITE);
    }
  }
  void Close() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (--num_running_operations > 0) return;
    for (const auto& [pages, mapping] : mappings) {
      ProtectOrDie(pages, mapping.accessible_bytes, PROT_NONE);
    }
  }
  std::byte* FirstPage(std::byte* data) const {
    return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(data) /
                                        static_cast<uintptr_t>(page_bytes) *
                                        static_cast<uintptr_t>(page_bytes));
  }
};

class FakeDevice::DeviceStream : public Stream {
 public:
  explicit DeviceStream(State* state) : state_(state), queue_(NewThreadedHostStream()) {}

  Device device() const override { return Device{DeviceType::kFake, state_->index}; }
  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) override {
    return queue_->Enqueue([state = state_, work = std::move(work)]() mutable -> absl::Status {
      state->Open();
      absl::Status status = work();
      state->Close();
      return status;
    });
  }
  absl::Status Copy(void* dst, const void* src, int64_t size_bytes) override {
    if (size_bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat("copy of ", size_bytes, " bytes"));
    }
    return Enqueue([dst, src, size_bytes]() -> absl::Status {
      if (size_bytes > 0) std::memcpy(dst, src, static_cast<size_t>(size_bytes));
      return absl::OkStatus();
    });
  }
  absl::Status WaitFor(const Event& event) override { return queue_->WaitFor(event); }
  absl::Status Record(const Event& event) override { return queue_->Record(event); }
  absl::Status Wait(absl::Time deadline) override { return queue_->Wait(deadline); }
  void ClearError() override { queue_->ClearError(); }

 private:
  State* state_;
  std::unique_ptr<Stream> queue_;
};

FakeDevice::FakeDevice(int32_t index) : state_(std::make_unique<State>(index)) {}

FakeDevice::~FakeDevice() {
  if (!state_->mappings.empty()) std::abort();  // a buffer outlived its device
}

Device FakeDevice::device() const { return Device{DeviceType::kFake, state_->index}; }

absl::StatusOr<Buffer> FakeDevice::Allocate(int64_t size_bytes) {
  if (size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("buffer size ", size_bytes, " is negative"));
  }
  if (size_bytes == 0) return Buffer();
  if (size_bytes > int64_t{1} << 40) {
    return absl::ResourceExhaustedError(absl::StrCat("fake device buffer of ", size_bytes));
  }
  const int64_t accessible_bytes = RoundUp(size_bytes, state_->page_bytes);
  void* mapped = mmap(nullptr, static_cast<size_t>(accessible_bytes + state_->page_bytes),
                      PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("fake device buffer of ", size_bytes));
  }
  std::byte* pages = static_cast<std::byte*>(mapped);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  ProtectOrDie(pages, accessible_bytes, PROT_READ | PROT_WRITE);
  std::memset(pages, 0xff, static_cast<size_t>(accessible_bytes));
  if (state_->num_running_operations == 0) ProtectOrDie(pages, accessible_bytes, PROT_NONE);
  state_->mappings.emplace(pages, State::Mapping{accessible_bytes});
  std::byte* data = pages + (accessible_bytes - RoundUp(size_bytes, kAlignment));
  return Buffer(data, size_bytes, this);
}

int64_t FakeDevice::num_live_buffers() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return static_cast<int64_t>(state_->mappings.size());
}

std::unique_ptr<Stream> FakeDevice::NewStream() {
  return std::make_unique<DeviceStream>(state_.get());
}

void FakeDevice::Free(std::byte* data, int64_t /*size_bytes*/) {
  std::byte* pages = state_->FirstPage(data);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto mapping = state_->mappings.find(pages);
  if (mapping == state_->mappings.end()) std::abort();
  const int64_t mapped_bytes = mapping->second.accessible_bytes + state_->page_bytes;
  if (munmap(pages, static_cast<size_t>(mapped_bytes)) != 0) std::abort();
  state_->mappings.erase(mapping);
}

}  // namespace expertmesh
