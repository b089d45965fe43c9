#include "kernels/base/step_arena.h"

#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"

namespace expertmesh {
namespace {

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

TEST(StepArenaTest, ARepeatedStepFindsOneChunk) {
  HostBufferPool pool;
  StepArena arena(&pool);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(arena.Allocate(100000).ok());
  EXPECT_GT(arena.allocated_bytes(), 10 * 100000 - 1);
  arena.Reset();
  EXPECT_EQ(arena.allocated_bytes(), 0);
  std::byte* first = arena.Allocate(100000).value();
  std::byte* previous = first;
  for (int i = 1; i < 10; ++i) {
    std::byte* data = arena.Allocate(100000).value();
    EXPECT_EQ(data - previous, 100032);
    previous = data;
  }
  arena.Reset();
  EXPECT_EQ(arena.Allocate(100000).value(), first);
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
