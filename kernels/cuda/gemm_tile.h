#ifndef EXPERTMESH_KERNELS_CUDA_GEMM_TILE_H_
#define EXPERTMESH_KERNELS_CUDA_GEMM_TILE_H_

#include <cstdint>

#include "kernels/base/dtype.h"

namespace expertmesh {

// Output tiles of the tensor core kernels: kSm90TileWeightRows weight rows by some rows of an
// expert. Every tile runs over the whole of k in steps that depend on the element type alone.
enum class GemmTile : uint8_t {
  kRows16,   // decode: the deepest pipeline of weight loads
  kRows64,   // decode with larger batches
  kRows128,  // prefill
  kRows256,  // prefill, two blocks sharing the rows they load; 16-bit types alone
};
inline constexpr int kSm90TileWeightRows = 128;

int GemmTileRows(GemmTile tile);

struct GemmTileProblem {
  DType dtype = DType::kInvalid;  // of both operands
  int64_t n = 0;                  // weight rows
  int64_t k = 0;
  // Of experts that have rows, rounded up.
  int64_t mean_rows = 0;
};

// A pure function. Never a smaller tile for more rows.
GemmTile ChooseGemmTile(const GemmTileProblem& problem);

// How many of a device's multiprocessors a product runs on when it is to leave `reserved` to
// others: at least half of them, whatever is reserved, and never fewer than a pair of blocks needs.
int GemmMultiprocessors(int present, int reserved);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_GEMM_TILE_H_
