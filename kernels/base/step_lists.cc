#include "kernels/base/step_lists.h"

#include <cstring>

namespace expertmesh {
namespace {

constexpr int64_t kListAlignment = 16;

int64_t Aligned(int64_t size_bytes) {
  return (size_bytes + kListAlignment - 1) / kListAlignment * kListAlignment;
}

}  // namespace

void StepLists::AddBytes(const std::byte* list, int64_t size_bytes) {
  if (size_bytes > 0) lists_.push_back({list, size_bytes, nullptr});
}

absl::Status StepLists::Send(Stream& stream) {
  if (stream.device() == Device{}) {
    for (List& list : lists_) list.device = list.host;
    num_sent_ = lists_.size();
    return absl::OkStatus();
  }
  int64_t total_bytes = 0;
  for (size_t i = num_sent_; i < lists_.size(); ++i) total_bytes += Aligned(lists_[i].size_bytes);
  if (total_bytes == 0) return absl::OkStatus();
  absl::StatusOr<std::byte*> host = host_arena_->Allocate(total_bytes);
  if (!host.ok()) return host.status();
  absl::StatusOr<std::byte*> device = arena_->Allocate(total_bytes);
  if (!device.ok()) return device.status();
  int64_t offset = 0;
  for (; num_sent_ < lists_.size(); ++num_sent_) {
    List& list = lists_[num_sent_];
    std::memcpy(*host + offset, list.host, static_cast<size_t>(list.size_bytes));
    list.device = *device + offset;
    offset += Aligned(list.size_bytes);
  }
  return stream.Copy(*device, *host, total_bytes);
}

const std::byte* StepLists::FindBytes(const std::byte* list, int64_t size_bytes) const {
  if (size_bytes == 0) return nullptr;
  for (const List& sent : lists_) {
    if (sent.device == nullptr || list < sent.host ||
        list + size_bytes > sent.host + sent.size_bytes) {
      continue;
    }
    return sent.device + (list - sent.host);
  }
  return nullptr;
}

}  // namespace expertmesh
