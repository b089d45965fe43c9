#include "kernels/base/step_lists.h"

#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "tests/kernels/base/fake_device.h"

namespace expertmesh {
namespace {

template <class T>
absl::Span<const T> SpanOf(const std::vector<T>& values) {
  return absl::MakeConstSpan(values);
}

TEST(StepListsTest, ListsOfTheHostStayWhereTheyAre) {
  HostBufferPool pool;
  StepArena arena(&pool);
  StepLists lists(&arena, &arena);
  const std::unique_ptr<Stream> stream = NewInlineHostStream();
  const std::vector<int32_t> indices = {3, 1, 2};
  lists.Add(SpanOf(indices));
  EXPECT_EQ(lists.Find(SpanOf(indices)), nullptr);
  ASSERT_TRUE(lists.Send(*stream).ok());
  EXPECT_EQ(lists.Find(SpanOf(indices)), indices.data());
  EXPECT_EQ(arena.allocated_bytes(), 0);
}

class StepListsOnADeviceTest : public testing::Test {
 protected:
  template <class T>
  std::vector<T> Read(const T* data, size_t count) {
    std::vector<T> values(count);
    EXPECT_TRUE(stream_->Copy(values.data(), data, static_cast<int64_t>(count * sizeof(T))).ok());
    EXPECT_TRUE(stream_->Wait(absl::Now() + absl::Minutes(1)).ok());
    return values;
  }

  FakeDevice device_;
  HostBufferPool pool_;
  StepArena arena_{&device_};
  StepArena host_arena_{&pool_};
  const std::unique_ptr<Stream> stream_ = device_.NewStream();
  StepLists lists_{&arena_, &host_arena_};
};

TEST_F(StepListsOnADeviceTest, ListsOfAllTypesCrossTogether) {
  std::vector<int32_t> indices = {3, 1, 2};
  const std::vector<int64_t> offsets = {0, 5, 9};
  const std::vector<float> weights = {0.5f};
  lists_.Add(SpanOf(indices));
  lists_.Add(SpanOf(offsets));
  lists_.Add(absl::Span<const float>());
  lists_.Add(SpanOf(weights));
  ASSERT_TRUE(lists_.Send(*stream_).ok());
  EXPECT_EQ(host_arena_.allocated_bytes(), 64);  // 16, 32 and 16 bytes
  // Copied when they were sent.
  indices[0] = 17;
  EXPECT_EQ(Read(lists_.Find(SpanOf(indices)), 3), (std::vector<int32_t>{3, 1, 2}));
  EXPECT_EQ(lists_.Find(absl::Span<const float>()), nullptr);
  EXPECT_EQ(Read(lists_.Find(SpanOf(offsets)), 3), offsets);
  EXPECT_EQ(Read(lists_.Find(SpanOf(weights)), 1), weights);
}

TEST_F(StepListsOnADeviceTest, FindsPartsButNothingBeyond) {
  const std::vector<int64_t> values = {7, 8, 9, 10};
  lists_.Add(SpanOf(values).subspan(1, 2));
  ASSERT_TRUE(lists_.Send(*stream_).ok());
  EXPECT_EQ(Read(lists_.Find(SpanOf(values).subspan(2, 1)), 1), std::vector<int64_t>{9});
  EXPECT_EQ(lists_.Find(SpanOf(values)), nullptr);
  EXPECT_EQ(lists_.Find(SpanOf(values).subspan(2, 2)), nullptr);
  EXPECT_EQ(lists_.Find(SpanOf(values).subspan(0, 2)), nullptr);
}

TEST_F(StepListsOnADeviceTest, SendsWhatWasAddedSince) {
  const std::vector<int32_t> first = {1, 2};
  const std::vector<int32_t> second = {3};
  lists_.Add(SpanOf(first));
  ASSERT_TRUE(lists_.Send(*stream_).ok());
  const int32_t* const place = lists_.Find(SpanOf(first));
  lists_.Add(SpanOf(second));
  EXPECT_EQ(lists_.Find(SpanOf(second)), nullptr);
  ASSERT_TRUE(lists_.Send(*stream_).ok());
  EXPECT_EQ(lists_.Find(SpanOf(first)), place);
  EXPECT_EQ(Read(place, 2), first);
  EXPECT_EQ(Read(lists_.Find(SpanOf(second)), 1), second);
  const int64_t used = arena_.allocated_bytes();
  ASSERT_TRUE(lists_.Send(*stream_).ok());
  EXPECT_EQ(arena_.allocated_bytes(), used);
}

}  // namespace
}  // namespace expertmesh
