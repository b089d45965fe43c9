#ifndef EXPERTMESH_KERNELS_BASE_STEP_LISTS_H_
#define EXPERTMESH_KERNELS_BASE_STEP_LISTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/step_arena.h"
#include "kernels/base/stream.h"

namespace expertmesh {

// The host's lists of one step (indices of rows, weights) on the step's device: those that were
// added cross with the next Send, as one copy, for a copy costs the host as much as a launch
// whatever its size. Where the device is the host nothing is copied. Not thread safe.
class StepLists {
 public:
  // Copies lie in `arena`, of the step's device, and on their way in `host_arena`, of memory that
  // the device reaches: both must outlive what is enqueued, and the lists.
  StepLists(StepArena* arena, StepArena* host_arena) : arena_(arena), host_arena_(host_arena) {}
  StepLists(const StepLists&) = delete;
  StepLists& operator=(const StepLists&) = delete;

  // The list must stay as it is until Send, and its memory must not hold another one later.
  template <class T>
  void Add(absl::Span<T> list) {
    AddBytes(reinterpret_cast<const std::byte*>(list.data()),
             static_cast<int64_t>(list.size() * sizeof(T)));
  }

  // Enqueues the copy of what was added since the last one. Errors of the arenas and of the stream.
  absl::Status Send(Stream& stream);

  // Where the device has a list that was sent, or a part of one; null when it has not.
  template <class T>
  const T* Find(absl::Span<const T> list) const {
    return reinterpret_cast<const T*>(FindBytes(reinterpret_cast<const std::byte*>(list.data()),
                                                static_cast<int64_t>(list.size() * sizeof(T))));
  }

 private:
  struct List {
    const std::byte* host;
    int64_t size_bytes;
    const std::byte* device;  // null: not sent yet
  };

  void AddBytes(const std::byte* list, int64_t size_bytes);
  const std::byte* FindBytes(const std::byte* list, int64_t size_bytes) const;

  StepArena* const arena_;
  StepArena* const host_arena_;
  std::vector<List> lists_;
  size_t num_sent_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_STEP_LISTS_H_
