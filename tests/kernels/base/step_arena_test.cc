#include "kernels/base/step_arena.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"

namespace expertmesh {
namespace {

// So much and no more; counts.
class LimitedAllocator : public Allocator {
 public:
  explicit LimitedAllocator(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  Device device() const override { return pool_.device(); }
  absl::StatusOr<Buffer> Allocate(int64_t size_bytes) override {
    if (size_bytes > limit_bytes_ - out_bytes_) return absl::ResourceExhaustedError("the limit");
    absl::StatusOr<Buffer> buffer = pool_.Allocate(size_bytes);
    if (!buffer.ok()) return buffer.status();
    std::byte* const data = buffer->data();
    buffers_[data] = *std::move(buffer);
    out_bytes_ += size_bytes;
    ++num_buffers_;
    return Buffer(data, size_bytes, this);
  }

  int64_t out_bytes() const { return out_bytes_; }
  int64_t num_buffers() const { return num_buffers_; }  // that were ever asked for

 protected:
  void Free(std::byte* data, int64_t size_bytes) override {
    out_bytes_ -= size_bytes;
    buffers_.erase(data);
  }

 private:
  HostBufferPool pool_;
  const int64_t limit_bytes_;
  std::map<std::byte*, Buffer> buffers_;
  int64_t out_bytes_ = 0;
  int64_t num_buffers_ = 0;
};

TEST(StepArenaTest, AllocationsAreAlignedAndDisjoint) {
  HostBufferPool pool;
  StepArena arena(&pool);
  std::vector<std::pair<std::byte*, int64_t>> allocations;
  for (const int64_t size_bytes : {1, 64, 100, 70000, 3, 500000, 12}) {
    std::byte* data = arena.Allocate(size_bytes).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % Allocator::kAlignment, 0u);
    std::memset(data, static_cast<int>(allocations.size()), static_cast<size_t>(size_bytes));
    allocations.emplace_back(data, size_bytes);
  }
  for (size_t i = 0; i < allocations.size(); ++i) {
    EXPECT_EQ(allocations[i].first[0], std::byte(i));
    EXPECT_EQ(allocations[i].first[allocations[i].second - 1], std::byte(i));
  }
}

TEST(StepArenaTest, BadSizes) {
  HostBufferPool pool;
  StepArena arena(&pool);
  EXPECT_NE(arena.Allocate(0).value(), nullptr);
  EXPECT_EQ(arena.Allocate(-5).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(arena.Allocate(INT64_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena.AllocateSpan<int64_t>(INT64_MAX / 4).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(arena.AllocateSpan<float>(10)->size(), 10u);
}

TEST(StepArenaTest, ARepeatedStepFindsItsAddressesAndAsksForNoMemory) {
  LimitedAllocator allocator(INT64_MAX);
  StepArena arena(&allocator);
  const auto step = [&arena](int num_allocations) {
    arena.Reset();
    EXPECT_EQ(arena.allocated_bytes(), 0);
    std::vector<std::byte*> addresses;
    for (int i = 0; i < num_allocations; ++i) {
      addresses.push_back(arena.Allocate(100000 + i).value());
    }
    EXPECT_GE(arena.allocated_bytes(), num_allocations * 100000);
    return addresses;
  };
  const std::vector<std::byte*> small = step(3);
  const std::vector<std::byte*> large = step(10);
  const int64_t num_buffers = allocator.num_buffers();
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(step(3), small);
    EXPECT_EQ(step(10), large);
  }
  EXPECT_EQ(allocator.num_buffers(), num_buffers);
}

TEST(StepArenaTest, GrowingStepsKeepFourTimesTheLargestAtMost) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  LimitedAllocator allocator(INT64_MAX);
  StepArena arena(&allocator);
  int64_t largest_bytes = 64 << 10;
  for (int64_t size_bytes = 1000; size_bytes < 10000000; size_bytes += size_bytes / 50) {
    arena.Reset();
    const int num_allocations = std::uniform_int_distribution<int>(1, 9)(random);
    for (int i = 0; i < num_allocations; ++i) {
      const int64_t bytes = std::uniform_int_distribution<int64_t>(1, size_bytes)(random);
      std::memset(arena.Allocate(bytes).value(), i, static_cast<size_t>(bytes));
    }
    largest_bytes = std::max(largest_bytes, arena.allocated_bytes());
    ASSERT_LE(allocator.out_bytes(), 4 * largest_bytes);
  }
  EXPECT_LT(allocator.num_buffers(), 20);
}

TEST(StepArenaTest, WhereMemoryIsShortWhatTheStepCannotUseGoesBack) {
  LimitedAllocator allocator(1000000);
  StepArena arena(&allocator);
  ASSERT_TRUE(arena.Allocate(300000).ok());
  arena.Reset();
  ASSERT_TRUE(arena.Allocate(400000).ok());
  EXPECT_EQ(allocator.out_bytes(), 300032 + 400000);
  arena.Reset();
  std::byte* const data = arena.Allocate(900000).value();
  std::memset(data, 1, 900000);
  EXPECT_EQ(allocator.out_bytes(), 900032);
  // What the step uses stays.
  EXPECT_EQ(arena.Allocate(200000).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(data[899999], std::byte{1});
  EXPECT_TRUE(arena.Allocate(50000).ok());
  arena.Reset();
  EXPECT_EQ(arena.Allocate(900000).value(), data);
}

TEST(StepArenaTest, ResetPoisonsAgain) {
  HostBufferPoolOptions options;
  options.poison_byte = 0xa5;
  HostBufferPool pool(options);
  StepArena arena(&pool);
  std::byte* data = arena.Allocate(100).value();
  EXPECT_EQ(data[99], std::byte{0xa5});
  std::memset(data, 0, 100);
  arena.Reset();
  std::byte* again = arena.Allocate(100).value();
  ASSERT_EQ(again, data);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(again[i], std::byte{0xa5});
}

TEST(StepArenaPoolTest, ArenasComeBackAndMayOutliveThePool) {
  HostBufferPool pool;
  std::shared_ptr<StepArena> survivor;
  {
    StepArenaPool arenas(&pool);
    std::shared_ptr<StepArena> first = arenas.Acquire();
    std::shared_ptr<StepArena> second = arenas.Acquire();
    EXPECT_NE(first, second);
    StepArena* const first_address = first.get();
    ASSERT_TRUE(first->Allocate(10).ok());
    first.reset();
    survivor = arenas.Acquire();
    EXPECT_EQ(survivor.get(), first_address);
    EXPECT_EQ(survivor->allocated_bytes(), 0);
  }
  EXPECT_TRUE(survivor->Allocate(10).ok());
}

TEST(StepArenaPoolTest, ABurstDoesNotHoldItsMemory) {
  HostBufferPoolOptions options;
  options.max_cached_bytes = 0;
  HostBufferPool pool(options);
  StepArenaPool arenas(&pool);
  std::vector<std::shared_ptr<StepArena>> burst;
  for (int i = 0; i < 100; ++i) {
    burst.push_back(arenas.Acquire());
    ASSERT_TRUE(burst.back()->Allocate(100000).ok());
  }
  const int64_t burst_bytes = pool.allocated_bytes();
  burst.clear();
  EXPECT_LT(pool.allocated_bytes(), burst_bytes / 5);
}

}  // namespace
}  // namespace expertmesh
