#include "server/rank/output_memory.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

struct OutputMemory {
  explicit OutputMemory(std::shared_ptr<Allocator> memory)
      : allocator(std::move(memory)), arena(allocator.get()) {}
  const std::shared_ptr<Allocator> allocator;
  StepArena arena;
};

}  // namespace

absl::StatusOr<std::byte*> AllocateRows(StepArena& arena, int64_t num_rows, int64_t hidden_size,
                                        DType dtype) {
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({num_rows, hidden_size, DTypeBytes(dtype)});
  if (!size_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(num_rows, " rows of ", hidden_size, " elements do not fit any memory"));
  }
  return arena.Allocate(*size_bytes);
}

absl::StatusOr<ShardOutput> AllocateOutput(std::shared_ptr<Allocator> memory, int64_t num_rows,
                                           int64_t hidden_size, DType dtype) {
  const auto own = std::make_shared<OutputMemory>(std::move(memory));
  const absl::StatusOr<std::byte*> rows = AllocateRows(own->arena, num_rows, hidden_size, dtype);
  if (!rows.ok()) return rows.status();
  ShardOutput output;
  output.arena = std::shared_ptr<StepArena>(own, &own->arena);
  output.rows = *rows;
  output.num_rows = num_rows;
  return output;
}

}  // namespace expertmesh
