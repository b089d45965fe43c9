#ifndef EXPERTMESH_SERVER_RPC_RENDEZVOUS_QUOTA_H_
#define EXPERTMESH_SERVER_RPC_RENDEZVOUS_QUOTA_H_

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// How much ranks may have an epoch's rendezvous store keep: each leaves some keys and asks for
// those of all others, and a rank that does something else must not fill the control plane's
// memory. Thread safe.
class RendezvousQuota {
 public:
  static constexpr size_t kMaxKeyBytes = 256;
  static constexpr size_t kMaxValueBytes = 64 << 10;
  static constexpr int64_t kMaxKeysPerRank = 4;
  static constexpr int64_t kMaxBytesPerRank = 128 << 10;
  static constexpr int64_t kMaxQuestionsPerPair = 4;

  explicit RendezvousQuota(int32_t ep_size) : ep_size_(ep_size) {}

  // Before a key is set or asked for in the epoch that forms. INVALID_ARGUMENT (INVALID_FIELD) for
  // a key or value that is too long, RESOURCE_EXHAUSTED (BUFFERS_EXHAUSTED) when the epoch's ranks
  // have had their share.
  absl::Status AdmitSet(uint64_t epoch, absl::string_view key, absl::string_view value);
  absl::Status AdmitGet(uint64_t epoch, absl::string_view key);

 private:
  void BeginEpoch(uint64_t epoch);

  const int64_t ep_size_;
  std::mutex mutex_;  // guards what follows, all of `epoch_`
  uint64_t epoch_ = 0;
  int64_t num_keys_ = 0;
  int64_t num_bytes_ = 0;
  int64_t num_questions_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RENDEZVOUS_QUOTA_H_
