#include "kernels/cuda/gemm_tile.h"

#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(GemmTileTest, Table) {
  struct Row {
    DType dtype;
    int64_t n;
    int64_t mean_rows;
    GemmTile tile;
  };
  const std::vector<Row> rows = {
      // DeepSeek-V3's rank, decode to prefill.
      {DType::kBFloat16, 4096, 1, GemmTile::kRows16},
      {DType::kBFloat16, 4096, 16, GemmTile::kRows16},
      {DType::kBFloat16, 4096, 17, GemmTile::kRows64},
      {DType::kBFloat16, 4096, 64, GemmTile::kRows64},
      {DType::kBFloat16, 4096, 128, GemmTile::kRows128},
      {DType::kBFloat16, 4096, 383, GemmTile::kRows128},
      {DType::kBFloat16, 4096, 384, GemmTile::kRows256},
      {DType::kBFloat16, 7168, 8192, GemmTile::kRows256},
      // An odd number of weight tiles has no pairs.
      {DType::kBFloat16, 4096 + 128, 8192, GemmTile::kRows128},
      {DType::kBFloat16, 100, 8192, GemmTile::kRows128},
      {DType::kFloat8E4M3, 4096, 1, GemmTile::kRows16},
      {DType::kFloat8E4M3, 4096, 64, GemmTile::kRows64},
      {DType::kFloat8E4M3, 4096, 8192, GemmTile::kRows128},
      {DType::kFloat16, 4096, 1, GemmTile::kRows64},
      {DType::kFloat16, 4096, 8192, GemmTile::kRows128},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(ChooseGemmTile({row.dtype, row.n, 7168, row.mean_rows}), row.tile)
        << DTypeName(row.dtype) << " n " << row.n << " rows " << row.mean_rows;
  }
}

TEST(GemmTileTest, MoreRowsNeverTakeASmallerTile) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    for (const int64_t n : {8, 128, 256, 384, 4096, 14336}) {
      int before = 0;
      for (int64_t rows = 1; rows < 20000; rows += 1 + rows / 50) {
        const int tile_rows = GemmTileRows(ChooseGemmTile({dtype, n, 4096, rows}));
        EXPECT_GE(tile_rows, before) << DTypeName(dtype) << " n " << n << " rows " << rows;
        before = tile_rows;
      }
    }
  }
}

TEST(GemmMultiprocessorsTest, LeavesWhatIsReservedButNeverMostOfThem) {
  EXPECT_EQ(GemmMultiprocessors(132, 0), 132);
  EXPECT_EQ(GemmMultiprocessors(132, 8), 124);
  EXPECT_EQ(GemmMultiprocessors(132, 66), 66);
  EXPECT_EQ(GemmMultiprocessors(132, 67), 66);
  EXPECT_EQ(GemmMultiprocessors(132, 1000), 66);
  EXPECT_EQ(GemmMultiprocessors(132, -1), 132);
  EXPECT_EQ(GemmMultiprocessors(3, 8), 2);
  EXPECT_EQ(GemmMultiprocessors(2, 8), 2);
  EXPECT_EQ(GemmMultiprocessors(1, 8), 1);
}

TEST(GemmTileTest, ShortSumsAreStoredWhileOthersAreMultiplied) {
  for (const int64_t k : {128, 256, 1024, 2048}) {
    EXPECT_EQ(ChooseGemmTile({DType::kBFloat16, 4096, k, 5000}), GemmTile::kRows128) << k;
  }
  EXPECT_EQ(ChooseGemmTile({DType::kBFloat16, 4096, 4096, 5000}), GemmTile::kRows256);
  for (const int64_t rows : {1, 40, 100}) {
    for (const int64_t k : {128, 2048, 18432}) {
      EXPECT_EQ(ChooseGemmTile({DType::kBFloat16, 4096, k, rows}),
                ChooseGemmTile({DType::kBFloat16, 4096, 7168, rows}));
    }
  }
}

}  // namespace
}  // namespace expertmesh
