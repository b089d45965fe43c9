#include "kernels/cuda/gemm_tile.h"

#include <algorithm>

namespace expertmesh {

int GemmTileRows(GemmTile tile) {
  switch (tile) {
    case GemmTile::kRows16:
      return 16;
    case GemmTile::kRows64:
      return 64;
    case GemmTile::kRows128:
      return 128;
    case GemmTile::kRows256:
      return 256;
  }
  return 0;
}

GemmTile ChooseGemmTile(const GemmTileProblem& problem) {
  // Below about 200 rows an expert's weights take longer to arrive than to multiply, so there the
  // tile only has to hold the rows without crowding out the stages that weights arrive in.
  if (problem.mean_rows <= 16 && problem.dtype != DType::kFloat16) return GemmTile::kRows16;
  if (problem.mean_rows <= 64) return GemmTile::kRows64;
  // A second, mostly empty tile of 256 rows would cost more than sharing loads saves; blocks come
  // in pairs along n, so that an odd number of tiles there leaves one idle; and nothing is
  // multiplied while such a tile is stored (tiles of 128 take turns), which is a small part of long
  // sums alone.
  const bool pairs = problem.n % (2 * kSm90TileWeightRows) == 0;
  if (problem.mean_rows >= 384 && problem.k >= 4096 && pairs && problem.dtype == DType::kBFloat16) {
    return GemmTile::kRows256;
  }
  return GemmTile::kRows128;
}

int GemmMultiprocessors(int present, int reserved) {
  const int least = std::max(std::min(present, 2), (present + 1) / 2);
  return std::max(least, present - std::max(reserved, 0));
}

}  // namespace expertmesh
