#ifndef EXPERTMESH_TESTS_CONFORMANCE_ALLOCATOR_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_ALLOCATOR_CONFORMANCE_H_

// What every Allocator must do. Include it in one test file per implementation and instantiate
// AllocatorConformance with a factory.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/buffer.h"

namespace expertmesh {

struct AllocatorKind {
  std::string name;
  std::function<std::unique_ptr<Allocator>()> make;
  // Sets bytes of a buffer; memset where the host reaches them.
  std::function<void(std::byte* data, int value, int64_t size_bytes)> fill =
      [](std::byte* data, int value, int64_t size_bytes) {
        std::memset(data, value, static_cast<size_t>(size_bytes));
      };
};

class AllocatorConformance : public testing::TestWithParam<AllocatorKind> {
 protected:
  void Fill(const Buffer& buffer, int value) const {
    GetParam().fill(buffer.data(), value, buffer.size_bytes());
  }

  const std::unique_ptr<Allocator> allocator_ = GetParam().make();
};

TEST_P(AllocatorConformance, GivesAlignedWritableMemoryOfEverySize) {
  std::vector<Buffer> buffers;
  for (const int64_t size_bytes : {1, 63, 64, 65, 255, 257, 4096, 5000, 300000, 3000000, 9437184}) {
    buffers.push_back(allocator_->Allocate(size_bytes).value());
    const Buffer& buffer = buffers.back();
    ASSERT_EQ(buffer.size_bytes(), size_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % Allocator::kAlignment, 0u);
    Fill(buffer, 1);
  }
  std::vector<std::pair<std::byte*, int64_t>> ranges;
  for (const Buffer& buffer : buffers) ranges.emplace_back(buffer.data(), buffer.size_bytes());
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    EXPECT_LE(ranges[i - 1].first + ranges[i - 1].second, ranges[i].first);
  }
}

TEST_P(AllocatorConformance, BadSizes) {
  const Buffer empty = allocator_->Allocate(0).value();
  EXPECT_TRUE(empty.empty());
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(allocator_->Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(allocator_->Allocate(INT64_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(allocator_->Allocate(int64_t{1} << 60).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(allocator_->Allocate(100).ok());
}

TEST_P(AllocatorConformance, ReusesABlockOfTheSameClass) {
  std::byte* first;
  {
    const Buffer buffer = allocator_->Allocate(1000000).value();
    first = buffer.data();
  }
  const Buffer again = allocator_->Allocate(1000001).value();
  EXPECT_EQ(again.data(), first);
  Fill(again, 3);
}

TEST_P(AllocatorConformance, BuffersMove) {
  Buffer first = allocator_->Allocate(100).value();
  std::byte* const data = first.data();
  Buffer second = std::move(first);
  EXPECT_EQ(second.data(), data);
  Buffer third = allocator_->Allocate(100).value();
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
}

TEST_P(AllocatorConformance, ManyThreads) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      for (int i = 0; i < 50; ++i) {
        const Buffer buffer = allocator_->Allocate(100 + 64 * (i % 7)).value();
        Fill(buffer, thread);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_ALLOCATOR_CONFORMANCE_H_
