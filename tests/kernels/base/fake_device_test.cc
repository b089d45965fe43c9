#include "tests/kernels/base/fake_device.h"

#include <array>
#include <cstring>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "kernels/base/step_arena.h"

namespace expertmesh {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

class FakeDeviceTest : public testing::Test {
 protected:
  FakeDeviceTest() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(FakeDeviceTest, CopiesGoThereAndBack) {
  FakeDevice device(3);
  const std::unique_ptr<Stream> stream = device.NewStream();
  EXPECT_EQ(stream->device(), (Device{DeviceType::kFake, 3}));
  Buffer first = device.Allocate(1000).value();
  Buffer second = device.Allocate(1000).value();
  std::array<char, 1000> sent, received;
  sent.fill('s');
  received.fill('r');
  ASSERT_TRUE(stream->Copy(first.data(), sent.data(), 1000).ok());
  ASSERT_TRUE(stream->Copy(second.data(), first.data(), 1000).ok());
  ASSERT_TRUE(stream->Copy(received.data(), second.data(), 1000).ok());
  ASSERT_TRUE(stream->Wait(Soon()).ok());
  EXPECT_EQ(sent, received);
}

TEST_F(FakeDeviceTest, HostAccessDies) {
  FakeDevice device;
  const Buffer buffer = device.Allocate(64).value();
  volatile std::byte* const data = buffer.data();
  EXPECT_DEATH(*data = std::byte{1}, "");
  EXPECT_DEATH((void)*data, "");
}

TEST_F(FakeDeviceTest, HostAccessDiesAgainAfterAnOperation) {
  FakeDevice device;
  const std::unique_ptr<Stream> stream = device.NewStream();
  const Buffer buffer = device.Allocate(64).value();
  ASSERT_TRUE(stream->Copy(buffer.data(), "seven", 6).ok());
  ASSERT_TRUE(stream->Wait(Soon()).ok());
  volatile std::byte* const data = buffer.data();
  EXPECT_DEATH((void)*data, "");
}

TEST_F(FakeDeviceTest, RunningPastTheEndDies) {
  EXPECT_DEATH(
      {
        FakeDevice device;
        const std::unique_ptr<Stream> stream = device.NewStream();
        const Buffer buffer = device.Allocate(64).value();
        static_cast<void>(stream->Enqueue([&buffer]() -> absl::Status {
          std::memset(buffer.data(), 0, 65);
          return absl::OkStatus();
        }));
        static_cast<void>(stream->Wait(Soon()));
      },
      "");
}

TEST_F(FakeDeviceTest, WorkSeesMemoryAndArenasStandOnIt) {
  FakeDevice device;
  const std::unique_ptr<Stream> stream = device.NewStream();
  StepArena arena(&device);
  EXPECT_EQ(arena.device().type, DeviceType::kFake);
  const absl::Span<int32_t> values = arena.AllocateSpan<int32_t>(100).value();
  int32_t sum = 0;
  ASSERT_TRUE(stream
                  ->Enqueue([&]() -> absl::Status {
                    for (int32_t& value : values) value = 2;
                    for (const int32_t value : values) sum += value;
                    return absl::OkStatus();
                  })
                  .ok());
  ASSERT_TRUE(stream->Wait(Soon()).ok());
  EXPECT_EQ(sum, 200);
}

TEST_F(FakeDeviceTest, CountsBuffersAndRefusesBadSizes) {
  FakeDevice device;
  EXPECT_EQ(device.Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device.Allocate(int64_t{1} << 50).status().code(),
            absl::StatusCode::kResourceExhausted);
  {
    const Buffer buffer = device.Allocate(5000).value();
    EXPECT_EQ(device.num_live_buffers(), 1);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % Allocator::kAlignment, 0u);
  }
  EXPECT_EQ(device.num_live_buffers(), 0);
}

}  // namespace
}  // namespace expertmesh
