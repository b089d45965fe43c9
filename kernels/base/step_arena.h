#ifndef EXPERTMESH_KERNELS_BASE_STEP_ARENA_H_
#define EXPERTMESH_KERNELS_BASE_STEP_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/buffer.h"

namespace expertmesh {

// All temporary memory of one step on one device: bump allocation, freed as a whole. Not thread
// safe: one step, one issuing thread. Shared ownership (StepArenaPool) lets a response keep the
// bytes that it points at.
class StepArena {
 public:
  explicit StepArena(Allocator* allocator);  // `allocator` must outlive the arena
  ~StepArena();
  StepArena(const StepArena&) = delete;
  StepArena& operator=(const StepArena&) = delete;

  // Aligned to Allocator::kAlignment, not initialized, valid until Reset. Zero bytes give a
  // non-null pointer that must not be read. RESOURCE_EXHAUSTED or INVALID_ARGUMENT (negative) as
  // Allocator::Allocate.
  absl::StatusOr<std::byte*> Allocate(int64_t size_bytes);

  // The same, as `count` elements of T (trivially copyable). Overflow is INVALID_ARGUMENT.
  template <typename T>
  absl::StatusOr<absl::Span<T>> AllocateSpan(int64_t count);

  // Forgets all allocations, keeps the memory as it is: a repeated step asks for none, and finds
  // its allocations at their old addresses, whatever came between, unless memory was short:
  // chunks that a step did not use are given back then. Memory in one piece would be asked for
  // anew, and fresh memory is dear: its pages' first touch took ten times as long as the step that
  // used it. What is kept is at most four times what the largest step allocated.
  void Reset();

  Device device() const { return allocator_->device(); }
  int64_t allocated_bytes() const { return allocated_bytes_; }

 private:
  struct Chunk {
    Buffer buffer;
    int64_t used_bytes = 0;
  };

  absl::Status AddChunk(int64_t min_bytes);
  void ReleaseUnusedChunks();

  Allocator* allocator_;
  std::vector<Chunk> chunks_;
  size_t current_ = 0;  // of chunks_; those before it take no more
  int64_t capacity_bytes_ = 0;
  int64_t allocated_bytes_ = 0;
};

// Arenas in use once and again. Thread safe. Must outlive what it gave out.
class StepArenaPool {
 public:
  explicit StepArenaPool(Allocator* allocator);
  ~StepArenaPool();
  // A reset arena that returns to the pool when its last reference goes.
  std::shared_ptr<StepArena> Acquire();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

template <typename T>
absl::StatusOr<absl::Span<T>> StepArena::AllocateSpan(int64_t count) {
  int64_t size_bytes;
  if (__builtin_mul_overflow(count, static_cast<int64_t>(sizeof(T)), &size_bytes)) {
    return absl::InvalidArgumentError("element count overflows a size in bytes");
  }
  absl::StatusOr<std::byte*> data = Allocate(size_bytes);
  if (!data.ok()) return data.status();
  return absl::Span<T>(reinterpret_cast<T*>(*data), static_cast<size_t>(count));
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_STEP_ARENA_H_
