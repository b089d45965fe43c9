#include "server/cluster/memory_need.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

// A file tree that looks like /proc and /sys.
class MemoryNeedTest : public ::testing::Test {
 protected:
  MemoryNeedTest()
      : root_(std::filesystem::path(::testing::TempDir()) /
              ("memory_need_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()))) {
    std::filesystem::remove_all(root_);
    Write("proc/meminfo", "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable:  4000 kB\n");
  }
  ~MemoryNeedTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  int64_t Available() { return *AvailableMemoryBytes(root_.string()); }

  const std::filesystem::path root_;
};

TEST_F(MemoryNeedTest, WithoutControlGroups) { EXPECT_EQ(Available(), 4000 * 1024); }

TEST_F(MemoryNeedTest, TheTightestAncestorCounts) {
  Write("proc/self/cgroup", "0::/a/b\n");
  Write("sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("sys/fs/cgroup/a/b/memory.current", "5\n");
  EXPECT_EQ(Available(), 4000 * 1024);
  Write("sys/fs/cgroup/a/memory.max", "1000000\n");
  Write("sys/fs/cgroup/a/memory.current", "600000\n");
  EXPECT_EQ(Available(), 400000);
  Write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 500000\n");
  EXPECT_EQ(Available(), 900000);
  Write("sys/fs/cgroup/memory.max", "1000\n");
  Write("sys/fs/cgroup/memory.current", "2000\n");
  EXPECT_EQ(Available(), 0);
}

TEST_F(MemoryNeedTest, VersionOne) {
  Write("proc/self/cgroup", "7:cpu:/x\n5:memory,hugetlb:/docker/1\n0::/\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n");
  Write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 20000\n");
  EXPECT_EQ(Available(), 220000);
}

TEST_F(MemoryNeedTest, NoMeminfo) {
  std::filesystem::remove(root_ / "proc/meminfo");
  EXPECT_EQ(AvailableMemoryBytes(root_.string()).status().code(), absl::StatusCode::kNotFound);
}

TEST(MemoryNeedOfThisMachineTest, IsPositive) { EXPECT_GT(*AvailableMemoryBytes(), 0); }

TEST(MemoryOfADeviceTest, CountsBuffersAsTheDeviceGivesThem) {
  ModelSpec model;
  model.hidden_size = 8;
  model.weight_dtype = DType::kBFloat16;
  LayerSpec layer;
  layer.num_experts = 5;
  layer.intermediate_size = 6;
  layer.shared_intermediate_size = 7;
  layer.shared_gated = true;
  const Placement placement = *Placement::Contiguous(5, 2);
  std::vector<int64_t> sizes;
  const absl::StatusOr<int64_t> taken =
      TakenLayerBytes(model, layer, placement, 0, [&sizes](int64_t size_bytes) {
        sizes.push_back(size_bytes);
        return size_bytes + 1000;
      });
  ASSERT_TRUE(taken.ok()) << taken.status();
  const std::vector<int64_t> expected = {3 * 2 * 8 * 6 * 2, 3 * 8 * 6 * 2, 2 * 8 * 7 * 2, 8 * 7 * 2,
                                         8 * 4};
  EXPECT_EQ(sizes, expected);
  EXPECT_EQ(*taken, *PackedLayerBytes(model, layer, placement, 0) + 5000);
}

TEST(MemoryOfADeviceTest, CountsFloat8AndItsScales) {
  ModelSpec model;
  model.hidden_size = 200;
  model.weight_dtype = DType::kFloat8E4M3;
  LayerSpec layer;
  layer.num_experts = 3;
  layer.intermediate_size = 256;
  layer.shared_intermediate_size = 128;
  const Placement placement = *Placement::Contiguous(3, 1);
  std::vector<int64_t> sizes;
  const absl::StatusOr<int64_t> taken =
      TakenLayerBytes(model, layer, placement, 0, [&sizes](int64_t size_bytes) {
        sizes.push_back(size_bytes);
        return size_bytes;
      });
  ASSERT_TRUE(taken.ok()) << taken.status();
  const int64_t routed = 3 * 200 * 256;
  const int64_t routed_scales = 3 * 2 * 2 * 4;
  const std::vector<int64_t> expected = {2 * routed,    routed,        2 * routed_scales,
                                         routed_scales, 2 * 200 * 128, 200 * 128,
                                         2 * 2 * 4,     2 * 4,         0};
  EXPECT_EQ(sizes, expected);
  EXPECT_EQ(*taken, *PackedLayerBytes(model, layer, placement, 0));
}

TEST(MemoryOfADeviceTest, SomeIsKept) {
  EXPECT_EQ(DeviceReserveBytes(1600), 100);
  EXPECT_EQ(DeviceReserveBytes(int64_t{1} << 40), int64_t{2} << 30);
  EXPECT_TRUE(CheckMemoryNeed(1500, 1600, 100).ok());
  const absl::Status status = CheckMemoryNeed(1501, 1600, 100);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("of which 100 bytes"), absl::string_view::npos) << status;
}

TEST(PackedLayerBytesTest, CountsTheRanksExperts) {
  ModelSpec model;
  model.hidden_size = 8;
  model.weight_dtype = DType::kBFloat16;
  LayerSpec layer;
  layer.num_experts = 5;
  layer.intermediate_size = 6;
  const Placement placement = *Placement::Contiguous(5, 2);
  EXPECT_EQ(*PackedLayerBytes(model, layer, placement, 0), 3 * 3 * 8 * 6 * 2);
  EXPECT_EQ(*PackedLayerBytes(model, layer, placement, 1), 2 * 3 * 8 * 6 * 2);
  layer.shared_intermediate_size = 11;  // on every rank
  EXPECT_EQ(*PackedLayerBytes(model, layer, placement, 1), 2 * 3 * 8 * 6 * 2 + 3 * 8 * 11 * 2);
  layer.shared_gated = true;
  EXPECT_EQ(*PackedLayerBytes(model, layer, placement, 0),
            3 * 3 * 8 * 6 * 2 + 3 * 8 * 11 * 2 + 8 * 4);
}

}  // namespace
}  // namespace expertmesh
