#include "kernels/base/host_buffer_pool.h"

#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/allocator_conformance.h"

namespace expertmesh {
namespace {

INSTANTIATE_TEST_SUITE_P(HostBufferPool, AllocatorConformance,
                         testing::Values(AllocatorKind{
                             "HostBufferPool", [] { return std::make_unique<HostBufferPool>(); }}),
                         [](const auto& test) { return test.param.name; });

TEST(HostBufferPoolTest, GivesAlignedWritableMemoryOfEverySize) {
  HostBufferPool pool;
  for (const int64_t size_bytes : {1, 63, 64, 65, 255, 257, 4096, 5000, 300000, 3000000, 9437184}) {
    const Buffer buffer = pool.Allocate(size_bytes).value();
    ASSERT_EQ(buffer.size_bytes(), size_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % Allocator::kAlignment, 0u);
    std::memset(buffer.data(), 1, static_cast<size_t>(size_bytes));
    EXPECT_GE(pool.allocated_bytes(), size_bytes);
    EXPECT_LE(pool.allocated_bytes(), size_bytes + size_bytes / 4 + 63);
  }
  EXPECT_EQ(pool.allocated_bytes(), 0);
}

TEST(HostBufferPoolTest, BadSizes) {
  HostBufferPool pool;
  const Buffer empty = pool.Allocate(0).value();
  EXPECT_TRUE(empty.empty());
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(pool.Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pool.Allocate(INT64_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.Allocate(int64_t{1} << 60).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.allocated_bytes(), 0);
}

TEST(HostBufferPoolTest, ReusesABlockOfTheSameClass) {
  HostBufferPool pool;
  std::byte* first;
  {
    const Buffer buffer = pool.Allocate(1000000).value();
    first = buffer.data();
  }
  const int64_t cached_bytes = pool.cached_bytes();
  EXPECT_GE(cached_bytes, 1000000);
  const Buffer again = pool.Allocate(1000001).value();
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(pool.cached_bytes(), 0);
  EXPECT_EQ(pool.allocated_bytes(), cached_bytes);
}

TEST(HostBufferPoolTest, KeepsNoMoreThanItsLimit) {
  HostBufferPoolOptions options;
  options.max_cached_bytes = 1 << 20;
  HostBufferPool pool(options);
  {
    const Buffer small = pool.Allocate(1 << 19).value();
    const Buffer large = pool.Allocate(1 << 21).value();
  }
  EXPECT_EQ(pool.cached_bytes(), 1 << 19);
}

TEST(HostBufferPoolTest, KeepsWhatWasUsedLast) {
  HostBufferPoolOptions options;
  options.max_cached_bytes = 1 << 20;
  HostBufferPool pool(options);
  for (int i = 0; i < 2; ++i) {
    const Buffer first = pool.Allocate(1 << 18).value();
    const Buffer second = pool.Allocate(1 << 19).value();
  }
  { const Buffer used_again = pool.Allocate(1 << 18).value(); }
  std::byte* data;
  {
    const Buffer buffer = pool.Allocate(5 << 17).value();
    data = buffer.data();
  }
  // Only the older of the two made room.
  EXPECT_EQ(pool.cached_bytes(), (1 << 18) + (5 << 17));
  EXPECT_EQ(pool.Allocate(5 << 17).value().data(), data);
  { const Buffer too_large = pool.Allocate(1 << 21).value(); }
  EXPECT_EQ(pool.cached_bytes(), (1 << 18) + (5 << 17));
}

TEST(HostBufferPoolTest, PoisonsEveryAllocation) {
  HostBufferPoolOptions options;
  options.poison_byte = 0xff;
  HostBufferPool pool(options);
  for (int round = 0; round < 2; ++round) {
    const Buffer buffer = pool.Allocate(700).value();
    for (int64_t i = 0; i < buffer.size_bytes(); ++i) ASSERT_EQ(buffer.data()[i], std::byte{0xff});
    std::memset(buffer.data(), 0, 700);
  }
}

TEST(HostBufferPoolTest, BuffersMove) {
  HostBufferPool pool;
  Buffer first = pool.Allocate(100).value();
  std::byte* const data = first.data();
  Buffer second = std::move(first);
  EXPECT_EQ(second.data(), data);
  Buffer third = pool.Allocate(100).value();
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(pool.allocated_bytes(), 128);
}

TEST(HostBufferPoolTest, ManyThreads) {
  HostBufferPool pool;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&pool, thread] {
      for (int i = 0; i < 200; ++i) {
        const int64_t size_bytes = 100 + 64 * (i % 7);
        const Buffer buffer = pool.Allocate(size_bytes).value();
        std::memset(buffer.data(), thread, static_cast<size_t>(size_bytes));
        ASSERT_EQ(buffer.data()[size_bytes - 1], std::byte(thread));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.allocated_bytes(), 0);
}

}  // namespace
}  // namespace expertmesh
