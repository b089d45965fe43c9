#include "server/rpc/rendezvous_quota.h"

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

absl::Status CheckLength(const char* field, absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return absl::OkStatus();
  return InvalidFieldError(field, absl::StrCat(text.size(), " bytes"),
                           absl::StrCat("at most ", max_bytes, " bytes"));
}

absl::Status NoRoom(uint64_t epoch, absl::string_view what, int64_t limit) {
  return CallError(ErrorReason::kBuffersExhausted,
                   absl::StrCat("the ranks of epoch ", epoch, " have ", what, " already: at most ",
                                limit, " are taken"));
}

}  // namespace

void RendezvousQuota::BeginEpoch(uint64_t epoch) {
  if (epoch == epoch_) return;
  epoch_ = epoch;
  num_keys_ = num_bytes_ = num_questions_ = 0;
}

absl::Status RendezvousQuota::AdmitSet(uint64_t epoch, absl::string_view key,
                                       absl::string_view value) {
  absl::Status status = CheckLength("key", key, kMaxKeyBytes);
  status.Update(CheckLength("value", value, kMaxValueBytes));
  if (!status.ok()) return status;
  const auto size_bytes = static_cast<int64_t>(key.size() + value.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  BeginEpoch(epoch);
  if (num_keys_ >= kMaxKeysPerRank * ep_size_) {
    return NoRoom(epoch, "left all their keys", kMaxKeysPerRank * ep_size_);
  }
  if (size_bytes > kMaxBytesPerRank * ep_size_ - num_bytes_) {
    return NoRoom(epoch, absl::StrCat("left ", num_bytes_, " bytes"), kMaxBytesPerRank * ep_size_);
  }
  ++num_keys_;
  num_bytes_ += size_bytes;
  return absl::OkStatus();
}

absl::Status RendezvousQuota::AdmitGet(uint64_t epoch, absl::string_view key) {
  if (absl::Status status = CheckLength("key", key, kMaxKeyBytes); !status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  BeginEpoch(epoch);
  const int64_t limit = kMaxQuestionsPerPair * ep_size_ * ep_size_;
  if (num_questions_ >= limit) return NoRoom(epoch, "asked for all their keys", limit);
  ++num_questions_;
  return absl::OkStatus();
}

}  // namespace expertmesh
