#include "server/rpc/rendezvous_quota.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

void ExpectReason(const absl::Status& status, ErrorReason reason) {
  const std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  ASSERT_TRUE(details.has_value()) << status;
  EXPECT_EQ(details->reason, reason) << status;
}

TEST(RendezvousQuotaTest, KeysAndValuesHaveALength) {
  RendezvousQuota quota(2);
  const std::string long_key(257, 'k'), long_value((64 << 10) + 1, 'v');
  ExpectReason(quota.AdmitSet(1, long_key, "v"), ErrorReason::kInvalidField);
  ExpectReason(quota.AdmitGet(1, long_key), ErrorReason::kInvalidField);
  ExpectReason(quota.AdmitSet(1, "key", long_value), ErrorReason::kInvalidField);
  EXPECT_TRUE(quota.AdmitSet(1, long_key.substr(1), long_value.substr(1)).ok());
  EXPECT_TRUE(quota.AdmitGet(1, long_key.substr(1)).ok());
}

TEST(RendezvousQuotaTest, AnEpochHasItsShareAndTheNextOneItsOwn) {
  RendezvousQuota quota(3);
  for (const uint64_t epoch : {1, 2}) {
    for (int i = 0; i < 12; ++i) EXPECT_TRUE(quota.AdmitSet(epoch, "key", "value").ok());
    ExpectReason(quota.AdmitSet(epoch, "key", "value"), ErrorReason::kBuffersExhausted);
    for (int i = 0; i < 36; ++i) EXPECT_TRUE(quota.AdmitGet(epoch, "key").ok());
    ExpectReason(quota.AdmitGet(epoch, "key"), ErrorReason::kBuffersExhausted);
  }
  const std::string large(60 << 10, 'v');
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(quota.AdmitSet(3, "key", large).ok());
  ExpectReason(quota.AdmitSet(3, "key", large), ErrorReason::kBuffersExhausted);
  EXPECT_TRUE(quota.AdmitSet(3, "key", "little").ok());
}

}  // namespace
}  // namespace expertmesh
