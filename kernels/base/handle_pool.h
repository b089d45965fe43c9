#ifndef EXPERTMESH_KERNELS_BASE_HANDLE_POOL_H_
#define EXPERTMESH_KERNELS_BASE_HANDLE_POOL_H_

#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace expertmesh {

// Handles of some library (pointers, such as a device's events), used again and again. Owned by
// shared_ptrs; thread safe; what was taken may outlive whoever owned the pool.
template <typename Handle>
class HandlePool : public std::enable_shared_from_this<HandlePool<Handle>> {
 public:
  // Goes back to the pool with its last reference.
  using Shared = std::shared_ptr<std::remove_pointer_t<Handle>>;

  HandlePool(std::function<absl::StatusOr<Handle>()> make, std::function<void(Handle)> destroy)
      : make_(std::move(make)), destroy_(std::move(destroy)) {}
  ~HandlePool() {
    if (abandoned_) return;
    for (const Handle handle : idle_) destroy_(handle);
  }
  HandlePool(const HandlePool&) = delete;
  HandlePool& operator=(const HandlePool&) = delete;

  // One that is idle, or else a new one, made on the calling thread; the errors of `make`.
  absl::StatusOr<Shared> Take() {
    Handle handle = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        handle = idle_.back();
        idle_.pop_back();
      }
    }
    if (handle == nullptr) {
      absl::StatusOr<Handle> made = make_();
      if (!made.ok()) return made.status();
      handle = *made;
    }
    return Shared(handle, [pool = this->shared_from_this()](Handle returned) {
      const std::lock_guard<std::mutex> lock(pool->mutex_);
      pool->idle_.push_back(returned);
    });
  }

  // Whoever gets to the handles later than all of this may do so at any time: they are never
  // destroyed.
  void Abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    abandoned_ = true;
  }

 private:
  const std::function<absl::StatusOr<Handle>()> make_;
  const std::function<void(Handle)> destroy_;
  std::mutex mutex_;  // guards what follows
  std::vector<Handle> idle_;
  bool abandoned_ = false;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_HANDLE_POOL_H_
