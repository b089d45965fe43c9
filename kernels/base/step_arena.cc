#include "kernels/base/step_arena.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/address_sanitizer.h"

namespace expertmesh {
namespace {

constexpr int64_t kMinChunkBytes = 64 << 10;
// Idle arenas beyond these give their memory back: a burst of slow readers must not hold it for
// ever.
constexpr size_t kMaxIdleArenas = 16;

alignas(Allocator::kAlignment) constexpr std::byte kEmptyAllocation[Allocator::kAlignment] = {};

}  // namespace

StepArena::StepArena(Allocator* allocator) : allocator_(allocator) {}

StepArena::~StepArena() { ReleaseChunks(); }

void StepArena::ReleaseChunks() {
  for (const Buffer& chunk : chunks_) AllowAccess(chunk.data(), chunk.size_bytes());
  chunks_.clear();
}

absl::StatusOr<std::byte*> StepArena::Allocate(int64_t size_bytes) {
  if (size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("arena allocation of ", size_bytes, " bytes"));
  }
  if (size_bytes == 0) return const_cast<std::byte*>(kEmptyAllocation);
  if (size_bytes > INT64_MAX / 4) {
    return absl::ResourceExhaustedError(absl::StrCat("arena allocation of ", size_bytes, " bytes"));
  }
  const int64_t aligned_bytes =
      (size_bytes + Allocator::kAlignment - 1) / Allocator::kAlignment * Allocator::kAlignment;
  if (chunks_.empty() || chunks_.back().size_bytes() - chunk_used_bytes_ < aligned_bytes) {
    // As much again as there is, so that the number of chunks stays logarithmic.
    const int64_t wanted_bytes = std::max({aligned_bytes, reserve_bytes_, kMinChunkBytes});
    absl::StatusOr<Buffer> chunk = allocator_->Allocate(wanted_bytes);
    if (!chunk.ok() && wanted_bytes > aligned_bytes) chunk = allocator_->Allocate(aligned_bytes);
    if (!chunk.ok()) return chunk.status();
    ForbidAccess(chunk->data(), chunk->size_bytes());
    reserve_bytes_ = std::max(reserve_bytes_, allocated_bytes_ + chunk->size_bytes());
    chunks_.push_back(*std::move(chunk));
    chunk_used_bytes_ = 0;
  }
  std::byte* data = chunks_.back().data() + chunk_used_bytes_;
  AllowAccess(data, size_bytes);
  chunk_used_bytes_ += aligned_bytes;
  allocated_bytes_ += aligned_bytes;
  return data;
}

void StepArena::Reset() {
  if (chunks_.size() > 1) {
    reserve_bytes_ = std::max(reserve_bytes_, allocated_bytes_);
    ReleaseChunks();
  } else if (chunks_.size() == 1) {
    AllowAccess(chunks_[0].data(), chunk_used_bytes_);
    allocator_->Reuse(chunks_[0].data(), chunk_used_bytes_);
    ForbidAccess(chunks_[0].data(), chunks_[0].size_bytes());
  }
  chunk_used_bytes_ = 0;
  allocated_bytes_ = 0;
}

struct StepArenaPool::State {
  Allocator* allocator;
  std::mutex mutex;
  std::vector<std::unique_ptr<StepArena>> idle;
};

StepArenaPool::StepArenaPool(Allocator* allocator) : state_(std::make_shared<State>()) {
  state_->allocator = allocator;
}

StepArenaPool::~StepArenaPool() = default;

std::shared_ptr<StepArena> StepArenaPool::Acquire() {
  std::unique_ptr<StepArena> arena;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->idle.empty()) {
      arena = std::move(state_->idle.back());
      state_->idle.pop_back();
    }
  }
  if (arena == nullptr) arena = std::make_unique<StepArena>(state_->allocator);
  return std::shared_ptr<StepArena>(arena.release(), [state = state_](StepArena* released) {
    std::unique_ptr<StepArena> owned(released);
    owned->Reset();
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (state->idle.size() < kMaxIdleArenas) state->idle.push_back(std::move(owned));
  });
}

}  // namespace expertmesh
