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

StepArena::~StepArena() {
  for (const Chunk& chunk : chunks_) AllowAccess(chunk.buffer.data(), chunk.buffer.size_bytes());
}

void StepArena::ReleaseUnusedChunks() {
  std::erase_if(chunks_, [this](const Chunk& chunk) {
    if (chunk.used_bytes > 0) return false;
    AllowAccess(chunk.buffer.data(), chunk.buffer.size_bytes());
    capacity_bytes_ -= chunk.buffer.size_bytes();
    return true;
  });
}

absl::Status StepArena::AddChunk(int64_t min_bytes) {
  // As much again as there is, so that the number of chunks stays logarithmic.
  absl::StatusOr<Buffer> buffer =
      allocator_->Allocate(std::max({min_bytes, capacity_bytes_, kMinChunkBytes}));
  if (!buffer.ok()) {
    ReleaseUnusedChunks();
    buffer = allocator_->Allocate(min_bytes);
  }
  if (!buffer.ok()) {
    current_ = chunks_.size();
    return buffer.status();
  }
  ForbidAccess(buffer->data(), buffer->size_bytes());
  capacity_bytes_ += buffer->size_bytes();
  current_ = chunks_.size();
  chunks_.push_back({*std::move(buffer)});
  return absl::OkStatus();
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
  const auto fits = [aligned_bytes](const Chunk& chunk) {
    return chunk.buffer.size_bytes() - chunk.used_bytes >= aligned_bytes;
  };
  while (current_ < chunks_.size() && !fits(chunks_[current_])) ++current_;
  if (current_ == chunks_.size()) {
    if (absl::Status status = AddChunk(aligned_bytes); !status.ok()) return status;
  }
  Chunk& chunk = chunks_[current_];
  std::byte* data = chunk.buffer.data() + chunk.used_bytes;
  AllowAccess(data, size_bytes);
  chunk.used_bytes += aligned_bytes;
  allocated_bytes_ += aligned_bytes;
  return data;
}

void StepArena::Reset() {
  for (Chunk& chunk : chunks_) {
    if (chunk.used_bytes == 0) continue;
    AllowAccess(chunk.buffer.data(), chunk.used_bytes);
    allocator_->Reuse(chunk.buffer.data(), chunk.used_bytes);
    ForbidAccess(chunk.buffer.data(), chunk.buffer.size_bytes());
    chunk.used_bytes = 0;
  }
  current_ = 0;
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
