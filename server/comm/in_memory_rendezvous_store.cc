#include "server/comm/in_memory_rendezvous_store.h"

#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "kernels/base/stream.h"

namespace expertmesh {

InMemoryRendezvousStore::~InMemoryRendezvousStore() { RemovePrefix(""); }

absl::Status InMemoryRendezvousStore::Set(absl::string_view key, absl::string_view value) {
  std::vector<Callback> waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[std::string(key)];
    if (entry.set) return absl::AlreadyExistsError(absl::StrCat("key ", key, " has a value"));
    entry.set = true;
    entry.value = std::string(value);
    waiting = std::exchange(entry.waiting, {});
  }
  for (Callback& callback : waiting) callback(std::string(value));
  return absl::OkStatus();
}

absl::StatusOr<std::string> InMemoryRendezvousStore::Get(absl::string_view key,
                                                         absl::Time deadline) {
  // Shared with the callback, which may come after this call has given up.
  struct Answer {
    Event done;
    std::string value;
  };
  auto answer = std::make_shared<Answer>();
  GetAsync(key, [answer](absl::StatusOr<std::string> value) {
    const absl::Status status = value.status();
    if (status.ok()) answer->value = *std::move(value);
    answer->done.Signal(status);
  });
  if (absl::Status status = answer->done.Wait(deadline); !status.ok()) {
    if (answer->done.done()) return status;
    return absl::DeadlineExceededError(absl::StrCat("key ", key, " has no value"));
  }
  return std::move(answer->value);
}

void InMemoryRendezvousStore::GetAsync(absl::string_view key, Callback callback) {
  std::string value;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[std::string(key)];
    if (!entry.set) {
      entry.waiting.push_back(std::move(callback));
      return;
    }
    value = entry.value;
  }
  callback(std::move(value));
}

void InMemoryRendezvousStore::RemovePrefix(absl::string_view prefix) {
  std::vector<Callback> waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto entry = entries_.lower_bound(prefix);
    while (entry != entries_.end() && absl::StartsWith(entry->first, prefix)) {
      for (Callback& callback : entry->second.waiting) waiting.push_back(std::move(callback));
      entry = entries_.erase(entry);
    }
  }
  for (Callback& callback : waiting) callback(absl::CancelledError("the epoch was given up"));
}

}  // namespace expertmesh
