#include "kernels/cuda/verified_upload.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"

namespace expertmesh {
namespace {

// A chunk takes a millisecond; a device that has not moved one by then never will.
constexpr absl::Duration kChunkTimeout = absl::Minutes(2);

// One of two chunks that take turns: one is packed while the other one is on its way.
struct Chunk {
  std::unique_ptr<CudaStream> stream;
  Buffer packed;
  Buffer read_back;
  int64_t offset = 0;  // from params.to
  int64_t size_bytes = 0;
};

absl::Status Finish(Chunk& chunk) {
  if (chunk.size_bytes == 0) return absl::OkStatus();
  absl::Status status = chunk.stream->Wait(SteadyNow() + kChunkTimeout);
  if (!status.ok()) return status;
  const int64_t size_bytes = std::exchange(chunk.size_bytes, 0);
  if (std::memcmp(chunk.packed.data(), chunk.read_back.data(), static_cast<size_t>(size_bytes)) ==
      0) {
    return absl::OkStatus();
  }
  const std::byte* const first = chunk.packed.data();
  const std::byte* const differs =
      std::mismatch(first, first + size_bytes, chunk.read_back.data()).first;
  return absl::DataLossError(
      absl::StrCat("upload: byte ", chunk.offset + (differs - first), " was read back as another"));
}

}  // namespace

absl::Status UploadVerified(
    const VerifiedUploadParams& params,
    absl::FunctionRef<void(int64_t first_row, int64_t num_rows, std::byte* memory)> pack) {
  if (params.num_rows == 0 || params.row_bytes == 0) return absl::OkStatus();
  const int64_t rows_per_chunk =
      std::clamp<int64_t>(params.chunk_bytes / params.row_bytes, 1, params.num_rows);
  Chunk chunks[2];
  for (Chunk& chunk : chunks) {
    chunk.stream = params.streams->NewStream();
    for (Buffer* buffer : {&chunk.packed, &chunk.read_back}) {
      absl::StatusOr<Buffer> memory =
          params.allocators.pinned->Allocate(rows_per_chunk * params.row_bytes);
      if (!memory.ok()) return memory.status();
      *buffer = *std::move(memory);
    }
  }
  absl::Status status;
  int64_t turn = 0;
  for (int64_t row = 0; row < params.num_rows && status.ok(); row += rows_per_chunk, ++turn) {
    Chunk& chunk = chunks[turn % 2];
    status = Finish(chunk);
    if (!status.ok()) break;
    const int64_t num_rows = std::min(rows_per_chunk, params.num_rows - row);
    pack(row, num_rows, chunk.packed.data());
    chunk.offset = row * params.row_bytes;
    chunk.size_bytes = num_rows * params.row_bytes;
    // What is compared came from the device: not left over from a chunk before.
    std::memset(chunk.read_back.data(), ~static_cast<int>(chunk.packed.data()[0]) & 0xff,
                static_cast<size_t>(chunk.size_bytes));
    std::byte* const to = params.to + chunk.offset;
    status = chunk.stream->Copy(to, chunk.packed.data(), chunk.size_bytes);
    if (status.ok()) status = chunk.stream->Copy(chunk.read_back.data(), to, chunk.size_bytes);
  }
  for (Chunk& chunk : chunks) {
    if (status.ok()) status = Finish(chunk);
  }
  // Before the memory that their work names.
  for (Chunk& chunk : chunks) chunk.stream.reset();
  return status;
}

}  // namespace expertmesh
